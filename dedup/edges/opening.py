"""A database by its address."""

from __future__ import annotations

from dedup.edges import sqlite
from dedup.edges.database import Connection, shown
from dedup.errors import Problem, SettingsError

POSTGRES: tuple[str, ...] = ("postgresql://", "postgres://")


def connect(url: str, *, read_only: bool = False) -> Connection:
    """Return a new connection. Raises SettingsError for an address of no database, DatabaseAway where none answers."""
    if url.startswith(sqlite.PREFIX):
        return sqlite.SqliteConnection(url, read_only=read_only)
    if url.startswith(POSTGRES):
        try:
            from dedup.edges.postgres import PostgresConnection  # noqa: PLC0415  # only where it is installed
        except ModuleNotFoundError as error:
            text = "PostgreSQL needs the package psycopg: pip install -r requirements-postgres.lock"
            raise SettingsError([Problem("url", text)]) from error
        return PostgresConnection(url)
    raise SettingsError(
        [Problem("url", f"{shown(url)!r} is neither sqlite:///FILE nor postgresql://USER@HOST/DATABASE")]
    )
