"""Defines `dedup check`, `describe`, `schema`, `size`, and `try`, which work without a broker."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final, Literal

import typer

from dedup.cli.inputs import (
    A_TIME,
    ConfigOption,
    JsonOption,
    OptionalTopology,
    SetOption,
    TopologyArgument,
    read_settings,
    read_stage,
    read_topology,
    say,
    time_of,
    with_schemas,
)
from dedup.core.window import Window
from dedup.errors import AuthorMistake, DedupError, Problem, SettingsError, TopologyError
from dedup.quantities import counted, format_duration, parse_duration
from dedup.topology.state_size import KINDS, format_bytes, key_bytes, predict

if TYPE_CHECKING:
    from dedup.core.flow import Flow
    from dedup.settings import Settings
    from dedup.topology.chain import Named, Stage
    from dedup.topology.lint import Finding
    from dedup.topology.model import Topology

    CheckCode = Callable[[Stage], list[Finding]]

_SamplesOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="With --allow-code, run the code on the JSON value in each line of this file.",
        exists=True,
        dir_okay=False,
    ),
]
_RecordsFile = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        show_default=False,
        help="File with one JSON value per line. If FILE is omitted or -, the command reads standard input.",
    ),
]
_FirstTime = Annotated[
    str,
    typer.Option(
        "--time", metavar="TIME", help="Timestamp of the first line (RFC 3339); each following line is 1 s later."
    ),
]
_Now = Annotated[
    str | None,
    typer.Option(
        "--now", metavar="TIME", help="Time to use as the current time (RFC 3339). Default: this machine's clock."
    ),
]
_STDIN: Final = Path("-")
_MOST_PER_S: Final = 1e12
LOOK_S: Final = 0.3
"""The polling interval of `dedup check --watch` in seconds, which is too short for people to notice."""


def check(
    topologies: Annotated[list[Path], typer.Argument(metavar="TOPOLOGY", help="Topology and ingest files.")],
    broker: Annotated[
        bool, typer.Option("--broker", help="Also compare the cluster's topics with those that each topology needs.")
    ] = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
    watch: Annotated[bool, typer.Option("--watch", help="Check again after each save until Ctrl-C.")] = False,
    *,
    allow_code: Annotated[bool, typer.Option("--allow-code", help="Import the code that a topology names.")] = False,
    samples: _SamplesOption = None,
    envelope: Annotated[
        bool, typer.Option("--envelope", help="Read each line of --samples as a whole record, not only as a value.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check topology files and ingest files, print each error with its position, and warn about likely mistakes.

    The exit code is 2 if a file has an error, and 0 if the files have only warnings. If you pass several files, the
    command also checks the chain that they form from source to table, and reports each stage that is not exactly-once.
    If two topologies write to the same topic, the command reports an error, unless they send only dead letters there.
    With --broker, the command also compares the cluster's topics with the topics that each topology needs. If values or
    keys contain schema IDs (Avro, Protobuf, or JSON Schema), --broker also compares the members that a topology names
    with the newest schema of each source topic in the schema registry. The subject is `source.subject` or TOPIC-value
    and, for members of keys, `source.key_subject` or TOPIC-key.

    By default, the command runs no code that a topology names. With --allow-code, the command imports the flow and the
    ID functions. With --samples, the command also runs this code on each line of a file in two separate processes, and
    reports failures and results that differ. A sample has no key and no headers. With --envelope, each sample is
    instead a whole record, as in `dedup try --envelope`. Binary formats such as Avro need --envelope.

    Examples: dedup check topologies/*.yaml

    dedup check topologies/chain-ingest.yaml topologies/chain.yaml

    dedup check topologies/orders.yaml --broker --config config/production.yaml

    dedup check topologies/orders.yaml --watch
    """
    if watch and as_json:
        raise typer.BadParameter("--watch and --json exclude each other")
    if samples is not None and not allow_code:
        raise typer.BadParameter("--samples runs the code; add --allow-code")
    if envelope and samples is None:
        raise typer.BadParameter("--envelope says how samples are written; add --samples")
    if not broker and (config is not None or overrides):
        unused = "--set" if config is None else "--config"
        raise typer.BadParameter(f"{unused} says where the cluster is, which only --broker asks; add --broker")
    topologies = list({os.path.realpath(path): path for path in reversed(topologies)}.values())[::-1]
    check_code = partial(_code_findings, samples=samples, envelope=envelope, aside=as_json) if allow_code else None
    settings = read_settings(config, overrides) if broker else None
    once = partial(_check_once, topologies, settings, check_code, as_json=as_json)
    if not watch:
        once()
        return
    if allow_code:  # This process would keep the first version of each module.
        options = [("--config", config), *(("--set", each) for each in overrides or ()), ("--samples", samples)]
        flags = [name for name, given in (("--broker", broker), ("--envelope", envelope)) if given]
        once = partial(_check_apart, topologies, options, flags)
    _watch(topologies, samples, once, code=allow_code)


