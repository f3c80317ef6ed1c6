"""Imports the flow that a topology names, and runs the flow and the ID functions on sample records."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

from dedup.code_loader import load_attribute
from dedup.core.extract_one import Fault, One, Recipe, extract_one
from dedup.core.flow import Flow, FlowRecord, differ, yielded
from dedup.core.tracking_id import code_rules
from dedup.errors import Problem, TopologyError
from dedup.topology.lint import Finding
from dedup.topology.model import FlowSpec, Topology


def load_flow(spec: FlowSpec) -> Flow:
    """Import and return a topology's flow. The import runs the user's code.

    Raises TopologyError in the same cases as `load_attribute`, and if the module has no such flow or the flow has no
    function.
    """
    flow, module = load_attribute("then", spec.name, spec.directory, spec.file)
    if not isinstance(flow, Flow) or flow.function is None:
        what = "is not a dedup.Flow" if not isinstance(flow, Flow) else "has no function; decorate one with @on_unique"
        raise TopologyError([Problem(spec.file, f"then: {spec.name.partition(':')[2]} in {module.__file__} {what}")])
    return flow


def load_code(topology: Topology) -> Flow | None:
    """Import a topology's ID functions and its flow, and return the flow, or None if the topology has none.

    Raises TopologyError in the same cases as `load_id_function` and `load_flow`.
    """
    for rule in code_rules(topology.tracking_id.rule):
        rule.load()
    return None if topology.then is None else load_flow(topology.then)


def sample_findings(topology: Topology, records: Sequence[FlowRecord]) -> list[Finding]:
    """Run the flow and the ID functions on sample records in two processes with different hash seeds.

    Returns a finding for each function that fails on a sample, and for each function whose results differ between the
    processes. Raises TopologyError if the code cannot be loaded or terminates its process.
    """
    load_code(topology)
    findings: list[Finding] = []
    for rule in code_rules(topology.tracking_id.rule):
        recipe = Recipe(replace(topology.tracking_id, rule=rule), fmt="bytes")
        found = _in_two_processes(f"{rule.file}: tracking_id.python", _extract_all, recipe, records)
        findings += _differences("tracking_id.python", "id_function", f"the function {rule.name}", found)
    if topology.then is not None:
        found = _in_two_processes(f"{topology.then.file}: then", _run_all, topology.then, topology.forwards_to, records)
        findings += _differences("then", "flow", "the flow", found)
    return findings


def _differences(key: str, code: str, what: str, found: tuple[list[Any], list[Any]]) -> Iterator[Finding]:
    """Yield a finding if the function or flow failed on a sample, and another if the two processes' results differ."""
    first, second = found
    failed = [made for made in first if isinstance(made, Fault) and made.code != "id_null"]
    if failed:
        text = f"{key}: {what} fails at {len(failed)} of {len(first)} samples, first with: {failed[0].detail}"
        yield Finding("warning", f"{code}_fails", text)
    other = [at for at, pair in enumerate(zip(first, second, strict=True), start=1) if differ(*pair)]
    if other:
        text = (
            f"{key}: {what} is not deterministic: two runs differ at {len(other)} of {len(first)} samples, first at "
            f"sample {other[0]}. The result must depend on the record alone."
        )
        yield Finding("error", f"{code}_not_deterministic", text)


def _in_two_processes(place: str, function: Callable[..., list[Any]], *arguments: Any) -> tuple[list[Any], list[Any]]:  # noqa: ANN401
    return _run_apart(place, "1", function, *arguments), _run_apart(place, "2", function, *arguments)


def _run_apart(place: str, seed: str, function: Callable[..., list[Any]], *arguments: Any) -> list[Any]:  # noqa: ANN401
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = seed  # The new process inherits this variable.
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            return process.submit(function, *arguments).result()
    except BrokenProcessPool:
        raise TopologyError([Problem(place, "the code terminated its process while handling a sample")]) from None
    finally:
        if before is None:
            del os.environ["PYTHONHASHSEED"]
        else:
            os.environ["PYTHONHASHSEED"] = before


def _run_all(spec: FlowSpec, topics: Sequence[str], records: Sequence[FlowRecord]) -> list[list[FlowRecord] | Fault]:
    flow = load_flow(spec)
    return [yielded(flow, record, topics) for record in records]


def _extract_all(recipe: Recipe, records: Sequence[FlowRecord]) -> list[One | Fault]:
    return [extract_one(recipe, each.key, each.value, each.headers, each.timestamp_ms) for each in records]
