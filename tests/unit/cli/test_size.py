"""`dedup size` against the store itself: what is predicted is within a fifth of what RocksDB's files take."""

from __future__ import annotations

import json
import random
from pathlib import Path
from uuid import UUID

import pytest
from typer.testing import CliRunner

from dedup.cli.main import create_app
from dedup.core.tracking_id import encode_integer, encode_text, state_key
from dedup.core.window import Window
from dedup.store.base import StoreIdentity
from dedup.store.changelog import TaskRecord, encode_single_column
from dedup.store.rocks import RocksStore
from dedup.topology.state_size import bytes_an_id, key_bytes, predict

ROOT = Path(__file__).parents[3]
IDS = 60_000
BATCH = 2_000
BASE_MS = 1_700_000_000_000
DICE = random.Random(7)
KINDS = {
    "uuid": lambda: str(UUID(bytes=DICE.randbytes(16))),
    "text:8": lambda: DICE.randbytes(4).hex(),
    "text:20": lambda: DICE.randbytes(10).hex(),
    "text:31": lambda: DICE.randbytes(16).hex()[:31],
    "text:90": lambda: DICE.randbytes(45).hex(),
}


def sst_bytes(family) -> int:
    return int(family.property_int_value("rocksdb.live-sst-files-size"))


def files_bytes(directory: Path, keys: list[bytes], *, fingerprints: bool) -> int:
    """Return what these IDs take in files, written as a worker writes them: in batches, each ID at a time of its own."""
    store = RocksStore.open(directory, identity=StoreIdentity("t", 0, "x"))
    try:
        for at in range(0, len(keys), BATCH):
            part = keys[at : at + BATCH]
            times = [BASE_MS + (at + row) * 10 + DICE.randrange(1_000) for row in range(len(part))]
            offsets = list(range(at, at + len(part)))
            marks = [DICE.randbytes(8) for _ in part] if fingerprints else None
            values = encode_single_column(times, 0, 3, offsets, marks)
            record = TaskRecord(b"f" * 16, BASE_MS, (), at + len(part), 10**9)
            store.apply({0: dict(zip(part, values, strict=True))}, record, at + len(part))
        (family,) = (held.family.rows for held in store._segments.values())
        family.flush()
        logs = sum(path.stat().st_size for path in directory.glob("filter-log-*"))
        return sst_bytes(family) + logs
    finally:
        store.close()


@pytest.mark.parametrize("kind", [*KINDS, "integer"])
@pytest.mark.parametrize("fingerprints", [False, True])
def test_the_prediction_is_within_a_fifth_of_what_is_measured(tmp_path, kind, fingerprints):
    if kind == "integer":
        keys = [state_key(encode_integer(DICE.getrandbits(39))) for _ in range(IDS)]
    else:
        keys = [state_key(encode_text(KINDS[kind]())) for _ in range(IDS)]
    found = CliRunner().invoke(create_app(), ["size", "--guard", "1s", "--id", kind, "--json"])
    length = key_bytes(kind)
    assert json.loads(found.output)["bytes_an_id"] == bytes_an_id(length, fingerprints=False)
    measured = files_bytes(tmp_path / "store", keys, fingerprints=fingerprints)
    assert IDS * bytes_an_id(length, fingerprints=fingerprints) == pytest.approx(measured, rel=0.2)


def test_what_is_kept_is_one_retention_to_one_and_a_half():
    found = predict(Window(guard_ms=3_600_000, grace_ms=1_800_000), 10, 17, fingerprints=False)
    assert (found["ids_least"], found["ids_most"]) == (54_000, 81_000)
    assert found["disk_most_bytes"] == round(81_000 * found["bytes_an_id"])


