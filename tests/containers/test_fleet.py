"""The image of the Dockerfile as a fleet: locked down, killed, scaled down and up; nothing is lost or doubled."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.brokers import INSIDE
from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job, until
from tests.integration.watch import Watch
from tests.integration.workload import endless

pytestmark = [pytest.mark.broker, pytest.mark.timeout(600)]

USER = "10001"
KILLED = 137


class Boxed:
    """One worker in a container: no root, nothing writable but its state and /tmp, no capability."""

    def __init__(self, image: str, network: Any, job: Job, number: int) -> None:
        from testcontainers.core.container import DockerContainer  # noqa: PLC0415  # only where an engine answers

        command = f"run /job/{job.name}.yaml --config /job/boxed.json --set worker_id=boxed-{number} --quiet"
        self._container = (
            DockerContainer(image)
            .with_network(network)
            .with_volume_mapping(str(job.directory), "/job", "ro")
            .with_command(command)
            .with_tmpfs_mount("/tmp", "size=16m")
            .with_kwargs(read_only=True, cap_drop=["ALL"], security_opt=["no-new-privileges"])
        )
        self._container.start()

    @property
    def _engines(self) -> Any:
        container = self._container.get_wrapped_container()
        container.reload()
        return container

    @property
    def log(self) -> str:
        """What it wrote so far."""
        return self._engines.logs().decode(errors="replace")

    @property
    def running(self) -> bool:
        """Whether it runs."""
        return bool(self._engines.status == "running")

    @property
    def limits(self) -> tuple[str, bool, list[str]]:
        """Return user, whether the root is read-only, and the capabilities taken away, as the engine has them."""
        known = self._engines.attrs
        return known["Config"]["User"], known["HostConfig"]["ReadonlyRootfs"], known["HostConfig"]["CapDrop"]

    def until_logged(self, text: str) -> None:
        """The text is in the log."""

        def there() -> bool:
            running, found = self.running, text in self.log
            assert found or running, self.log
            return found

        until(there, lambda: f"{text!r} in {self.log}")

    def kill(self) -> int:
        """`docker kill`; return the exit code."""
        self._engines.kill()
        return int(self._engines.wait()["StatusCode"])

    def stop(self) -> int:
        """`docker stop`: SIGTERM, and time to drain; return the exit code."""
        self._engines.stop(timeout=60)
        return int(self._engines.wait()["StatusCode"])

    def remove(self) -> None:
        """It is gone, its volumes too."""
        self._container.stop(force=True, delete_volume=True)


@pytest.fixture
def box(image: str, network: Any) -> Iterator[Callable[[Job, int], Boxed]]:
    """Return what starts a boxed worker; all are gone when the test ends."""
    boxes: list[Boxed] = []

    def start(job: Job, number: int) -> Boxed:
        boxes.append(Boxed(image, network, job, number))
        return boxes[-1]

    yield start
    for each in boxes:
        each.remove()


def test_a_fleet_is_killed_and_scaled(make_job: MakeJob, box: Callable[[Job, int], Boxed]) -> None:
    """Three workers; one is killed; then one is left; then four are there."""
    job = make_job(partitions=12)
    boxed = {"brokers": [INSIDE], "state_dir": "/var/lib/dedup", "session_timeout": "6s", "web": {"enabled": False}}
    (job.directory / "boxed.json").write_text(json.dumps(boxed), encoding="utf-8")
    with Watch(job):
        with job.stream(endless(160, partitions=12), per_s=800):
            first, second, third = (box(job, number) for number in range(3))
            for each in (first, second, third):
                each.until_logged("running from offset")
                assert each.limits == (USER, True, ["ALL"])
            job.until_progress(500)
            assert first.kill() == KILLED
            job.until_progress(500)
            assert second.stop() == 0, second.log
            job.until_progress(500)
            more = [box(job, number) for number in range(3, 6)]
            for each in more:
                each.until_logged("running from offset")
            job.until_progress(500)
        job.until_done()
        for each in (third, *more):
            assert each.stop() == 0, each.log
    report = job.judge()
    assert report.closing_line() == "lost 0  duplicated 0"


def test_the_image_has_no_root_and_keeps_its_code(image: str) -> None:
    """Who runs it is nobody special, and can not change the code."""
    from testcontainers.core.container import DockerContainer  # noqa: PLC0415

    look = "id -u; find /opt /app -writable -not -type l | head -3; dedup --version"
    container = DockerContainer(image).with_kwargs(entrypoint=["sh", "-c", look], read_only=True, cap_drop=["ALL"])
    with container as started:
        assert started.get_wrapped_container().wait()["StatusCode"] == 0
        first, *rest = started.get_logs()[0].decode().splitlines()
    assert first == USER
    assert len(rest) == 1, rest
    assert rest[0].startswith("dedup ")
