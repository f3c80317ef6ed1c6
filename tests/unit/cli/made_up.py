"""Commands of which only the answers of brokers, workers, registries, and Spark are made up."""

from __future__ import annotations

import asyncio
import io
import os
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

from typer.testing import CliRunner

from dedup.cli.main import create_app
from dedup.cli.run import VerdictProgress, restore_bar
from dedup.cli.status import in_words
from dedup.connect.sink_connector import Sunk
from dedup.connect.source_connector import Ingested
from dedup.kafka.topic_admin import Topic
from dedup.store.checkpoint import Checkpoint, StoreFile
from dedup.verify.report import Books, Report
from dedup.worker.checkpointing import MadeCheckpoint
from dedup.worker.dead_letter_replay import Replayed
from dedup.worker.reset import Doomed
from tests.terminal import screen

ROOT: Final = Path(__file__).parents[3]
NOW_MS: Final = 1_700_000_000_000
TOPIC: Final = "payments.card-authorizations.production.eu-central-1.v2"
PAYMENTS: Final = f"""dedup: 1
name: payments
source: {{topics: [{TOPIC}], format: avro}}
tracking_id: {{field: id}}
guard_period: 1d
output: {{topic: {TOPIC}.unique}}
"""
ORDERS: Final = """{"order_id": 17, "country": "DE", "amount": "19.90"}
{"order_id": 17, "country": "DE", "amount": "19.90"}
{"order_id": 18, "country": "US", "amount": "7.00"}
{"order_id": 19, "test": true}
{"order_id": 20, "amount": "7.00"}
"""
VERDICTS: Final = {"unique": 100_345_678, "duplicate": 20_000_000, "dead_letter": 1_204, "late": 311}
CAUSES: Final = {"dead_letter": {"not_json": 1_200, "id_missing": 4}, "late": {f"{TOPIC}/9": 311}}

Fakes = Callable[[], dict[str, Any]]


def printed_by(command: str, width: int, fakes: Fakes = dict) -> str:
    """Return what a command prints, with the fakes in the places of what their names name in dedup."""
    environ = {"COLUMNS": str(width), "NO_COLOR": "1"}
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as replaced:
        (Path(directory) / "payments.yaml").write_text(PAYMENTS, encoding="utf-8")
        (Path(directory) / "orders.jsonl").write_text(ORDERS, encoding="utf-8")
        for name, fake in fakes().items():
            replaced.enter_context(mock.patch(f"dedup.{name}", fake))
        replaced.callback(os.chdir, before)
        os.chdir(ROOT)
        words = [word.replace("DIR", directory) for word in command.split()]
        return CliRunner().invoke(create_app(), words, env=environ).output.replace(directory, "DIR")