def _watch(topologies: Sequence[Path], samples: Path | None, once: Callable[[], None], *, code: bool) -> None:
    named = [*topologies, *([] if samples is None else [samples])]
    for _ in at_each_save(named, partial(_files_named_in, topologies, code=code)):
        typer.echo(f"--- {time.strftime('%H:%M:%S')}")
        try:
            once()
        except DedupError as error:  # The next save may correct the error.
            typer.echo(str(error), err=True)


def _check_apart(topologies: Sequence[Path], options: Sequence[tuple[str, object]], flags: Sequence[str]) -> None:
    """Run `dedup check --allow-code` in a process of its own, which imports the code as it is now."""
    from dedup.embedded.child_process import DEDUP

    given = [f"{name}={value}" for name, value in options if value is not None]
    command = [*DEDUP, "check", "--allow-code", *flags, *given, "--", *map(str, topologies)]
    subprocess.run(command, check=False)  # noqa: S603  # our own command, which prints its findings


def _files_named_in(topologies: Sequence[Path], *, code: bool) -> Iterator[Path]:
    """Yield the schema files that topologies name and, if ``code`` is set, the modules next to the topology files.

    Modules further away, for example in a package next to a topology file, are included only if the topology names
    them.
    """
    from dedup.topology.parse import parse
    from dedup.yaml_document import beside, text_of

    for path in topologies:
        if not path.is_file():  # A pipe can be read only once.
            continue
        named: set[str] = set()

        def noted(name: str, path: Path = path, named: set[str] = named) -> str:
            named.add(name)
            return beside(path)(name)

        if code:
            named.update(each.name for each in path.parent.glob("*.py"))
        with suppress(TopologyError):  # The check reports it.
            then = parse(text_of(path), name=str(path), read_file=noted).then
            module = "" if then is None else then.name.partition(":")[0].replace(".", "/")
            named |= {f"{module}/__init__.py", f"{module}.py"} if module and code else set()
        yield from (path.parent / name for name in sorted(named) if "\0" not in name)


def at_each_save(paths: Sequence[Path], others: Callable[[], Iterable[Path]] = tuple) -> Iterator[None]:
    """Yield immediately, and again each time one of the files is written, replaced, created, or removed.

    The files are ``paths`` and those that ``others`` returned when one of the files last changed. The function polls
    the files, because editors replace files instead of writing to them, and network shares send no file-system events.
    """
    seen: list[tuple[int, int, int] | None] | None = None
    watched = list(paths)
    while True:
        if [_stamp(path) for path in watched] != seen:
            watched = [*paths, *others()]
            seen = [_stamp(path) for path in watched]
            yield
        time.sleep(LOOK_S)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        known = path.stat()
    except OSError:
        return None
    return known.st_mtime_ns, known.st_size, known.st_ino


def _code_findings(topology: Stage, *, samples: Path | None, envelope: bool, aside: bool) -> list[Finding]:
    """Import the flow and the ID functions of a topology, run them on the samples, and return the findings.

    If ``aside`` is set, everything that this code prints goes to stderr.
    """
    with _printing_aside() if aside else nullcontext():
        return _findings_of_code(topology, samples, envelope=envelope)


