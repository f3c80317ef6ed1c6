"""`dedup doctor` on a real broker with TLS, SASL and ACLs: each cause has its layer, and only its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.brokers import SINCE_3_5
from tests.chaos import secured as security
from tests.chaos.secured import PASSWORD, USER, Secured, as_client, bindings, grant, withdraw
from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job, until

pytestmark = [pytest.mark.broker, SINCE_3_5]
secured, kafka, admin = security.secured, security.kafka, security.admin


def dedup(*arguments: str, code: int, secret: str = PASSWORD) -> str:
    command = [sys.executable, "-c", "from dedup.cli.main import main; main()", *arguments]
    environ = os.environ | {"WORKER_PASSWORD": secret}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == code, done.stdout + done.stderr
    assert secret not in done.stdout + done.stderr
    return done.stdout


def symptoms(job: Job, *, code: int, secret: str = PASSWORD) -> list[dict[str, str]]:
    arguments = ("doctor", str(job.topology_file), "--json", "--config", str(job.config_file))
    found: list[dict[str, str]] = json.loads(dedup(*arguments, code=code, secret=secret))["symptoms"]
    return found


CASES: dict[str, tuple[str, str, Callable[[Secured], tuple[str, dict[str, Any]]]]] = {
    "unknown name": ("DNS", "not known here", lambda b: ("no-such-host.invalid:9093", b.sasl())),
    "nothing there": ("TCP", "nothing can be reached", lambda b: ("127.0.0.1:1", b.sasl())),
    "untrusted CA": (
        "TLS",
        "not signed by a CA",
        lambda b: (f"127.0.0.1:{b.sasl_port}", b.sasl(ca_file=b.path("stranger.pem"))),
    ),
    "plaintext to TLS": ("TLS", "speaks TLS", lambda b: (f"127.0.0.1:{b.sasl_port}", {"protocol": "PLAINTEXT"})),
    "no SASL": (
        "authentication",
        "requires SASL",
        lambda b: (f"127.0.0.1:{b.sasl_port}", {"protocol": "SSL", "ca_file": b.path("ca.pem")}),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_cause_has_its_layer(make_job: MakeJob, secured: Secured, case: str) -> None:
    layer, says, where = CASES[case]
    job = make_job()
    as_client(job, *where(secured))
    (found,) = symptoms(job, code=5)
    assert found["layer"] == layer
    assert says in found["problem"]
    assert found["remedy"]


def test_a_wrong_password_is_a_matter_of_authentication(make_job: MakeJob, secured: Secured) -> None:
    job = make_job()
    as_client(job, f"127.0.0.1:{secured.sasl_port}", secured.sasl())
    (found,) = symptoms(job, code=5, secret="canary-wrong-31f0")
    assert (found["layer"], "refuses the SCRAM-SHA-512 credentials" in found["problem"]) == ("authentication", True)


def test_permissions_that_are_missing_are_named_one_by_one(make_job: MakeJob, secured: Secured) -> None:
    job = make_job()
    dedup("apply", str(job.topology_file), "--set", f"brokers={secured.plaintext}", code=0)
    principal = f"User:{USER}"
    listed = dedup("apply", str(job.topology_file), "--acls", "--json", "--config", str(job.config_file), code=0)
    rows = json.loads(listed)["permissions"]
    as_client(job, f"127.0.0.1:{secured.sasl_port}", secured.sasl())
    found = symptoms(job, code=5)
    assert {each["layer"] for each in found} == {"ACL"}
    assert len(found) == len(rows)

    wanted = bindings(rows, principal)
    grant(job.admin.client, wanted)
    until(lambda: "ACL: ok" in said(job), lambda: said(job))
    assert "wrong" not in said(job)
    taken = {"resource": "topic", "name": job.output, "pattern": "literal", "operations": ["Write"]}
    withdraw(job.admin.client, bindings([taken], principal)[0])
    until(lambda: f"lacks Write on topic {job.output}" in said(job), lambda: said(job))
    (only,) = symptoms(job, code=5)
    assert only["problem"] == f"this principal lacks Write on topic {job.output}"


def said(job: Job) -> str:
    command = [sys.executable, "-c", "from dedup.cli.main import main; main()", "doctor", str(job.topology_file)]
    command += ["--config", str(job.config_file)]
    environ = os.environ | {"WORKER_PASSWORD": PASSWORD}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environ).stdout


def test_topics_come_last(make_job: MakeJob, secured: Secured) -> None:
    job = make_job()
    found = symptoms(job, code=0)
    assert {(each["layer"], each["level"]) for each in found} == {("topics", "warning")}
    assert f"Topic '{job.name}.changelog' does not exist" in " ".join(each["problem"] for each in found)
    text = job.topology_file.read_text(encoding="utf-8").replace(f'"{job.name}-in"', '"not-there"')
    job.topology_file.write_text(text, encoding="utf-8")
    (wrong,) = symptoms(job, code=3)
    assert "source topic 'not-there' does not exist" in wrong["problem"]


def test_no_running_worker_is_disturbed(make_job: MakeJob, secured: Secured) -> None:
    job = make_job()
    worker = job.start()
    worker.until_logged("running from offset", times=job.partitions)
    # The output was not made by `apply`: its largest record is another, which is a warning.
    assert {(each["layer"], each["level"]) for each in symptoms(job, code=0)} == {("topics", "warning")}
    assert worker.stop() == 0
    assert "fenced" not in worker.log