def test_a_steady_flow_takes_between_the_least_and_the_most_that_are_predicted(tmp_path):
    """Four retentions of event time, dropped as a worker drops: right after each drop, and right before the next."""
    window, per_s = Window(guard_ms=20_000, grace_ms=10_000), 1_000
    predicted = predict(window, per_s, 17, fingerprints=False)
    store = RocksStore.open(tmp_path / "store", identity=StoreIdentity("t", 0, "x"))
    ids: dict[str, list[int]] = {"least": [], "most": []}
    disk: dict[str, list[int]] = {"least": [], "most": []}

    def note(which: str) -> None:
        families = [held.family.rows for held in store._segments.values()]
        for family in families:
            family.flush()
        ids[which].append(store.count_ids())
        logs = sum(held.filter.disk_bytes for held in store._segments.values())
        disk[which].append(logs + sum(map(sst_bytes, families)))

    try:
        for second in range(4 * window.retention_ms // 1000):
            begin_ms = BASE_MS + second * 1_000
            keys = [state_key(encode_text(KINDS["uuid"]())) for _ in range(per_s)]
            values = encode_single_column(range(begin_ms, begin_ms + per_s), 0, 3, range(per_s), None)
            # A segment of today's begins in the middle of a second.
            writes: dict[int, dict[bytes, bytes]] = {}
            for row, (key, value) in enumerate(zip(keys, values, strict=True)):
                writes.setdefault(window.segment_of(begin_ms + row), {})[key] = value
            record = TaskRecord(b"f" * 16, begin_ms + per_s, (), second, window.segment_ms)
            warm = second * 1_000 > 2 * window.retention_ms
            oldest_ms = window.oldest_live_ms(begin_ms + per_s)
            drops = any(start + window.segment_ms <= oldest_ms for start in store.segments())
            if warm and drops:
                note("most")
            store.apply(writes, record, second + 1)
            if store.drop_below(oldest_ms, window.segment_ms) and warm:
                note("least")
    finally:
        store.close()
    assert len(ids["least"]) == len(ids["most"]) >= 3
    for which, wanted_ids, wanted_bytes in (
        ("least", predicted["ids_least"], predicted["disk_least_bytes"]),
        ("most", predicted["ids_most"], predicted["disk_most_bytes"]),
    ):
        assert ids[which] == pytest.approx([wanted_ids] * len(ids[which]), rel=0.05)
        assert disk[which] == pytest.approx([wanted_bytes] * len(disk[which]), rel=0.2)


def size(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(create_app(), ["size", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return getattr(result.exception, "exit_code", 1), str(result.exception)
    return result.exit_code, result.output


def test_a_topology_says_the_window_and_its_bound(tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text(
        "dedup: 1\nname: t\nsource: {topics: [c]}\ntracking_id: {field: id}\nguard_period: 1h\ngrace: 30m\n"
        "output: {topic: o}\nstate: {max_bytes_per_partition: 1MiB}\n"
    )
    code, text = size(str(path), "--rate", "10", "--partitions", "2")
    assert code == 0
    assert "IDs: 54,000 to 81,000, 45 bytes each" in text
    assert "state.max_bytes_per_partition: 172% of 1.0 MiB; a worker would stop" in text
    assert "; fits" in size(str(path), "--rate", "10", "--partitions", "6")[1]
    half = json.loads(size(str(path), "--rate", "10", "--duplicates", "0.5", "--json")[1])
    assert half["ids_most"] == 40_500


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "--guard: is missing"),
        (("--guard", "1"), "has no unit"),
        (("--guard", "1h", "--id", "text"), '"text" is unknown'),
        (("--guard", "1h", "--id", "text:0"), '"text:0" is unknown'),
        (("--guard", "1h", "--id", "text:" + "9" * 5_000), "is unknown; write uuid"),
        (("--guard", "0s"), "--guard: must be at least 1ms"),
        (("--guard", "1h", "--rate", "inf"), "--rate: inf records per second is too much"),
        (("--guard", "1h", "--rate", "1e308"), "--rate: 1e+308 records per second is too much"),
    ],
)
def test_a_mistake_ends_with_2(arguments, says):
    code, text = size(*arguments)
    assert code == 2
    assert says in text