@contextmanager
def _printing_aside() -> Iterator[None]:
    """Redirect to stderr everything that this process and its child processes print to stdout in the ``with`` block."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _findings_of_code(topology: Stage, samples: Path | None, *, envelope: bool) -> list[Finding]:
    from dedup.cli.try_records import entries
    from dedup.core.flow import FlowRecord
    from dedup.flow_loader import load_code, sample_findings
    from dedup.topology.ingest_file import Ingest

    if isinstance(topology, Ingest):
        return []
    if not topology.runs_code:
        return []
    if samples is None:
        load_code(topology)
        return []
    start_ms, output = time_of("--samples", A_TIME), next(iter(topology.forwards_to), "")
    with samples.open("rb") as lines:
        made = entries(lines, name=str(samples), envelope=envelope, start_ms=start_ms, source=topology.source)
        records = [FlowRecord(output, each.key, each.value, each.headers, each.timestamp_ms) for each in made]
    return sample_findings(topology, records)


def _check_once(
    topologies: list[Path], settings: Settings | None, check_code: CheckCode | None, *, as_json: bool
) -> None:
    from dedup.topology.chain import describe_chain, is_weak, lint_chain

    problems: list[Problem] = []
    reports: list[dict[str, Any]] = []
    read = [_read_stage(path) for path in topologies]
    stages = [stage for stage in read if not isinstance(stage, TopologyError)]
    joints = lint_chain(stages)
    weak: set[str] = set()
    for path, stage in zip(topologies, read, strict=True):
        errors: list[Problem] = []
        found: list[Finding] = []
        if isinstance(stage, TopologyError):
            errors = stage.problems
        else:
            found = _findings(stage.stage, settings) + [finding for file, finding in joints if file == stage.file]
            try:
                found += [] if check_code is None else check_code(stage.stage)
            except TopologyError as error:
                errors = error.problems
            weak |= {stage.file} if any(map(is_weak, found)) else set()
        places = _places(path, found)
        bad = [
            Problem(place, f"{each.text} [{each.code}]")
            for place, each in zip(places, found, strict=True)
            if each.level == "error"
        ]
        problems += errors + bad
        ok = not errors and not bad
        findings = [
            {"level": each.level, "code": each.code, "place": place, "text": each.text}
            for place, each in zip(places, found, strict=True)
        ]
        reports.append(
            {"file": str(path), "ok": ok, "problems": [asdict(each) for each in errors], "findings": findings}
        )
        if not as_json:
            _print_warnings(path, list(zip(places, found, strict=True)), ok=ok)
    if as_json:
        typer.echo(json.dumps(reports, indent=2))
    elif len(stages) > 1:
        for line in describe_chain(stages, frozenset(weak)):
            typer.echo(line)
    if problems and as_json:
        raise typer.Exit(TopologyError.exit_code)
    if problems:
        raise TopologyError(problems)


def _read_stage(path: Path) -> Named | TopologyError:
    from dedup.topology.chain import Named

    try:
        return Named(str(path), read_stage(path))
    except TopologyError as error:
        return error


def _findings(topology: Stage, settings: Settings | None) -> list[Finding]:
    from dedup.topology.chain import lint_ingest
    from dedup.topology.ingest_file import Ingest
    from dedup.topology.lint import Finding, lint

    if isinstance(topology, Ingest):
        text = "--broker skips ingest files; `dedup apply --dry-run` shows which of their topics are missing or differ."
        return lint_ingest(topology) + ([] if settings is None else [Finding("warning", "not_compared", text)])
    if settings is None:
        return lint(topology)

    from dedup.kafka.schema_registry import registry_findings
    from dedup.worker.topics import broker_findings

    return lint(topology) + asyncio.run(broker_findings(topology, settings)) + registry_findings(topology, settings)


def _places(path: Path, found: Sequence[Finding]) -> list[str]:
    """Return the place of each finding: file:line:column, or only the file for a finding about the whole file."""
    from dedup.yaml_document import read, text_of

    if not any(each.at for each in found):
        return [str(path)] * len(found)
    document = read(text_of(path), name=str(path))
    return [document.place(each.at) if each.at else str(path) for each in found]


def _print_warnings(path: Path, found: Sequence[tuple[str, Finding]], *, ok: bool) -> None:
    warnings = [(place, finding) for place, finding in found if finding.level == "warning"]
    for place, finding in warnings:
        typer.echo(f"{place}: warning: {finding.text} [{finding.code}]")
    if ok:
        count = f", {len(warnings)} warning{'s' if len(warnings) > 1 else ''}" if warnings else ""
        typer.echo(f"{path}: ok{count}")


def describe(
    topology: TopologyArgument,
    dot: Annotated[bool, typer.Option("--dot", help="Print the topology as a Graphviz graph.")] = False,
    svg: Annotated[bool, typer.Option("--svg", help="Print the topology as an SVG image.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show a topology's agents, topics, and table, and the path of each record through them.

    Examples: dedup describe topologies/orders.yaml

    dedup describe topologies/orders.yaml --svg > orders.svg
    """
    from dedup.topology import describe as drawing

    if dot + svg + as_json > 1:
        raise typer.BadParameter("--dot, --svg and --json exclude each other")
    parsed = read_topology(topology)
    if dot:
        text = drawing.to_dot(parsed)
    elif svg:
        text = drawing.to_svg(parsed)
    elif as_json:
        text = json.dumps(drawing.as_data(parsed), indent=2) + "\n"
    else:
        text = drawing.describe(parsed)
    typer.echo(text, nl=False)


