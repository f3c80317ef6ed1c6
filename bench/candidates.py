"""The candidates: how each is started on one job, and which consumer group tells how far it is."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML

from bench.build_peers import KAFKA_STREAMS, PEERS, java, kafka_streams_class_path, quix_python
from bench.forms import SOURCES, schema_settings

ROOT: Final = Path(__file__).parent.parent
_QUIET: Final = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
SIMPLEST: Final = ROOT / "topologies" / "simplest.yaml"


@dataclass(frozen=True, slots=True)
class Job:
    """One run: where from, where to, with which settings. `directory` is this run's own and empty."""

    bootstrap: str
    source: str
    output: str
    group: str
    partitions: int
    directory: Path
    compression: str
    commit_interval_ms: int
    until_done: bool
    """Whether a candidate that can end by itself at the source's end is told to."""

    @property
    def state_dir(self) -> Path:
        """Return the directory that the candidate's state is kept in."""
        return self.directory / "state"


@dataclass(frozen=True, slots=True)
class Command:
    """What starts a candidate. `environ` is added to ours."""

    arguments: tuple[str, ...]
    environ: Mapping[str, str]
    ends_itself: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A name as the results show it, and how to start it."""

    name: str
    command: Callable[[Job], Command]
    compressions: tuple[str, ...]
    """All are measured; the best one stands for the candidate."""
    slow: bool = False
    """Whether it is measured on the small workload, because the whole one takes it many minutes."""
    form: str = "json"
    """In what form it gets the events."""


def dedup(
    *,
    workers: int = 1,
    repartitioned: bool = False,
    group: int = 1,
    flow: str = "",
    form: str = "json",
    layout: str = "",
) -> Callable[[Job], Command]:
    """Return how `topologies/simplest.yaml` is run, with the job's names in it; two hops where `repartitioned`.

    ``group`` is the number of partitions that share a transaction, ``flow`` the code of a flow, ``form`` what the
    source's values are, and ``layout`` one of `LAYOUTS`.
    """

    def command(job: Job) -> Command:
        topology = simplest_for(job, repartitioned=repartitioned)
        topology["source"] |= SOURCES[form]
        if flow:
            (job.directory / "bench_flow.py").write_text(flow, encoding="utf-8")
            topology |= {"then": "bench_flow:flow"}
        if layout:
            topology = with_layout(topology, layout)
        if group > 1:
            topology |= {"transactions": {"partitions": group}}
        return _dedup(job, workers, topology, schema_settings(form, job.directory))

    return command


def _dedup(job: Job, workers: int, document: Mapping[str, Any], more_settings: Mapping[str, str]) -> Command:
    # JSON is YAML too.
    topology = job.directory / f"{job.group}.yaml"
    topology.write_text(json.dumps(document, indent=1), encoding="utf-8")
    config = job.directory / "config.yaml"
    config.write_text(json.dumps({"brokers": [job.bootstrap]}), encoding="utf-8")
    settings = {
        "state_dir": job.state_dir,
        "commit_interval": f"{job.commit_interval_ms}ms",
        "topics.replication_factor": 1,
        "topics.min_insync_replicas": 1,
        "topics.compression": job.compression,
        "web.port": 0,
        # A static member keeps its partitions over a restart, also over one with an empty disk.
        "worker_id": job.group,
        **more_settings,
    }
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    more = ("--workers", str(workers)) if workers > 1 else ()
    end = ("--exit-when-done",) if job.until_done else ()
    program = str(Path(sys.executable).parent / "dedup")
    return Command(
        (program, "run", str(topology), "--config", str(config), *sets, *more, *end), {}, ends_itself=job.until_done
    )


def simplest_for(job: Job, *, repartitioned: bool = False) -> dict[str, Any]:
    """Return the shipped simplest topology as this job's: its topics and name, the ID's field, the guard period."""
    topology: dict[str, Any] = YAML(typ="safe").load(SIMPLEST.read_text(encoding="utf-8"))
    by_id = {} if repartitioned else {"partitioned_by": "tracking_id"}
    return {
        **topology,
        "name": job.group,
        "source": {"format": "json", "topics": [job.source], **by_id},
        "tracking_id": {"field": "event_id"},
        "guard_period": "1h",
        "output": {"topic": job.output},
    }


LAYOUTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "side-topics": {"duplicates": "{output}.duplicates", "output": {"topic": "{output}", "headers": True}},
    "conflicts": {"conflicts": "{output}.conflicts"},
    "extend": {"extend": True},
}
"""Keys that make a worker write more than the output. Repeated events of W1 differ in their payloads, so each one is a
conflict."""


def with_layout(topology: dict[str, Any], *layouts: str) -> dict[str, Any]:
    """Return a topology with the keys of `LAYOUTS` added."""
    for layout in layouts:
        keys = json.dumps(LAYOUTS[layout]).replace("{output}", topology["output"]["topic"])
        topology = {**topology, **json.loads(keys)}
    return topology


def kafka_streams(variant: str, threads: int, version: str = KAFKA_STREAMS[0]) -> Callable[[Job], Command]:
    """Return how Kafka Streams is started; `variant` is `window` or `keyvalue`."""

    def command(job: Job) -> Command:
        program = (java(), _QUIET, "-cp", kafka_streams_class_path(version), "KsDedup")
        where = (job.bootstrap, job.source, job.output, job.group, str(job.state_dir))
        return Command((*program, *where, variant, job.compression, str(threads), str(job.commit_interval_ms)), {})

    return command


def quix(job: Job) -> Command:
    """Return how Quix Streams is started, in its own virtual environment."""
    program = (quix_python(), str(PEERS / "quix.py"))
    where = (job.bootstrap, job.source, job.output, job.group, str(job.state_dir))
    return Command((*program, *where, job.compression, str(job.commit_interval_ms)), {})


def stock_faust(job: Job) -> Command:
    """Return how stock Faust is started."""
    environ = {
        "BENCH_BROKER": job.bootstrap,
        "BENCH_SOURCE": job.source,
        "BENCH_OUTPUT": job.output,
        "BENCH_GROUP": job.group,
        "BENCH_STATE_DIR": str(job.state_dir),
        "BENCH_COMPRESSION": job.compression,
        "BENCH_COMMIT_INTERVAL_MS": str(job.commit_interval_ms),
        "BENCH_PARTITIONS": str(job.partitions),
    }
    return Command((sys.executable, str(PEERS / "stock_faust.py"), "worker", "--loglevel", "warn"), environ)


_PASSES_ALL: Final = """from dedup import Flow
flow = Flow()
@flow.on_unique
def unchanged(record):
    yield record
