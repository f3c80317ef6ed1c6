"""Jobs for the tests of whole workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.brokers import Admin, RunningKafka
from tests.integration.fleet import Job

MakeJob = Callable[..., Job]


@pytest.fixture
def make_job(kafka: RunningKafka, admin: Admin, tmp_path: Path, topic_names: Callable[[str], str]) -> Iterator[MakeJob]:
    """Return a function that makes a job with names of its own; its workers are gone when the test ends."""
    jobs: list[Job] = []

    def make(**options: Any) -> Job:
        name = options.pop("name", None) or topic_names("job")
        options.setdefault("directory", tmp_path / name)
        job = Job(options.pop("kafka", kafka), options.pop("admin", admin), name=name, **options)
        jobs.append(job)
        return job

    yield make
    for job in jobs:
        job.end()


@pytest.fixture
def job(make_job: MakeJob) -> Job:
    """Return a job whose two source partitions hold equal IDs already."""
    return make_job()
