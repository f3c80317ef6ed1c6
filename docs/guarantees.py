"""Generates the two tables of docs/guarantees.md: the faults with their tests, and the figures of long runs.

``python docs/guarantees.py [JUNIT.xml ...]`` copies the results of test runs (``pytest --junitxml=FILE``) into
docs/proof-runs/tests.json and writes the page. Every other file in docs/proof-runs contains the result of one long run.
"""
# ruff: noqa: INP001  # a script beside its page, not a package

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

DOCS: Final = Path(__file__).parent
ROOT: Final = DOCS.parent
PAGE: Final = DOCS / "guarantees.md"
RUNS: Final = DOCS / "proof-runs"
RESULTS: Final = RUNS / "tests.json"

WORLD: Final[tuple[tuple[str, str, str], ...]] = (
    (
        "F71",
        "source topic deleted or recreated under a worker, a stream on Spark, a sink, or a reader",
        "O8 immediately, no new record judged",
    ),
    ("F72", "partitions added to the source", "O8 immediately, O2"),
    ("F73", "changelog deleted and recreated", "O8 immediately, O2"),
    ("F74", "`dedup reset` while a worker is frozen; a killed reset", "O8, state unchanged"),
    ("F75", "records deleted by retention or by hand, before or after they were judged", "O8 immediately; O1-O4"),
    ("F76", "size limit, compression or timestamp type of the output changed", "one verdict each"),
    ("F77", "ACL removed: output, source, changelog, group, transactional ID", "O8, no loss"),
    ("F78", "clock behind at startup, then right; stepped forward and back", "verdicts by the broker's clock"),
    ("F79", "three nodes, each restarted cleanly in turn", "O1-O6, no worker exits"),
    ("F80", "the group or its offsets deleted", "rejected by the broker, or no duplicates"),
    ("F81", "a difficult topic: old, compacted, uneven, invalid headers, no keys, a late worker, kills", "O1 O2 O6"),
    ("F82", "renamed or second topology on an output that holds records", "O8"),
    ("F83", "one partition of the output offline", "only its task waits; O1-O4"),
    ("F84", "source log truncated and refilled", "O8, no record skipped"),
    ("F85", "partitions added to a source that is repartitioned, under load", "O1-O6, no worker exits"),
    ("F86", "a killed worker restarts at once with another port or host name", "O1-O6, no worker exits"),
)
"""The faults F71 to F86, in which the cluster changes while a worker runs: id, fault, expected result."""
GRID: Final[tuple[tuple[str, str, str], ...]] = (
    ("F01", "SIGKILL at random times under load, same state directory", "O1-O6"),
    ("F02", "exit at each named point of a transaction and of a startup", "O1-O6"),
    (
        "F03",
        "state directory deleted, replaced by an old copy, or by another partition's",
        "O1-O5; another partition's is refused",
    ),
    ("F04", "SIGTERM under load, twice, during a restore", "drains, exit 0"),
    ("F05", "SIGSTOP beyond the session timeout, then SIGCONT", "O7 O2"),
    ("F06", "SIGSTOP shorter than the session timeout", "no rebalance"),
    ("F08", "crash loop at startup", "back-off, no accumulation of open transactions"),
    ("F11", "workers join and leave every 2 s under load", "O1-O6"),
    ("F12", "two workers with one state directory", "second refused"),
    ("F13", "two different topologies with one name", "O8"),
    ("F14", "another process uses a task's transactional ID", "owner fenced, recovers"),
    ("F15", "a dead worker's open transaction", "successor unblocks readers"),
    ("F18", "partitions added to the input while running", "O8"),
    ("F19", "offsets reset, deleted, out of range", "no duplicates; out of range: O8"),
    ("F21", "broker SIGKILL and restart in each phase of a transaction", "O1-O6"),
    ("F22", "broker frozen 20 s", "the worker's own timeout applies, O1-O6"),
    ("F23", "three nodes: a leader or coordinator killed or paused; below min.isr", "no loss; stops, resumes"),
    ("F24", "connections cut, half-open, or slow; responses lost", "O1 O2"),
    ("F25", "an EndTxn delayed past the next transaction", "O2"),
    ("F26", "the broker rejects one record of a batch", "dead letter, other records kept"),
    ("F28", "ACL removed while running", "O8, no loss"),
    ("F31", "RocksDB files flipped, truncated, deleted", "restored from the changelog, O5"),
    ("F32", "disk full on the worker", "exit; a restart recovers"),
    ("F33", "state directory read-only, foreign owner, symlink, `..`", "O8"),
    ("F35", "changelog deleted, recreated empty, truncated, wrong partition count", "O8"),
    ("F36", "old event times in the changelog", "not deleted early"),
    ("F38", "wall clock jumps by a day during and between runs", "verdicts unchanged"),
    ("F39", "changelog deleted while the fleet is down, local state intact", "exit 3, state unchanged"),
    ("F40", "SIGKILL when only one of two RocksDB segments is flushed", "O1-O5"),
    ("F41", "invalid JSON, empty, truncated, BOM, UTF-16, invalid UTF-8, NUL, lone surrogate", "one verdict each"),
    ("F42", "ID missing, null, empty, blank, object, array, Boolean, NaN", "one verdict each"),
    ("F43", '1 / "1" / 1.0 / true; integers beyond 2^53, 2^63, 2^64; NFC/NFD; case', "one verdict each"),
    ("F44", "the ID's member twice in one object", "one verdict each"),
    ("F45", "null value, null key, both", "one verdict each"),
    ("F46", "10 MB record, headers over the limit, 1 MB ID, compressed bomb", "one verdict each"),
    ("F47", "depth 100,000; a 5,000-digit number", "one verdict each"),
    ("F48", "future times: an hour to the year 9999", "one verdict each"),
    ("F49", "times -1, -5, 0, -400 days", "one verdict each"),
    ("F51", "LogAppendTime topics, mixed", "one verdict each"),
    ("F52", "aborted and open transactions in the input, control batches, compacted gaps", "one verdict each"),
    (
        "F53",
        "invalid records first, in the middle, last, or all of a batch; the dead-letter topic rejects a record",
        "one verdict each; the worker stops",
    ),
    ("F61", "guard period made longer", "as in [Upgrade](operations.md#upgrade)"),
    ("F62", "guard period made shorter", "as in [Upgrade](operations.md#upgrade)"),
    ("F63", "ID rule changed", "as in [Upgrade](operations.md#upgrade)"),
    ("F64", "old and new version mixed in a rolling upgrade", "as in [Upgrade](operations.md#upgrade)"),
    *WORLD,
)
"""The rows of the fault table: id, fault, expected result."""
FAMILIES: Final[dict[str, str]] = {WORLD[0][0]: "the cluster changes while a worker runs"}
"""Maps the first row of a family of faults to the heading of the family."""
ALSO: Final[dict[str, tuple[str, ...]]] = {
    "F02": (
        "tests/simulation/test_schedules.py::test_schedules",
        "tests/simulation/test_longest.py::test_schedules",
        "tests/integration/test_checkpoint.py::test_killed_in_the_middle_of_a_transfer",
    ),
    "F03": ("tests/integration/test_checkpoint.py::test_a_fleet_is_kept_while_it_runs_and_an_empty_disk_begins_there",),
    "F25": ("tests/simulation/test_mutants.py::test_the_mutant_is_caught",),
    "F31": (
        "tests/integration/test_store_damage.py",
        "tests/property/test_filter_logs.py::test_no_id_is_missed_whatever_happens_to_the_logs",
        "tests/unit/worker/test_bootstrap.py::test_what_can_not_be_used_is_told_and_the_changelog_is_read",
    ),
    "F85": ("tests/integration/test_growing_source.py",),
    "F86": ("tests/integration/test_lookup_routed.py::test_a_killed_worker_comes_back_at_once_with_another_address",),
    "F39": ("tests/unit/worker/test_bootstrap.py::test_another_changelog_topology_or_a_shorter_changelog_is_refused",),
    "F41": ("tests/fuzz/test_records.py::test_every_record_comes_out_once_as_the_reference_says",),
    "F42": ("tests/unit/core/test_tracking_id.py", "tests/property/test_extract.py"),
    "F43": ("tests/unit/core/test_tracking_id.py", "tests/property/test_extract.py"),
    "F44": ("tests/unit/core/test_tracking_id.py", "tests/property/test_extract.py"),
    "F45": ("tests/fuzz/test_records.py::test_every_record_comes_out_once_as_the_reference_says",),
    "F47": (
        "tests/fuzz/test_records.py::test_unclosed_brackets_of_any_length_are_a_fault_however_deep_the_caller_stands",
    ),
    "F48": ("tests/fuzz/test_records.py::test_every_record_comes_out_once_as_the_reference_says",),
    "F49": ("tests/fuzz/test_records.py::test_every_record_comes_out_once_as_the_reference_says",),
    "F71": (
        "tests/connect/test_topics_change.py::test_the_sink_stops_before_it_writes_what_came_after",
        "tests/connect/test_topics_change.py::test_the_reader_stops_before_it_hands_over_what_came_after",
        "tests/spark/test_stream_topics_change.py::test_source_topic_made_again_under_a_driver",
        "tests/spark/test_stream_topics_change.py::test_source_topic_made_again_before_a_repartition_topic",
    ),
    "F72": ("tests/spark/test_stream_topics_change.py::test_partitions_added_to_the_source",),
    "F73": ("tests/spark/test_stream_topics_change.py::test_changelog_made_again",),
    "F78": ("tests/chaos/test_state.py::test_f38_wrong_clocks",),
    "F77": ("tests/chaos/test_security.py::test_f28_a_permission_withdrawn_while_running",),
}
"""Maps a row to the tests that cover it but do not have its id in their names."""
ORACLES: Final = """The column "expected" uses these abbreviations:

* O1: no record is lost
* O2: no record is duplicated, not even for a reader during the fault
* O3: the order of the records is kept
* O4: each record has exactly one verdict
* O5: the store, the changelog, and the exact model agree
* O6: all workers run again after the fault
* O7: the requests of a zombie fail
* O8: the command prints the reason and exits with a code other than 0
* O9: the workers shut down cleanly"""
FIGURES: Final[dict[str, tuple[str, ...]]] = {
    "simulator": ("schedules", "seeds"),
    "fuzz": ("records",),
    "soak": ("sent", "verified_records"),
    "chaos": ("kills", "records"),
    "verify": ("records",),
}
"""Maps the kind of a long run to the counts that are added up. Each result file also contains `wrong` or `passed`."""
WITH_NUMBER: Final = re.compile(r"test_(f\d\d)_")