"""
_BOTH: Final = ("snappy", "lz4")
_FORMS: Final = [form for form in SOURCES if form != "json"]
_GROUPS: Final = (4, 16, 32, 64, 256)
CANDIDATES: Final[Mapping[str, Candidate]] = {
    each.name: each
    for each in (
        Candidate("dedup", dedup(), ("snappy",)),
        Candidate("dedup-2-workers", dedup(workers=2), ("snappy",)),
        Candidate("dedup-repartitioned", dedup(repartitioned=True), ("snappy",)),
        *(Candidate(f"dedup-{layout}", dedup(layout=layout), ("snappy",)) for layout in LAYOUTS),
        Candidate("dedup-flow", dedup(flow=_PASSES_ALL), ("snappy",)),
        *(Candidate(f"dedup-{form}".replace("_", "-"), dedup(form=form), ("snappy",), form=form) for form in _FORMS),
        *(Candidate(f"dedup-groups-of-{size}", dedup(group=size), ("snappy",)) for size in _GROUPS),
        Candidate("kafka-streams-window", kafka_streams("window", 1), _BOTH),
        Candidate("kafka-streams-window-headers", kafka_streams("window", 1), _BOTH, form="headers"),
        Candidate("kafka-streams-window-odd", kafka_streams("window", 1), _BOTH, form="odd"),
        Candidate("kafka-streams-window-backlog", kafka_streams("window", 1), _BOTH, form="backlog"),
        Candidate("kafka-streams-window-2-threads", kafka_streams("window", 2), _BOTH),
        Candidate("kafka-streams-4.3-window", kafka_streams("window", 1, KAFKA_STREAMS[1]), _BOTH),
        Candidate("kafka-streams-4.3-window-2-threads", kafka_streams("window", 2, KAFKA_STREAMS[1]), _BOTH),
        Candidate("kafka-streams-keyvalue", kafka_streams("keyvalue", 1), _BOTH),
        Candidate("kafka-streams-keyvalue-2-threads", kafka_streams("keyvalue", 2), _BOTH),
        Candidate("quix", quix, _BOTH),
        Candidate("stock-faust", stock_faust, _BOTH, slow=True),
    )
}
DEFAULT: Final = ("dedup", "kafka-streams-window", "kafka-streams-keyvalue", "quix", "stock-faust")


def environ_of(command: Command) -> dict[str, str]:
    """Return the whole environment of the candidate's process."""
    return {**os.environ, **command.environ}
