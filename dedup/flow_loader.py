"""Imports the flow that a topology names, and runs the flow on sample records."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module, invalidate_caches
from multiprocessing import get_context
from pathlib import Path

from dedup.core.extract_one import Fault
from dedup.core.flow import Flow, FlowRecord, differ, yielded
from dedup.errors import Problem, TopologyError
from dedup.topology.lint import Finding
from dedup.topology.model import FlowSpec, Topology


def load_flow(spec: FlowSpec) -> Flow:
    """Import and return a topology's flow. The import runs the user's code.

    The flow's module is next to the topology file, or is installed. Raises TopologyError if the module cannot be
    imported, if another module hides the module next to the file, or if the module has no such flow.
    """
    module_name, _, attribute = spec.name.partition(":")
    directory = str(Path(spec.directory).resolve())
    if directory not in sys.path:
        sys.path.append(directory)  # Append, so that no file in the directory hides a module that dedup imports.
        invalidate_caches()
    try:
        module = import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # A module that raises SystemExit must not end the command as if it had succeeded.
        text = f"then: {module_name} cannot be imported: {type(error).__name__}: {error}"
        raise TopologyError([Problem(spec.file, f"{text}; put it into {directory}, or install it")]) from error
    top = module_name.partition(".")[0]
    beside = [each for each in (Path(directory, top), Path(directory, f"{top}.py")) if each.exists()]
    found = Path(getattr(module, "__file__", None) or "").resolve()
    if beside and directory not in map(str, found.parents):
        text = f"then: {module_name} is {found}, not the module beside the topology file; give that one another name"
        raise TopologyError([Problem(spec.file, text)])
    flow = getattr(module, attribute, None)
    if not isinstance(flow, Flow) or flow.function is None:
        what = "is not a dedup.Flow" if not isinstance(flow, Flow) else "has no function; decorate one with @on_unique"
        raise TopologyError([Problem(spec.file, f"then: {attribute} in {found} {what}")])
    return flow


def sample_findings(topology: Topology, records: Sequence[FlowRecord]) -> list[Finding]:
    """Run the flow on sample records in two processes with different hash seeds, and return the problems found.

    Raises TopologyError if the flow cannot be loaded.
    """
    spec, topics = topology.then, topology.forwards_to
    if spec is None:
        return []
    load_flow(spec)
    first, second = (_run_apart(spec, topics, records, seed) for seed in ("1", "2"))
    findings = []
    failed = [made for made in first if isinstance(made, Fault)]
    if failed:
        text = f"then: the flow fails at {len(failed)} of {len(records)} samples, first with: {failed[0].detail}"
        findings.append(Finding("warning", "flow_fails", text))
    other = [at for at, pair in enumerate(zip(first, second, strict=True), start=1) if differ(*pair)]
    if other:
        text = (
            f"then: the flow is not deterministic: two runs differ at {len(other)} of {len(records)} samples, first at "
            f"sample {other[0]}. What it yields must depend on the record alone."
        )
        findings.append(Finding("error", "flow_not_deterministic", text))
    return findings


def _run_apart(
    spec: FlowSpec, topics: Sequence[str], records: Sequence[FlowRecord], seed: str
) -> list[list[FlowRecord] | Fault]:
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = seed  # The new process inherits this variable.
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            return process.submit(_run_all, spec, topics, records).result()
    except BrokenProcessPool:
        raise TopologyError([Problem(spec.file, "then: the flow ended its process at a sample")]) from None
    finally:
        if before is None:
            del os.environ["PYTHONHASHSEED"]
        else:
            os.environ["PYTHONHASHSEED"] = before


def _run_all(spec: FlowSpec, topics: Sequence[str], records: Sequence[FlowRecord]) -> list[list[FlowRecord] | Fault]:
    flow = load_flow(spec)
    return [yielded(flow, record, topics) for record in records]
