"""Opens the database that a URL names: SQLite or PostgreSQL."""

from __future__ import annotations

from dedup.connect import sqlite
from dedup.connect.database import DatabaseConnection, shown
from dedup.errors import Problem, SettingsError

POSTGRES: tuple[str, ...] = ("postgresql://", "postgres://")


def connect(url: str, *, read_only: bool = False) -> DatabaseConnection:
    """Return a new connection. Raises SettingsError for another kind of URL, DatabaseAway if there is no response."""
    if url.startswith(sqlite.PREFIX):
        return sqlite.SqliteConnection(url, read_only=read_only)
    if url.startswith(POSTGRES):
        try:
            from dedup.connect.postgres import PostgresConnection  # noqa: PLC0415  # only where it is installed
        except ModuleNotFoundError as error:
            text = "PostgreSQL needs the package psycopg: pip install -r requirements-postgres.lock"
            raise SettingsError([Problem("url", text)]) from error
        return PostgresConnection(url)
    raise SettingsError(
        [Problem("url", f"{shown(url)!r} is neither sqlite:///FILE nor postgresql://USER@HOST/DATABASE")]
    )
