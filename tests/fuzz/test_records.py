"""The whole way of a batch, extraction to record batches, on records that nobody should send.

Each record must come out exactly once: forwarded, as duplicate, late or dead letter, as the slow reference says, its
bytes unchanged. DEDUP_FUZZ=1000000 asks for more records; a failure names the seed.
"""

from __future__ import annotations

import os
import random

import pytest
from aiokafka.record.memory_records import MemoryRecords

from dedup.core.extract import Extractor, Recipe
from dedup.core.extract_one import One, extract_one
from dedup.core.fold import OnFuture, OnMissing, OnTombstone, Rules
from dedup.core.reference_model import ModelRecord, ModelRules, ReferenceModel
from dedup.core.window import Source, Window
from dedup.kafka.record_batch import FeedBatch, ProducerIdentity
from dedup.metrics import TaskNumbers
from dedup.store.base import MemoryStore
from dedup.store.directory import Keeping
from dedup.worker.dedup_task import DedupTask
from dedup.worker.record_collector import Limits, RecordCollector, Refusals, Route, Routes
from tests.fuzz.records import NOW_MS, records
from tests.property.extract_cases import AVRO, CBOR, CSV, MSGPACK, PROTOBUF, RECIPES
from tests.simulation.cluster import Cluster
from tests.simulation.direct import IN, DirectWire, plan_of
from tests.simulation.scenario import CHANGELOG

RECORDS = int(os.environ.get("DEDUP_FUZZ", "100000"))
SEEDS = 20
SKEW_MS = 100_000
BY_FORM = {"avro": AVRO, "protobuf": PROTOBUF, "msgpack": MSGPACK, "cbor": CBOR, "csv": CSV}
FORMS = ("json", "framed", "protobuf", "msgpack", "framed", "avro", "cbor", "csv")
ROUTES = Routes(("in",), Route("out", 1), Route("dead", 1), Route("late", 1), duplicates=Route("twice", 1))
TOPICS = {"unique": "out", "exempt": "out", "duplicate": "twice", "late": "late", "dead_letter": "dead"}
SHAPES = [
    (guard_ms, grace_ms, extend) for guard_ms in (1, 60_000) for grace_ms in (0, 60_000) for extend in (False, True)
]


class FixedClock:
    """Stands still: a verdict must not depend on when the test runs."""

    put_forward_ms = 0

    def now_ms(self) -> int:
        return NOW_MS

    def heard(self, broker_ms: int) -> None:
        """No broker puts it forward."""


async def judge_of(recipe: Recipe, rules: Rules) -> DedupTask:
    """Return a judge with an empty changelog, restored."""
    plan = plan_of(Extractor(recipe), rules, skew_ms=SKEW_MS, compression="snappy")
    wire = DirectWire(Cluster())
    collector = RecordCollector(ROUTES, 0, Limits({}, FixedClock().now_ms, wire))
    judge = DedupTask(plan, wire, Keeping(MemoryStore), collector, FixedClock(), TaskNumbers())
    await judge.restore(None, own=False)
    return judge


def model_record(recipe: Recipe, record, offset: int, ceiling_ms: int) -> ModelRecord:
    """Return what the model is to judge, extracted the slow way."""
    source = Source(0, 0, offset)
    match extract_one(recipe, *record):
        case One(key, time_ms, fingerprint):
            return ModelRecord(key, time_ms, source, fingerprint, ceiling_ms=ceiling_ms)
        case fault:
            return ModelRecord(None, 0, source, fault=fault.kind.name.lower())


def sent(judged) -> dict[int, tuple[str, object]]:
    """Return each row's topic and record as the broker would get them; a row sent twice is a defect."""
    found = {}
    for batch in judged:
        if batch.target == CHANGELOG:
            continue
        whole = MemoryRecords(batch.sealed(ProducerIdentity(1, 1), 0)).next_batch()
        assert whole.validate_crc()
        for row, record in zip(batch.rows, whole, strict=True):
            assert row not in found, f"offset {row} was sent to {found[row][0]} and to {batch.target.topic}"
            found[row] = (batch.target.topic, record)
    return found


@pytest.mark.parametrize("opened", ["[", '{"x":'])
def test_unclosed_brackets_of_any_length_are_a_fault_however_deep_the_caller_stands(opened):
    # Was: nesting was looked at from 1,024 characters on, but 513 unclosed brackets are 513 deep. Found by 10^6 records.
    recipe = next(iter(RECIPES.values()))
    for count in range(450, 1_100, 7):
        value = b'{"id":"deep","x":' + opened.encode() * count
        assert not isinstance(extract_one(recipe, b"k", value, [], NOW_MS), One)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(SEEDS))
async def test_every_record_comes_out_once_as_the_reference_says(seed):
    dice = random.Random(seed)
    form = FORMS[seed % len(FORMS)]
    chosen = [each for each in RECIPES.values() if (each.fmt == "json_schema") == (form == "framed")]
    chosen = list(BY_FORM.get(form, {}).values()) or chosen
    recipe = dice.choice(chosen)
    guard_ms, grace_ms, extend = dice.choice(SHAPES)
    missing, tombstones = dice.choice(["dead_letter", "forward"]), dice.choice(["dead_letter", "forward"])
    future = dice.choice(["dead_letter", "clamp"])
    most_ms = 3 * guard_ms if extend else 0
    rules = Rules(
        Window(guard_ms, grace_ms, extend, most_ms),
        OnMissing(missing),
        OnTombstone(tombstones),
        OnFuture(future),
        fingerprints=recipe.fingerprint,
    )
    judge = await judge_of(recipe, rules)
    model = ReferenceModel(ModelRules(guard_ms, grace_ms, extend, most_ms, missing, tombstones, "duplicate", future))
    stream = records(dice, RECORDS // SEEDS, form=form)
    offset, left = 0, RECORDS // SEEDS
    applied_ms = 0
    while left:
        size = min(left, dice.choice((1, 3, 40, 400)))
        left -= size
        part = [next(stream) for _ in range(size)]
        columns = [list(column) for column in zip(*part, strict=True)]
        keys, values, headers, times_ms = columns
        batch = FeedBatch(IN, list(range(offset, offset + size)), times_ms, keys, values, headers, offset)
        found = sent(judge.judge(batch, Refusals()))
        ceiling_ms = max(NOW_MS, applied_ms) + SKEW_MS
        for row, record in enumerate(part, start=offset):
            verdict = model.judge(model_record(recipe, record, row, ceiling_ms))
            assert row in found, f"seed {seed}: offset {row} came out nowhere: {record}"
            topic, written = found[row]
            assert topic == TOPICS[verdict.kind], f"seed {seed}: offset {row}: {record} went to {topic}, not {verdict}"
            assert (written.key, written.value) == record[:2], f"seed {seed}: offset {row} was changed"
        assert len(found) == size
        offset += size
        judge.freeze(offset).apply({CHANGELOG: offset})
        applied_ms = model.stream_time_ms