def schema(
    of: Annotated[
        Literal["topology", "config", "ingest"],
        typer.Argument(metavar="KIND", help="Kind of file that the schema describes: topology, config, or ingest."),
    ] = "topology",
) -> None:
    """Print the JSON Schema of topology, config, or ingest files, for use in editors.

    Example: dedup schema topology > topologies/topology.schema.json
    """
    from dedup.settings import settings_schema
    from dedup.topology.ingest_file import ingest_schema
    from dedup.topology.parse import json_schema

    schemas = {"topology": json_schema, "config": settings_schema, "ingest": ingest_schema}
    typer.echo(json.dumps(schemas[of](), indent=2))


def try_records(
    topology: TopologyArgument,
    file: _RecordsFile = _STDIN,
    *,
    envelope: Annotated[
        bool, typer.Option("--envelope", help="Read each line as a whole record, not only as a value.")
    ] = False,
    start: _FirstTime = A_TIME,
    now: _Now = None,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Run the topology's flow on each forwarded record.")
    ] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Judge records from a file without a broker, and print each verdict with its reason.

    FILE contains one JSON value per line. The command judges the lines in order, as the records of one partition. With
    --envelope, each line is a whole record: {"key": ..., "value": ..., "headers": {...}, "timestamp": ms}. For binary
    formats such as Avro, write "value_base64" instead of "value", and "key_base64" instead of "key". The members
    "topic", "partition", and "offset" are skipped; any other member is an error. With `source.format: json_schema`, the
    command adds the framing to each JSON value; with `source.key_format: json_schema`, it adds the framing to each key.
    With `source.format: csv`, each line is a row.

    If the topology takes IDs from a Python function, the command imports and calls that function. The command runs the
    topology's flow only with --allow-code, and then shows the records that the flow yields.

    Examples: dedup try topologies/simplest.yaml tests/data/sample.jsonl

    dedup try topologies/routed.yaml incoming.jsonl --allow-code
    """
    from dedup.cli.try_records import RecordJudge, entries

    parsed = read_topology(topology)
    if parsed.source.needs_registry or config is not None:
        parsed = with_schemas(parsed, read_settings(config))
    now_ms = time.time_ns() // 1_000_000 if now is None else time_of("--now", now)
    start_ms = time_of("--time", start)
    counts: Counter[str] = Counter()
    name = "standard input" if file == _STDIN else str(file)
    # With --json, stdout contains the verdicts and nothing that the user's code prints.
    aside = _printing_aside if as_json and parsed.runs_code else nullcontext
    with aside():
        judge = RecordJudge(parsed, now_ms=now_ms, flow=_flow_of(parsed, allow_code=allow_code))
    with _opened(file, name) as lines:
        for entry in entries(lines, name=name, envelope=envelope, start_ms=start_ms, source=parsed.source):
            with aside():
                judgment = judge.judge(entry)
            counts[judgment.verdict] += 1
            typer.echo(judgment.as_json() if as_json else judgment.as_text())
    if not as_json:
        books = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
        typer.echo(f"{counted(counts.total(), 'record')}: {books}" if counts else "no records")


def _opened(file: Path, name: str) -> BinaryIO:
    try:
        return sys.stdin.buffer if file == _STDIN else file.open("rb")
    except OSError as error:
        raise AuthorMistake([Problem(name, f"cannot be read: {error.strerror}; name a file")]) from error


def _flow_of(topology: Topology, *, allow_code: bool) -> Flow | None:
    """Return the topology's flow, if any. If the flow's code may not run, return None and tell the user."""
    from dedup.flow_loader import load_flow

    if topology.then is None:
        return None
    if allow_code:
        return load_flow(topology.then)
    said = f"the flow {topology.then.name} is not run, so the records that it yields are not shown"
    typer.echo(f"{said}; to run it, pass --allow-code", err=True)
    return None


def size(
    topology: OptionalTopology = None,
    *,
    rate: Annotated[float, typer.Option(min=0, metavar="N", help="Records per second.")] = 1000,
    duplicates: Annotated[
        float,
        typer.Option(min=0, max=1, metavar="SHARE", help="Share of records whose ID was seen before, from 0 to 1."),
    ] = 0,
    kind: Annotated[str, typer.Option("--id", metavar="KIND", help=f"Kind of ID: {KINDS}.")] = "uuid",
    guard: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Guard period. Default: the topology's guard period.")
    ] = None,
    grace: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="Grace period. Default: --guard or, without it, the topology's grace period."
        ),
    ] = None,
    partitions: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of partitions that dedup tasks read.")
    ] = 1,
    as_json: JsonOption = False,
) -> None:
    """Predict the size of the state on disk and in memory from a record rate, a guard period, and the kind of ID.

    If you pass TOPOLOGY, the command uses the topology's guard period and grace period, and compares the predicted size
    with the topology's `state.max_bytes_per_partition`. For unrelated IDs, such as UUIDs, the prediction is accurate to
    within 20%; sequential IDs may need only half the predicted space. The command does not connect to Kafka.

    Examples: dedup size topologies/orders.yaml --rate 2000

    dedup size --rate 500 --guard 24h --id text:20 --duplicates 0.3 --partitions 12
    """
    if rate > _MOST_PER_S:
        raise SettingsError(
            [Problem("--rate", f"{rate:g} records per second is too much; write at most {_MOST_PER_S:g}")]
        )
    parsed = None if topology is None else read_topology(topology)
    window = _window(parsed, guard, grace)
    fingerprints = parsed is not None and parsed.fingerprints_wanted
    data: dict[str, Any] = {
        **predict(window, rate * (1 - duplicates), key_bytes(kind), fingerprints=fingerprints),
        "partitions": partitions,
        "max_bytes_per_partition": None if parsed is None else parsed.state.max_bytes_per_partition,
    }
    data["disk_most_bytes_per_partition"] = data["disk_most_bytes"] // partitions
    say(data, _size_in_words(data, window), as_json=as_json)


def _size_in_words(data: dict[str, Any], window: Window) -> list[str]:
    copies, filters = "each standby replica takes the same", format_bytes(data["filter_most_bytes"])
    count, each_most = data["partitions"], format_bytes(data["disk_most_bytes_per_partition"])
    lines = [
        f"kept: {format_duration(window.retention_ms)} of event time, and up to half more until a segment is dropped",
        f"IDs: {data['ids_least']:,} to {data['ids_most']:,}, {data['bytes_an_id']:.0f} bytes each",
        f"disk: {format_bytes(data['disk_least_bytes'])} to {format_bytes(data['disk_most_bytes'])}; {copies}",
        *([f"disk, each of {count} partitions: up to {each_most}"] if count > 1 else []),
        f"memory: up to {filters} of filters, and 128 MiB of buffers and cache per worker",
    ]
    bound = data["max_bytes_per_partition"]
    if bound is not None:
        share = data["disk_most_bytes_per_partition"] / bound
        verdict = "a worker would stop: raise the limit, or use more partitions" if share > 1 else "fits"
        lines.append(f"state.max_bytes_per_partition: {share:.0%} of {format_bytes(bound)}; {verdict}")
    return lines


def _window(topology: Topology | None, guard: str | None, grace: str | None) -> Window:
    if guard is not None:
        # As in a topology file, the grace defaults to the guard period.
        guard_ms = grace_ms = _duration("--guard", guard)
        if not guard_ms:
            raise SettingsError([Problem("--guard", "must be at least 1ms, as in a topology file")])
    elif topology is not None:
        guard_ms, grace_ms = topology.window.guard_ms, topology.window.grace_ms
    else:
        raise SettingsError([Problem("--guard", "is missing; write --guard 24h, or name a topology file")])
    return Window(guard_ms, grace_ms if grace is None else _duration("--grace", grace))


def _duration(option: str, text: str) -> int:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise SettingsError([Problem(option, str(error))]) from error
