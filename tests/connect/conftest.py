"""A stage for each test, and a PostgreSQL for those that ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from tests.brokers import Admin, RunningKafka
from tests.connect.stage import Stage
from tests.spark.postgres import running_postgres


@pytest.fixture
def stage(kafka: RunningKafka, admin: Admin, tmp_path: Path, topic_names: Callable[[str], str]) -> Iterator[Stage]:
    """Return a stage whose processes are gone when the test ends."""
    made = Stage(kafka, admin, tmp_path, topic_names("edge"))
    yield made
    made.end()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """Return the address of a real PostgreSQL, with user and password."""
    with running_postgres() as server:
        yield server.url.replace("jdbc:postgresql://", f"postgresql://dedup:{server.password}@")


@pytest.fixture
def postgres(postgres_server: str, topic_names: Callable[[str], str]) -> str:
    """Return the address of a database of this test's own."""
    name = topic_names("db").replace("-", "_")
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    return postgres_server.rpartition("/")[0] + f"/{name}"
