"""A Docker engine, the image of this checkout, and a broker beside it; without an engine a named skip."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests import brokers
from tests.brokers import Admin, RunningKafka
from tests.integration.conftest import make_job

__all__ = ["make_job"]

ROOT = Path(__file__).parents[2]
IMAGE = "dedup:containers-test"


@pytest.fixture(scope="session", autouse=True)
def engine() -> None:
    """Skip where no Docker engine answers at DOCKER_HOST or its usual socket."""
    address = urlsplit(os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock"))
    # Not by Docker's client: it leaves its socket open where nobody listens.
    try:
        if address.scheme == "unix":
            with socket.socket(socket.AF_UNIX) as asked:
                asked.connect(address.path)
        else:
            socket.create_connection((address.hostname, address.port or 2375), timeout=10).close()
    except OSError:
        pytest.skip("no Docker engine answers here; start one, or set DOCKER_HOST", allow_module_level=True)


@pytest.fixture(scope="session")
def image(engine: None) -> str:
    """Return the name of an image built from this checkout's Dockerfile."""
    from testcontainers.core.image import DockerImage  # noqa: PLC0415

    # The image is kept, so that unchanged layers are not built again. The lock keeps pytest-xdist's other process from
    # building them at the same time.
    with (Path(tempfile.gettempdir()) / "dedup-containers-test.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return str(DockerImage(path=ROOT, tag=IMAGE, clean_up=False).build())


@pytest.fixture(scope="session")
def network(engine: None) -> Iterator[object]:
    """Return a network of the test's own."""
    from testcontainers.core.network import Network  # noqa: PLC0415

    with Network() as made:
        yield made


@pytest.fixture(scope="session")
def kafka(network: object) -> Iterator[RunningKafka]:
    """Return a broker in a container of that network, that the host reaches, too."""
    with brokers.in_container(network) as running:  # type: ignore[arg-type]  # its type is imported with it
        yield running


@pytest.fixture(scope="session")
def admin(kafka: RunningKafka) -> Admin:
    """Return what creates topics there."""
    return brokers.admin_of(kafka.bootstrap)
