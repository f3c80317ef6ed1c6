"""`dedup explain` as it is typed, on the topics of a real worker; and when something is planted in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dedup.cli.main import create_app
from dedup.errors import SettingsError, VerificationFailed
from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job
from tests.integration.planting import BASE_MS, Sent, send
from tests.integration.workload import Event

pytestmark = pytest.mark.broker

SHORT = {"guard_period": "10s", "grace": "10s"}


@pytest.fixture
def app() -> typer.Typer:
    return create_app()


def event(name: str, second: int, partition: int = 0) -> Event:
    value = json.dumps({"id": name, "at": second}).encode()
    return Event(partition, value, BASE_MS + 1_000 * second, name.encode())


def typed(app: typer.Typer, job: Job, name: str, *options: str) -> Any:
    arguments = ["explain", str(job.topology_file), name, "--config", str(job.config_file), *options]
    return CliRunner().invoke(app, arguments)


def told(app: typer.Typer, job: Job, name: str) -> dict[str, Any]:
    result = typed(app, job, name, "--json")
    assert result.exception is None, (result.output, result.exception)
    return json.loads(result.stdout)


EVENTS = [event("a", 0), event("b", 1), event("a", 5), event("c", 100), event("a", 88), event("a", 95)]


def test_each_record_of_an_id_is_explained(
    app: typer.Typer, make_job: MakeJob, topic_names: Callable[[str], str]
) -> None:
    twice = topic_names("twice")
    job = make_job(document={**SHORT, "duplicates": twice})
    job.admin.create_topic(twice, 2, {"retention.ms": "-1"})
    job.send(EVENTS)
    job.finish()
    found = told(app, job, "a")
    place = f"{job.name}-in/0 offset"
    assert [(each["place"], each["verdict"]) for each in found["records"]] == [
        (f"{place} 0", "unique"),
        (f"{place} 2", "duplicate"),
        (f"{place} 4", "late"),
        (f"{place} 5", "unique"),
    ]
    first, repeated, late, again = found["records"]
    assert repeated["of"] == f"{place} 0"
    assert first["went"] == [f"{job.name}-out/0 offset 0"]
    assert repeated["went"][0].startswith(f"{twice}/0 offset")
    assert late["went"][0].startswith(f"{job.name}-out.late/0 offset")
    assert again["went"][0].startswith(f"{job.name}-out/0 offset")
    assert [(each["source"], each["live"]) for each in found["sightings"]][-1] == (f"{place} 5", True)
    assert found["contradictions"] == 0
    words = typed(app, job, "a").output
    assert f"repeats {place} 0, 5s away; the guard period is 10s" in words
    assert "12s behind stream time" in words
    assert "guarded until" in words
    never = typed(app, job, "never")
    assert never.exception is None
    assert "no record with the ID 'never'" in never.output


def test_what_contradicts_the_rule_is_named(app: typer.Typer, make_job: MakeJob) -> None:
    job = make_job(document=SHORT)
    job.send(EVENTS)
    job.finish()
    again = EVENTS[2]
    assert again.value is not None
    send(job.kafka, [Sent(f"{job.name}-out", 0, again.key, again.value + b" ", [], again.timestamp_ms)])
    result = typed(app, job, "a")
    assert isinstance(result.exception, VerificationFailed)
    assert "has this ID, too" in result.output
    assert typed(app, job, "b").exception is None


def test_behind_a_repartition_topic_the_log_is_named_too(
    app: typer.Typer, make_job: MakeJob, topic_names: Callable[[str], str]
) -> None:
    name = topic_names("hops")
    job = make_job(name=name, document={**SHORT, "source": {"topics": [f"{name}-in"]}})
    job.send([event("a", 0, 0), event("a", 3, 1), event("b", 4, 1)])
    job.finish()
    found = told(app, job, "a")
    assert sorted(each["verdict"] for each in found["records"]) == ["duplicate", "unique"]
    assert all(each["log_place"].startswith(f"{name}.repartition/") for each in found["records"])
    assert len(found["sightings"]) == 1


def test_what_can_be_no_id_is_refused(app: typer.Typer, make_job: MakeJob) -> None:
    job = make_job(document={"tracking_id": {"fields": ["shop", "order"]}})
    result = typed(app, job, "no list")
    assert isinstance(result.exception, SettingsError)
