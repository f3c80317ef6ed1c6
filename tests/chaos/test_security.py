"""TLS, SASL, mTLS and ACLs on a real broker: who is let in, what is said to who is not, and that no secret is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AclBinding, ResourceType  # type: ignore[attr-defined]  # exported, undeclared

from dedup.errors import BrokerUnavailable
from dedup.settings import load_settings
from dedup.verify.verifier import verify
from tests.chaos import secured as security
from tests.chaos.secured import CERTIFIED, PASSWORD, USER, Secured, as_client, bindings, grant, token, withdraw
from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job, Worker, until
from tests.integration.watch import Watch
from tests.integration.workload import BASE_MS, Event, endless, workload

pytestmark = pytest.mark.broker
secured, kafka, admin = security.secured, security.kafka, security.admin

REFUSED = 5
PAYLOAD = "canary-payload-51d2"
SECRETS = {"WORKER_PASSWORD": PASSWORD}


def dedup(*arguments: str, code: int = 0) -> str:
    """Return what a command of dedup prints; all of it with an exit code that is not 0."""
    command = [sys.executable, "-c", "from dedup.cli.main import main; main()", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | SECRETS)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stdout + done.stderr


def allowed(job: Job, principal: str) -> list[AclBinding]:
    """The topics are made by an administrator, and the list that dedup prints is in force; return it."""
    dedup("apply", str(job.topology_file), "--set", f"brokers={job.kafka.bootstrap}")
    text = dedup(
        "apply", str(job.topology_file), "--acls", "--json", "--principal", principal, "--config", str(job.config_file)
    )
    listed = json.loads(text)
    assert listed["principal"] == principal
    wanted = bindings(listed["permissions"], principal)
    grant(job.admin.client, wanted)
    return wanted


WAYS: dict[str, tuple[str, Callable[[Secured], tuple[str, dict[str, Any]]]]] = {
    "SCRAM-SHA-512": (USER, lambda broker: (f"127.0.0.1:{broker.sasl_port}", broker.sasl())),
    "PLAIN": (USER, lambda broker: (f"127.0.0.1:{broker.sasl_port}", broker.sasl("PLAIN"))),
    "OAUTHBEARER": (
        USER,
        lambda broker: (
            f"127.0.0.1:{broker.sasl_port}",
            broker.sasl("OAUTHBEARER", username=None, password="${env:WORKER_TOKEN}"),
        ),
    ),
    "mTLS": (CERTIFIED, lambda broker: (f"127.0.0.1:{broker.mtls_port}", broker.mtls())),
}


@pytest.mark.parametrize(("way", "hops"), [*((way, "direct") for way in WAYS), ("SCRAM-SHA-512", "repartitioned")])
def test_exactly_once_with_least_privilege(make_job: MakeJob, secured: Secured, way: str, hops: str) -> None:
    """With the list that `dedup apply --acls` prints and no more a worker is exact, through a SIGKILL, too."""
    user, reach = WAYS[way]
    name = f"least-{way.lower()}-{hops}"
    document = {"duplicates": f"{name}-dup"} if hops == "direct" else {"source": {"topics": [f"{name}-in"]}}
    job = make_job(name=name, document=document, config={"topics": {"create": False}})
    allowed(job, f"User:{user}")
    as_client(job, *reach(secured))
    environ = SECRETS | {"WORKER_TOKEN": token()}
    events = workload(150, 2_000)
    with Watch(job):
        dying = job.start(crash_at="before_end:3", environ=environ)
        for at in range(0, 1_000, 50):
            job.send(events[at : at + 50])
            until(lambda: not dying.running or job.all_committed(), "judged or dead")
        assert dying.wait() == 137, dying.log
        job.send(events[1_000:])
        worker = job.finish(environ=environ)
        assert "refused" not in worker.log, worker.log
    job.judge()
    assert_readable(job, user, environ)


def assert_readable(job: Job, user: str, environ: dict[str, str]) -> None:
    """The verifier logs in the same way; it needs to read the output, which a worker must not."""
    settings = load_settings(job.config_file, [], environ)
    written = [row for row in job.topology.written_topics if row != job.topology.changelog_topic]
    rows = [{"resource": "topic", "name": name, "pattern": "literal", "operations": ["Read"]} for name in written]
    rows.append({"resource": "group", "name": f"{job.name}.reset", "pattern": "literal", "operations": ["Describe"]})
    grant(job.admin.client, bindings(rows, f"User:{user}"))
    report = verify(job.topology, settings)
    assert report.passed, report.samples


def test_verify_does_not_take_a_topic_for_absent_that_it_may_not_describe(make_job: MakeJob, secured: Secured) -> None:
    """Was: its records counted as lost."""
    job = make_job(name="undescribed")
    granted = allowed(job, f"User:{USER}")
    as_client(job, f"127.0.0.1:{secured.sasl_port}", secured.sasl())
    job.send([Event(0, b"no json", BASE_MS), *workload(150, 20)])
    job.finish(environ=SECRETS)
    for each in granted:
        if each.name == job.topology.dead_letter:
            withdraw(job.admin.client, each)
    settings = load_settings(job.config_file, [], SECRETS)
    with pytest.raises(BrokerUnavailable, match=r"listing the topics .*[Aa]uthorization"):
        verify(job.topology, settings)


@pytest.mark.parametrize("which", ["Write", "Read", "changelog", "transactional-id", "group"])
def test_f28_a_permission_withdrawn_while_running(make_job: MakeJob, secured: Secured, which: str) -> None:
    """The worker ends loudly and commits nothing past it; with the permission back nothing is lost or doubled."""
    job = make_job(name=f"withdrawn-{which.lower()}")
    principal = f"User:{USER}"
    wanted = {
        "Write": [{"resource": "topic", "name": job.output, "pattern": "literal", "operations": ["Write"]}],
        "Read": [
            {"resource": "topic", "name": job.topology.source.topics[0], "pattern": "literal", "operations": ["Read"]}
        ],
        "changelog": [
            {"resource": "topic", "name": job.topology.changelog_topic, "pattern": "literal", "operations": ["Write"]}
        ],
        "transactional-id": [
            {"resource": "transactional-id", "name": f"{job.name}.", "pattern": "prefixed", "operations": ["Write"]}
        ],
        "group": [{"resource": "group", "name": job.name, "pattern": "literal", "operations": ["Read"]}],
    }
    allowed(job, principal)
    (taken,) = bindings(wanted[which], principal)
    as_client(job, f"127.0.0.1:{secured.sasl_port}", secured.sasl())
    with Watch(job):
        worker = job.start(environ=SECRETS)
        with job.stream(endless(151), per_s=1_000):
            job.until_progress(300)
            withdraw(job.admin.client, taken)
            assert worker.wait() == REFUSED, worker.log
        assert "Traceback" not in worker.log.rpartition("running from offset")[2].rpartition("\n")[2]
        assert "Authorization" in worker.log, worker.log
        grant(job.admin.client, [taken])
        job.finish(environ=SECRETS)
    job.judge()


def refused(job: Job, address: str, how: dict[str, Any], *, secret: str = PASSWORD) -> Worker:
    """A worker that is to reach the broker so ends by itself, at once, with one sentence and no secret in it."""
    as_client(job, address, how)
    before = job.written()
    worker = job.start(environ=SECRETS | {"WORKER_PASSWORD": secret}, settings=["log.level=debug"])
    assert worker.wait() == REFUSED, worker.log
    assert "Traceback" not in worker.log
    assert PASSWORD not in worker.log
    assert secret not in worker.log
    assert job.written() == before
    return worker


@pytest.mark.parametrize("which", ["transactional-id", "group"])
def test_a_worker_that_may_not_look_up_a_coordinator_says_so(make_job: MakeJob, secured: Secured, which: str) -> None:
    """Was: without rights to its transactional IDs, it looked for their coordinator for ever."""
    job = make_job(name=f"no-{which}")
    kind = {"transactional-id": ResourceType.TRANSACTIONAL_ID, "group": ResourceType.GROUP}[which]
    for each in allowed(job, f"User:{USER}"):
        if each.restype == kind:
            withdraw(job.admin.client, each)
    worker = refused(job, f"127.0.0.1:{secured.sasl_port}", secured.sasl())
    assert "the brokers do not say who coordinates" in worker.log, worker.log


SENTENCES: dict[str, tuple[Callable[[Secured], tuple[str, dict[str, Any]]], str]] = {
    "user unknown": (
        lambda broker: (f"127.0.0.1:{broker.sasl_port}", broker.sasl(username="nobody")),
        "the broker refuses the SCRAM-SHA-512 credentials of nobody",
    ),
    "mechanism not offered": (
        lambda broker: (f"127.0.0.1:{broker.sasl_port}", broker.sasl("SCRAM-SHA-256")),
        "the broker does not offer SCRAM-SHA-256",
    ),
    "wrong host name": (
        lambda broker: (f"localhost:{broker.sasl_port}", broker.sasl()),
        "the broker's certificate is for another host name",
    ),
    "untrusted CA": (
        lambda broker: (f"127.0.0.1:{broker.sasl_port}", broker.sasl(ca_file=broker.path("stranger.pem"))),
        "the broker's certificate is not signed by a CA in security.ca_file",
    ),
    "CA not named": (
        lambda broker: (f"127.0.0.1:{broker.sasl_port}", broker.sasl(ca_file=None)),
        "not set, so the system's CAs apply",
    ),
    "client certificate missing": (
        lambda broker: (f"127.0.0.1:{broker.mtls_port}", broker.mtls(cert_file=None, key_file=None)),
        "the broker requires a client certificate, but none is set",
    ),
    "client certificate of another CA": (
        lambda broker: (
            f"127.0.0.1:{broker.mtls_port}",
            broker.mtls(cert_file=broker.path("impostor.pem"), key_file=broker.path("impostor.key")),
        ),
        "the broker rejects the client certificate",
    ),
    "plaintext to TLS": (
        lambda broker: (f"127.0.0.1:{broker.sasl_port}", {"protocol": "PLAINTEXT"}),
        "the listener speaks TLS, but security.protocol is PLAINTEXT",
    ),
    "TLS to plaintext": (
        lambda broker: (broker.plaintext, broker.sasl()),
        "the listener does not speak TLS, but security.protocol is SASL_SSL",
    ),
    "TLS without SASL": (
        lambda broker: (f"127.0.0.1:{broker.sasl_port}", {"protocol": "SSL", "ca_file": broker.path("ca.pem")}),
        "the listener requires SASL, but security.protocol is SSL",
    ),
    "SASL where there is none": (
        lambda broker: (broker.plaintext, broker.sasl(protocol="SASL_PLAINTEXT", ca_file=None)),
        "the listener does not use SASL, but security.protocol is SASL_PLAINTEXT",
    ),
}


@pytest.fixture
def refusing_job(make_job: MakeJob) -> Job:
    return make_job()


@pytest.mark.parametrize("mistake", SENTENCES)
def test_each_refusal_has_its_own_sentence(refusing_job: Job, secured: Secured, mistake: str) -> None:
    reach, says = SENTENCES[mistake]
    worker = refused(refusing_job, *reach(secured))
    assert says in worker.log, worker.log
    others = {sentence for name, (_, sentence) in SENTENCES.items() if name != mistake and sentence != says}
    if mistake != "CA not named":
        assert not [each for each in others if each in worker.log]


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-512", "PLAIN"])
def test_wrong_password(refusing_job: Job, secured: Secured, mechanism: str) -> None:
    how = secured.sasl(mechanism)
    worker = refused(refusing_job, f"127.0.0.1:{secured.sasl_port}", how, secret="canary-wrong-77aa")
    assert f"the broker refuses the {mechanism} credentials of {USER}" in worker.log, worker.log


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("SCRAM-SHA-512", f"the broker refuses the SCRAM-SHA-512 credentials of {USER}"),
        ("mTLS", "the broker rejects the client certificate"),
    ],
    ids=["SCRAM-SHA-512", "mTLS"],
)
def test_a_running_worker_that_the_brokers_refuse_ends(
    make_job: MakeJob, secured: Secured, way: str, says: str
) -> None:
    """Was: it waited for ever, and nothing restarted it, although a restart would have read the new secret."""
    job = make_job(name=f"rotated-{way.lower()}")
    user, reach = WAYS[way]
    allowed(job, f"User:{user}")
    as_client(job, *reach(secured))
    ca = Path(secured.path("ca.pem"))
    trusted, other = ca.read_bytes(), Path(secured.path("stranger.pem")).read_bytes()
    with Watch(job):
        worker = job.start("a", "patience=8000", environ=SECRETS)
        job.send(workload(152, 200))
        job.until_done()
        try:
            if way == "mTLS":
                ca.write_bytes(other)  # the broker trusts it from its next start on
            else:
                secured.set_password("canary-rotated-2e0b")
            secured.kafka.restart()
            assert worker.wait() == REFUSED, worker.log
        finally:
            ca.write_bytes(trusted)
            secured.set_password(PASSWORD)
            secured.kafka.restart()
        assert says in worker.log, worker.log
        assert "start it again" in worker.log, worker.log
        job.send(workload(153, 200))
        job.finish(environ=SECRETS)
    job.judge()


def test_no_secret_and_no_payload_is_told(make_job: MakeJob, secured: Secured) -> None:
    """At DEBUG, with records that are refused and records that are dead: logs, errors, pages and metrics say neither."""
    job = make_job(
        name="canaries", output_config={"max.message.bytes": "20000"}, document={"conflicts": "canaries-con"}
    )
    allowed(job, f"User:{USER}")
    as_client(job, f"127.0.0.1:{secured.sasl_port}", secured.sasl())
    large = b'{"id":"%s-id","pad":"%s"}' % (PAYLOAD.encode(), os.urandom(20_000).hex().encode())
    small = b'{"id":"%s-%d","n":%d,"pad":"' + PAYLOAD.encode() + b'"}'
    events = [Event(0, small % (b"fine", number % 5, number), BASE_MS, PAYLOAD.encode()) for number in range(50)]
    events += [Event(0, PAYLOAD.encode(), BASE_MS), Event(0, b'{"id":{"%s":1}}' % PAYLOAD.encode(), BASE_MS)]
    events += [Event(1, large, BASE_MS, headers=((PAYLOAD, PAYLOAD.encode()),))]

    job.send(events)
    web = ["web.enabled=true", "web.port=0", "log.level=debug"]
    worker = job.start(environ=SECRETS, settings=web)
    job.until_done()
    until(lambda: "http://" in worker.log, lambda: f"the address of its pages: {worker.log}")
    address = "http://" + worker.log.partition("http://")[2].split()[0].rstrip("/.,;")
    pages = ""
    for path in ("/metrics", "/api/status", "/", "/live", "/ready", "/api/ids/unknown"):
        try:
            with urllib.request.urlopen(address + path, timeout=30) as answer:
                pages += answer.read().decode()
        except urllib.error.HTTPError as error:
            pages += error.read().decode()
    assert "dedup_records_total" in pages
    assert worker.stop() == 0, worker.log

    told = [each for each in (PASSWORD, PAYLOAD) for text in (worker.log, pages) if each in text]
    assert told == [], worker.log
    # Whoever is not let in reads the secret in no error either; see `refused`.
    job.finish(environ=SECRETS)