def tests_by_row() -> dict[str, list[str]]:
    """Return the tests of each row; tests with the row's id in their names come first."""
    found: dict[str, list[str]] = {row: [] for row, _, _ in GRID}
    for test in all_tests():
        match = WITH_NUMBER.match(test.partition("::")[2])
        if match is not None and match[1].upper() in found:
            found[match[1].upper()].append(test)
    for row, tests in ALSO.items():
        found[row] += [test for test in tests if test not in found[row]]
    return found


def all_tests() -> Iterator[str]:
    """Yield ``path::function`` of every test."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield f"{path.relative_to(ROOT)}::{node.name}"


def take(junit: Path, results: dict[str, Any]) -> None:
    """Add the outcomes of a test run to ``results``, and replace older outcomes of the same tests."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],  # noqa: S607
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    fresh: dict[str, Counter[str]] = {}
    for case in ET.parse(junit).iter("testcase"):  # noqa: S314  # our own file
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name', '').partition('[')[0]}"
        outcome = next((child.tag for child in case if child.tag in {"failure", "error", "skipped"}), "passed")
        fresh.setdefault(name, Counter())[outcome] += 1
    for name, counts in fresh.items():
        when = {"commit": commit.stdout.strip(), "day": time.strftime("%Y-%m-%d", time.gmtime())}
        results[name] = {**when, **dict(sorted(counts.items()))}


def outcome(tests: list[str], results: dict[str, Any]) -> str:
    """Return the latest results of these tests in a few words."""
    known = [
        result
        for test in tests
        for name, result in results.items()
        if name == test or ("::" not in test and name.startswith(f"{test}::"))
    ]
    if not tests:
        return "**not tested yet**"
    if not known:
        return "no result kept"
    sums = Counter(
        {key: sum(result.get(key, 0) for result in known) for key in ("passed", "failure", "error", "skipped")}
    )
    failed = sums["failure"] + sums["error"]
    words = [f"{sums['passed']} passed"]
    words += [f"**{failed} failed**"] if failed else []
    words += [f"{sums['skipped']} skipped"] if sums["skipped"] else []
    return f"{', '.join(words)} · {max(result['day'] for result in known)}"


def grid(results: dict[str, Any]) -> str:
    """Return the fault table."""
    tests = tests_by_row()
    lines = ["| | fault | expected | tests | last result |", "|---|---|---|---|---|"]
    tested = 0
    for row, fault, expected in GRID:
        tested += bool(tests[row])
        if row in FAMILIES:
            lines.append(f"| | **{FAMILIES[row]}** | | | |")
        named = ", ".join(f"`{test}`" for test in tests[row]) or "none"
        lines.append(f"| {row} | {fault} | {expected} | {named} | {outcome(tests[row], results)} |")
    return "\n".join(["", f"{tested} of the {len(GRID)} faults in the table have tests. {ORACLES}", "", *lines])


def runs() -> list[dict[str, Any]]:
    """Return the contents of the result files of long runs."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RUNS.glob("*.json")) if path != RESULTS]
    return [run for run in found if "proof_run" in run]


def figures() -> str:
    """Return a table of the long runs, with totals for each kind of run."""
    lines = ["| | runs | total | failures | hours | commits |", "|---|---|---|---|---|---|"]
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for run in runs():
        by_kind.setdefault(run["proof_run"], []).append(run)
    for kind, own in sorted(by_kind.items()):
        names = FIGURES.get(kind, ())
        sums = ", ".join(f"{sum(run.get(name, 0) for run in own):,} {name.replace('_', ' ')}" for name in names)
        wrong = sum(run["wrong"] if "wrong" in run else not run["passed"] for run in own)
        hours = sum(run.get("seconds", 0) for run in own) / 3600
        commits = ", ".join(sorted({f"`{run['commit']}`" for run in own}))
        lines.append(f"| {kind} | {len(own)} | {sums} | {wrong} | {hours:.1f} | {commits} |")
        for name in ("kills",):
            total = sum(run.get(name, 0) for run in own)
            if name in names and total and not wrong:
                lines.append(
                    f"| | | 0 of {total:,} {name} caused a failure: with 95% confidence, fewer than 3 in {total:,} do "
                    "| | | |"
                )
    return "\n".join(lines if len(lines) > 2 else ["No results of long runs have been recorded."])  # noqa: PLR2004  # the head


def filled(text: str, results: dict[str, Any]) -> str:
    """Return the page with its generated parts replaced."""
    for name, part in (("grid", grid(results)), ("figures", figures())):
        begin, end = f"<!-- {name}: generated by docs/guarantees.py -->\n", f"\n<!-- end of {name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise SystemExit(f"{PAGE}: the marks of {name} are missing")
        text = f"{before}{begin}{part}{end}{after}"
    return text


def kept() -> dict[str, Any]:
    """Return the test results in docs/proof-runs/tests.json."""
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    return found


def main() -> None:
    """Add the results of the given test runs, and write the page."""
    results = kept()
    for name in sys.argv[1:]:
        take(Path(name), results)
    known = set(all_tests())
    results = {name: result for name, result in sorted(results.items()) if name in known}
    RUNS.mkdir(exist_ok=True)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(result)}" for name, result in results.items())
    RESULTS.write_text(f"{{\n{lines}\n}}\n" if results else "{}\n", encoding="utf-8")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