def on_cluster(found: object = None, admin: object = None) -> Callable[..., Any]:
    """Return what stands for a cluster: the result of the work, or the cluster in which the work is done."""

    def answer(_settings: object, _client: str, work: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
        return asyncio.run(work(None, admin)) if found is None else found

    return answer


def applied() -> dict[str, Any]:
    configs = {"cleanup.policy": "delete", "retention.ms": "3600000"}
    have = {
        "orders": Topic("orders", "1", 24),
        "orders.duplicates": Topic("orders.duplicates", "2", 24, configs),
        "orders.unique": Topic("orders.unique", "3", 24, configs),
        "orders.changelog": Topic("orders.changelog", "4", 12, configs),
    }

    async def topics(_names: object) -> dict[str, Topic]:
        return have

    async def nothing(*_: object) -> None:
        """Refuse nothing, and make nothing."""

    return {
        "kafka.topic_admin.on_cluster": on_cluster(admin=SimpleNamespace(topics=topics)),
        "worker.topics.make": nothing,
        "worker.topics.refuse_plan": nothing,
    }


def reset() -> dict[str, Any]:
    states = tuple(Path(f"/var/lib/dedup/payments-2.example/payments/{each}") for each in range(2))
    doomed = Doomed("orders", ("orders.changelog",), states, ("s3://backups.eu-central-1/dedup/orders",))

    class Reset:
        def __init__(self, *_: object) -> None:
            """Take what a reset takes."""

        async def look(self) -> Doomed:
            return doomed

        async def run(self, *_: object) -> dict[tuple[str, int], int]:
            return {(TOPIC, each): 184_000_000 + each for each in range(2)}

    return {"kafka.topic_admin.on_cluster": on_cluster(), "worker.reset.Reset": Reset}


def replayed() -> dict[str, Any]:
    left = [f"{TOPIC}.dead-letter/9 offset {at}: {why}" for at, why in ((77, "it has no header dedup-source"),)]
    return {"kafka.topic_admin.on_cluster": on_cluster(Replayed(1_204, left))}


def checkpointed() -> dict[str, Any]:
    files = tuple(StoreFile(f"00000{each}.sst", 451_000_000, "0" * 64) for each in range(2))
    kept = [Checkpoint("orders", each, "4", "00", 3_600_000, 41_000_000, 12_400_000, files) for each in range(2)]
    made = [
        MadeCheckpoint(0, 41_000_000, kept[0], written=True, written_bytes=451_000_000),
        MadeCheckpoint(1, 0, kept[1], written=False),
        MadeCheckpoint(2, 0, None, written=False),
    ]
    return {"kafka.topic_admin.on_cluster": on_cluster(made)}


def exported() -> dict[str, Any]:
    return {"kafka.schema_registry.SchemaRegistry.export": lambda *_: 3}


def connected() -> dict[str, Any]:
    async def run_ingest(*_: object, **_options: object) -> Ingested:
        return Ingested(1_204_311, 4, 1_205, ["orders-2024-01-31.jsonl: its last line has no end yet, so it waits"])

    async def run_sink(*_: object, **_options: object) -> Sunk:
        return Sunk(inserted=1_204_000, updated=300, unchanged=11, dead_letters=4, transactions=1_205)

    return {
        "worker.logs.set_up_logging": lambda _: None,
        "connect.source_connector.run_ingest": run_ingest,
        "connect.sink_connector.run_sink": run_sink,
    }


def looked_up() -> Iterator[str]:
    """An ID that was seen, one that nobody knows, and one whose partition could not be asked."""
    sighting = {
        "first_ms": NOW_MS, "last_ms": NOW_MS + 9_000, "guarded_until_ms": NOW_MS + 86_400_000, "worker": "pay-0",
        "source": f"{TOPIC}/9 offset 184000000", "went": f"{TOPIC}.unique/9 offset 120345678", "partition": 9,
    }  # fmt: skip
    unreached = {"worker": "pay-1", "partitions": [10, 11], "why": "it does not answer at http://10.0.0.1:8080"}
    found = {"sightings": [sighting], "partitions": 24, "asked": list(range(10)), "belongs_to": 9}
    yield from in_words(found)
    yield from in_words(found | {"sightings": []})
    yield from in_words(found | {"sightings": [], "belongs_to": 10, "unreached": [unreached]})


def demo() -> dict[str, Any]:
    """Kafka, the producer, and the two workers, of which one is killed; the steps and their order are the demo's."""
    kafka = mock.MagicMock(
        bootstrap="127.0.0.1:9092", proxied=SimpleNamespace(bootstrap="", broker_port=1, proxy_port=2)
    )
    kafka.__enter__.return_value = kafka
    watch, fleet, sender = mock.MagicMock(), mock.MagicMock(), mock.MagicMock(running=False, sent=40_000)
    for each in (watch, fleet, sender):
        each.__enter__.return_value = each
    watch.members.side_effect = [{"a", "b"}, {"a", "b"}, {"a", "c"}]
    watch.look.side_effect = [SimpleNamespace(in_topic=44_500, judged=each) for each in (0, 22_309, 44_500)]
    fleet.unclean = []
    sender.stop.return_value = 40_000
    books = [Books("flights", each, read=11_125, unique=10_000, duplicates=1_125) for each in range(4)]

    def send(made: Iterator[object], *_: object, **_options: object) -> object:
        assert len(list(made)) == sender.sent
        return sender

    return {
        "embedded.flights.data_file": lambda: None,
        **{
            f"cli.demo_run.{name}": fake
            for name, fake in {
                "flights": lambda limit: (SimpleNamespace(key=b"%d" % each, value=b"") for each in range(limit)),
                "time": SimpleNamespace(monotonic=count(step=0.5).__next__, sleep=lambda _: None, time_ns=lambda: 0),
                "embedded_kafka": lambda *_, **_options: kafka,
                "make_topic": lambda *_: None,
                "FaultProxy": mock.MagicMock(),
                "ChaosFleet": lambda *_: fleet,
                "Watch": lambda *_: watch,
                "Sender": send,
                "verify": lambda *_, **_options: Report("flights", "", "replay", NOW_MS, 2.9, books=books),
            }.items()
        },
    }


def chain() -> dict[str, Any]:
    """Kafka, the table, and the processes of the chain, each of which is killed once."""
    kafka, running = mock.MagicMock(bootstrap="127.0.0.1:9092"), mock.MagicMock()
    for each in (kafka, running):
        each.__enter__.return_value = each
    running.count.side_effect = [67_500, 135_200, 202_600, 336_776]
    return {
        "embedded.flights.data_file": lambda: None,
        "cli.demo_run.embedded_kafka": lambda _: kafka,
        "cli.demo_run.make_topic": lambda *_: None,
        "cli.demo_run.time": SimpleNamespace(sleep=lambda _: None),
        "cli.demo_run._Chain": lambda *_: running,
        "cli.demo_run._FileWriter": lambda *_: SimpleNamespace(distinct=336_776, lines=404_131),
    }


def run(width: int) -> str:
    """A worker that restores two tasks, then what it has judged when it ends."""
    environ = {"COLUMNS": str(width), "FORCE_COLOR": "1", "NO_COLOR": "1"}
    restoring: Any = SimpleNamespace(restore_remaining=3_100_000, restore_total=12_400_000)
    with mock.patch.dict(os.environ, environ), redirect_stderr(io.StringIO()) as written:
        with VerdictProgress(enabled=True) as progress:
            progress.verdicts.update(VERDICTS | {"conflict": 12, "exempt": 3})
            progress.show("24 tasks", 48_210.5, *restore_bar([restoring, restoring]))
            running = screen(written.getvalue())
        progress.closing_line()
    return running + screen(written.getvalue())


def on_spark() -> dict[str, Any]:
    """Spark itself, and what its jobs return."""
    from dedup.spark.backfill import RunReport  # noqa: PLC0415 - not every installation has Spark
    from dedup.spark.batch_verdicts import Counts  # noqa: PLC0415
    from dedup.spark.incremental import IncrementalReport  # noqa: PLC0415
    from dedup.spark.rejected import Rejected  # noqa: PLC0415
    from dedup.spark.seed import Seeded, SeededPartition  # noqa: PLC0415

    @contextmanager
    def job(*_: object, **_options: object) -> Iterator[None]:
        yield None

    place = "s3a://lake/silver/orders"
    audited = Report("orders", "b:9092", "spark", NOW_MS, 812.5, books=[
        Books("orders", each, read=60_172_839, unique=50_172_839, duplicates=10_000_000) for each in range(2)
    ])  # fmt: skip
    backfilled = RunReport("may", "0", NOW_MS, "log", VERDICTS, f"{place}/run=may", CAUSES, 1_204, 311.5)
    added = IncrementalReport(12, place, VERDICTS, 120_347_193, NOW_MS, "files", 12_400_000, 311.5)
    partitions = tuple(SeededPartition(each, 6_200_000, NOW_MS, 1, each == 0) for each in range(2))
    begins: Any = {("orders", each): 184_000_000 for each in range(2)}
    fakes = {
        "cli.spark._job": job,
        "cli.spark.read_settings": lambda *_: None,
        "cli.spark.time.monotonic": lambda: 311.5,
        "spark.audit.audit": audited,
        "spark.backfill.backfill": backfilled,
        "spark.batch_verdicts.refuse_absent": None,
        "spark.files.read_files": SimpleNamespace(records=None),
        "spark.incremental.incremental": added,
        "spark.incremental_input.NewFiles": None,
        "spark.seed.seed": Seeded("orders", partitions, begins, Counts(VERDICTS, CAUSES), 311.5),
        "spark.rejected.keep_rejected": Rejected(
            {"id_missing": 4, "amount_ill_typed": 300}, "s3a://lake/rejected/orders/upsert=20261130T160000Z-5f3c9a21"
        ),
        "spark.rejected.refuse_overlap": None,
        "spark.tables.table_rows": SimpleNamespace(rejected=None),
        "spark.tables.upsert_jdbc": 12_400_000,
    }
    return {
        name: found if name.startswith("cli.") else lambda *_, found=found, **_options: found
        for name, found in fakes.items()
    }
