"""Files as a source: what grows, is rotated, truncated, broken; each line in the topic once."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import pytest

from dedup.connect.file_source import CHUNK_BYTES, Files
from dedup.errors import AuthorMistake, BrokerUnavailable, StateIncompatible, TaskMigrated
from dedup.topology.schema import FilesSource
from tests.connect.stage import lines
from tests.waiting import until

pytestmark = pytest.mark.broker


def numbers(stage):
    return sorted(value["n"] for value in stage.values())


async def test_a_file_that_grows_is_sent_once(stage):
    path = stage.incoming / "a.jsonl"
    path.write_bytes(lines(0, 100))
    assert (await stage.ingest()).records == 100
    with path.open("ab") as file:
        file.write(lines(100, 50) + b'{"id":"e150",')
    done = await stage.ingest()
    assert done.records == 50
    assert "13 bytes after the last line feed are not a complete line yet" in done.waiting[0]
    with path.open("ab") as file:
        file.write(b'"n":150}\n')
    assert (await stage.ingest()).records == 1
    assert numbers(stage) == list(range(151))
    assert all(message.key().decode() == json.loads(message.value())["id"] for message in stage.read())


async def test_records_without_an_id_get_their_place_and_keep_their_order(stage):
    (stage.incoming / "a.jsonl").write_bytes(lines(0, 3_000))
    await stage.ingest(more="")
    found = stage.read()
    assert len({message.partition() for message in found}) == 1
    assert [json.loads(message.value())["n"] for message in found] == list(range(3_000))
    ids = [dict(message.headers())["dedup-id"] for message in found]
    assert len(set(ids)) == 3_000
    assert ids[0].decode().startswith(f"{stage.name}/")


ODD = [
    b'{"id":"a","n":1,"cut":"\\ud83d"}',  # half an emoji, as JavaScript cuts it
    b'{"id":"b","n":1,"m":1e999}',
    b'{"id":"c","n":1,"m":' + b"9" * 5_000 + b"}",
    b'{"\\ud800":1,"id":"d","n":1}',
    b'{"id":12345678901234567890123,"n":1}',
    b'{"id":1234567890123456789,"n":1,"cut":"\\ud83d"}',
    b'{"id":1234567890123456789,"n":1}',
    b'{"id":18446744073709551615,"n":1,"m":1e999}',
    b'{"id":18446744073709551615,"n":1}',
]


@pytest.mark.parametrize("rule", ["{field: id}", "{fields: [id, n]}"])
async def test_json_that_fast_decoders_refuse_is_sent(stage, rule):
    """Was: an uncaught error, at the same line after each restart."""
    (stage.incoming / "a.jsonl").write_bytes(b"".join(line + b"\n" for line in ODD))
    assert (await stage.ingest(more=f"tracking_id: {rule}")).records == len(ODD)
    found = stage.read()
    assert sorted(message.value() for message in found) == sorted(ODD)
    keys = {message.value(): message.key() for message in found}
    assert keys[ODD[5]] == keys[ODD[6]]
    assert keys[ODD[7]] == keys[ODD[8]]


async def test_a_renamed_file_is_the_same_file(stage):
    path = stage.incoming / "a.jsonl"
    path.write_bytes(lines(0, 10))
    await stage.ingest()
    # Rotated away with a line that nobody has read yet, to a name that the pattern leaves out.
    with path.open("ab") as file:
        file.write(lines(10, 5))
    path.rename(stage.incoming / "a.jsonl.1")
    path.write_bytes(lines(15, 5))
    assert (await stage.ingest()).records == 10
    (stage.incoming / "a.jsonl.1").rename(stage.incoming / "old.jsonl")
    assert (await stage.ingest()).records == 0
    assert numbers(stage) == list(range(20))


@pytest.mark.parametrize("content", [lines(50, 2), lines(50, 50)], ids=["shorter", "as long"])
async def test_a_truncated_file_stops_ingest_unless_it_may_start_over(stage, content):
    path = stage.incoming / "a.jsonl"
    path.write_bytes(lines(0, 10))
    await stage.ingest()
    inode = path.stat().st_ino
    path.write_bytes(content)
    assert path.stat().st_ino == inode
    with pytest.raises(AuthorMistake, match=r"a\.jsonl: was read up to byte .*: it was truncated or replaced"):
        await stage.ingest()
    assert len(stage.read()) == 10
    await stage.ingest(stage.files("changed: start_over"))
    assert len(stage.read()) == 10 + content.count(b"\n")


async def test_a_copy_in_the_place_of_a_file_stops_ingest(stage):
    path = stage.incoming / "a.jsonl"
    path.write_bytes(lines(0, 10))
    await stage.ingest()
    copy = stage.directory / "copy"
    copy.write_bytes(lines(0, 12))
    copy.replace(path)
    with pytest.raises(AuthorMistake, match="is it a copy"):
        await stage.ingest()
    assert numbers(stage) == list(range(10))


async def test_bad_lines_are_dead_letters_and_their_neighbours_are_sent(stage, caplog):
    bad = [b"no json", b'{"id":"x","n":\xff}', b'{"n":1}', b'{"id":null}', b'{"id":"twice","id":"twice"}']
    path = stage.incoming / "a.jsonl"
    path.write_bytes(lines(0, 20) + b"\n".join(bad) + b"\n\n  \n" + lines(20, 20))
    done = await stage.ingest()
    assert (done.records, done.dead_letters) == (40, len(bad))
    assert numbers(stage) == list(range(40))
    letters = stage.read(f"{stage.name}.dead-letter")
    assert [message.value() for message in letters] == bad
    reasons = [dict(message.headers())["dedup-reason"].decode() for message in letters]
    assert reasons == ["not_json", "not_utf8", "id_missing", "id_null", "repeated_member"]
    told = [record.message for record in caplog.records if "becomes a dead letter in" in record.message]
    assert [reason for reason in reasons for text in told if f"({reason})" in text] == reasons
    assert told[0].startswith(f"{stage.name}: {path}, byte {len(lines(0, 20))}, becomes a dead letter in")


async def test_a_line_of_100_mb_is_a_dead_letter_of_its_digest(stage):
    path = stage.incoming / "a.jsonl"
    with path.open("wb") as file:
        file.write(lines(0, 5))
        for _ in range(100):
            file.write(b"x" * CHUNK_BYTES)
        file.write(b"\n" + lines(5, 5))
    done = await stage.ingest()
    assert (done.records, done.dead_letters) == (10, 1)
    (letter,) = stage.letters()
    assert letter["dedup-reason"] == "too_large"
    assert f"a line of {100 * CHUNK_BYTES} bytes" in letter["dedup-detail"]
    assert numbers(stage) == list(range(10))


async def test_a_line_just_too_large_for_the_topic_is_a_dead_letter(stage):
    (stage.incoming / "a.jsonl").write_bytes(
        lines(0, 5) + b'{"id":"big","n":0,"pad":"%s"}\n' % (b"x" * 1_048_400) + lines(5, 5)
    )
    done = await stage.ingest()
    assert (done.records, done.dead_letters) == (10, 1)
    assert stage.letters()[0]["dedup-reason"] == "too_large"


async def test_all_records_that_a_broker_refuses_are_dead_letters_at_once(stage, admin, caplog):
    """Brokers refuse records that are an hour ahead (KIP-937), and name all of a batch (KIP-467).

    Was: one more attempt for each such record.
    """
    admin.create_topic(stage.topic, 2, {"message.timestamp.after.max.ms": "3600000", "retention.ms": "-1"})
    text = b"".join(b'{"id":"e%d","n":%d,"at":%d}\n' % (n, n, 4_000_000_000_000 if n % 3 else 1) for n in range(3_000))
    for name in ("a", "b"):
        (stage.incoming / f"{name}.jsonl").write_bytes(text)
    more = "tracking_id: {field: id}\nevent_time: {field: at, unit: ms}"
    done = await stage.ingest(more=more)
    assert (done.records, done.dead_letters) == (2_000, 4_000)
    attempts = [record for record in caplog.records if "records become dead letters" in record.message]
    assert len(attempts) <= 2
    assert numbers(stage) == sorted(2 * list(range(0, 3_000, 3)))
    letters = stage.read(f"{stage.name}.dead-letter")
    assert sorted(message.value() for message in letters) == sorted(
        2 * [t for t in text.splitlines() if b":1}" not in t]
    )
    assert {letter["dedup-reason"] for letter in stage.letters()} == {"refused"}


async def test_a_clock_that_is_ahead_stops_ingest_and_loses_nothing(stage, admin, monkeypatch):
    """Was: every line became a dead letter, and the exit code was 0."""
    admin.create_topic(stage.topic, 2, {"message.timestamp.after.max.ms": "3600000"})
    (stage.incoming / "a.jsonl").write_bytes(lines(0, 20))
    time_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: time_ns() + 2 * 3_600_000_000_000)
    with pytest.raises(BrokerUnavailable, match=r"refuses the time of this machine's clock, .* Nothing was lost"):
        await stage.ingest()
    monkeypatch.undo()
    assert (await stage.ingest()).dead_letters == 0
    assert (numbers(stage), stage.letters()) == (list(range(20)), [])


async def test_batches_are_as_small_as_the_topic_asks(stage, admin, caplog):
    """Was: each batch was refused, and its records sent again one by one."""
    admin.create_topic(stage.topic, 2, {"max.message.bytes": "5000", "retention.ms": "-1"})
    (stage.incoming / "a.jsonl").write_bytes(lines(0, 3_000))
    assert (await stage.ingest()).records == 3_000
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    assert numbers(stage) == list(range(3_000))


async def test_a_dead_letter_that_its_topic_has_no_room_for_is_a_digest(stage, admin):
    """Was: ingest stopped, since the topic of dead letters took less than that of records."""
    admin.create_topic(stage.topic, 2, {"max.message.bytes": "3000000"})
    admin.create_topic(f"{stage.name}.dead-letter", 1, {"max.message.bytes": "2000"})
    bad = b"x" * 2_500_000
    (stage.incoming / "a.jsonl").write_bytes(lines(0, 3) + bad + b"\n")
    done = await stage.ingest()
    assert (done.records, done.dead_letters) == (3, 1)
    (letter,) = stage.letters()
    assert (
        f"2500000 bytes, too large for this topic; blake2b-256:{blake2b(bad, digest_size=32).hexdigest()}"
        in (letter["dedup-detail"])
    )


async def test_a_dead_letter_may_be_as_large_as_a_record(stage, admin):
    admin.create_topic(stage.topic, 2, {"max.message.bytes": "3000000"})
    bad = b"x" * 2_500_000
    (stage.incoming / "a.jsonl").write_bytes(bad + b"\n")
    assert (await stage.ingest()).dead_letters == 1
    assert [message.value() for message in stage.read(f"{stage.name}.dead-letter")] == [bad]


async def test_positions_that_a_broker_would_delete_are_refused(stage, admin):
    """Was: after seven days without a new line, all lines were sent again."""
    positions = f"{stage.name}-source-offsets"
    admin.create_topic(positions, 1, {"cleanup.policy": "delete"})
    (stage.incoming / "a.jsonl").write_bytes(lines(0, 3))
    with pytest.raises(
        StateIncompatible, match=f"{positions}.*cleanup.policy delete.*--add-config cleanup.policy=comp"
    ):
        await stage.ingest()
    assert stage.read() == []


async def test_a_last_line_without_a_line_feed_is_taken_where_files_come_complete(stage):
    (stage.incoming / "a.jsonl").write_bytes(lines(0, 3).removesuffix(b"\n"))
    assert (await stage.ingest()).records == 2
    assert (await stage.ingest(stage.files("last_line: take"))).records == 1
    assert numbers(stage) == [0, 1, 2]


async def test_what_can_not_be_read_stops_with_its_name(stage, monkeypatch):
    (stage.incoming / "a.jsonl").mkdir()
    with pytest.raises(AuthorMistake, match=r"a\.jsonl: is not a regular file"):
        await stage.ingest()
    (stage.incoming / "a.jsonl").rmdir()
    (stage.incoming / "b.jsonl").symlink_to("nowhere")
    with pytest.raises(AuthorMistake, match=r"b\.jsonl: is a broken link"):
        await stage.ingest()
    (stage.incoming / "b.jsonl").unlink()
    (stage.incoming / "c.jsonl").write_bytes(lines(0, 1))

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    # Root may read everything.
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(AuthorMistake, match=r"c\.jsonl: cannot be read: Permission denied"):
        await stage.ingest()
    monkeypatch.undo()
    with pytest.raises(AuthorMistake, match="cannot be read: No such file or directory"):
        await stage.ingest(f"files: {{directory: {stage.directory}/gone}}")


CSV = "format: csv, pattern: '*.csv', columns: {id: text, n: integer, price: number, paid: boolean}"


async def test_a_file_deleted_after_it_was_read_does_not_stop_the_others(stage):
    """Its number may be given to another file, which is read from its beginning."""
    (stage.incoming / "a.jsonl").write_bytes(lines(0, 10))
    process = stage.start("ingest", str(stage.ingest_file(stage.files())))
    until(lambda: len(stage.read()) == 10, f"the first file; log:\n{process.log}")
    for number in range(1, 4):
        (stage.incoming / "a.jsonl").unlink()
        (stage.incoming / "a.jsonl").write_bytes(lines(10 * number, 10))
        expected = 10 * (number + 1)
        until(lambda expected=expected: len(stage.read()) == expected, f"{expected}; log:\n{process.log}")
    assert process.stop() == 0
    assert sorted(value["n"] for value in stage.values()) == list(range(40))


async def test_csv_rows_become_json(stage):
    (stage.incoming / "a.csv").write_bytes(b'\xef\xbb\xbfid,n,price,paid\r\ne0,0,1.5,true\r\n"e,1",1,2,0\r\ne2,,,\r\n')
    assert (await stage.ingest(stage.files(CSV))).records == 3
    assert sorted(stage.values(), key=lambda value: value["id"]) == [
        {"id": "e,1", "n": 1, "price": 2, "paid": False},
        {"id": "e0", "n": 0, "price": 1.5, "paid": True},
        {"id": "e2", "n": None, "price": None, "paid": None},
    ]
    with (stage.incoming / "a.csv").open("ab") as file:
        file.write(b"e3,3,3,1\n")
    assert (await stage.ingest(stage.files(CSV))).records == 1


async def test_csv_rows_that_are_none_are_dead_letters(stage):
    bad = [b"e1,1", b"e2,2,3,1,5", b"e3,x,1,1", b'e4,"1,1,1', b"e5,5,nan,1", b"\xff,6,1,1", b"e7,7,1,maybe"]
    (stage.incoming / "a.csv").write_bytes(b"id,n,price,paid\n" + b"\n".join(bad) + b"\ne0,0,0,0\n")
    done = await stage.ingest(stage.files(CSV))
    assert (done.records, done.dead_letters) == (1, len(bad))
    reasons = [letter["dedup-reason"] for letter in stage.letters()]
    assert reasons == [
        "wrong_columns", "wrong_columns", "wrong_type", "not_csv", "wrong_type", "not_utf8", "wrong_type",
    ]  # fmt: skip


async def test_csv_with_other_columns_stops_with_both_lists(stage):
    (stage.incoming / "a.csv").write_bytes(b"id,n,prize,paid\ne0,0,0,0\n")
    with pytest.raises(AuthorMistake, match=r"a\.csv:1: its header line is id, n, prize, paid, but `columns` has id"):
        await stage.ingest(stage.files(CSV))
    assert stage.read() == []


async def test_the_second_of_two_wins_and_the_first_stops_with_task_migrated(stage):
    path = stage.incoming / "a.jsonl"
    path.write_bytes(lines(0, 1_000))
    file = stage.ingest_file(stage.files())
    first = stage.start("ingest", str(file), log="first")
    until(lambda: len(stage.read()) == 1_000, "the first sends")
    second = stage.start("ingest", str(file), log="second")
    until(lambda: owners(stage) == 2, "the second has taken over")
    with path.open("ab") as more:
        more.write(lines(1_000, 1_000))
    assert first.wait() == TaskMigrated.exit_code
    assert "TaskMigrated" in first.log
    until(lambda: len(stage.read()) == 2_000, f"the second sends; its log:\n{second.log}")
    assert second.stop() == 0
    assert numbers(stage) == list(range(2_000))


def owners(stage):
    found = stage.read(f"{stage.name}-source-offsets")
    return len({json.loads(message.value())["run"] for message in found if message.key() == b"owner"})


def files_of(stage, pattern, columns=None, *, start_over=False):
    """Return a reader of the incoming directory, as ingest has it."""
    changed = "start_over" if start_over else "stop"
    written = {"directory": str(stage.incoming), "pattern": pattern, "changed": changed}
    if columns is not None:
        written |= {"format": "csv", "columns": columns}
    return Files("in", FilesSource(**written), 1_000_000)


def test_a_deleted_file_is_read_again_from_what_was_committed(stage):
    """After a refused record, for one: its descriptor is the only way to it."""
    path = stage.incoming / "a.jsonl"
    path.write_bytes(lines(0, 3))
    files = files_of(stage, "*.jsonl")
    first = files.poll()
    committed = {first.part: first.position}
    with path.open("ab") as file:
        file.write(lines(3, 2))
    assert len(files.poll().values) == 2
    path.unlink()
    for positions, left in ((committed, 2), ({}, 5)):
        files.restore(positions)
        assert len(files.poll().values) == left
    files.close()


def test_a_deleted_file_is_read_again_until_its_end_is_committed(stage):
    """Its end is read while what precedes it is being sent, and may be refused."""
    path = stage.incoming / "a.jsonl"
    path.write_bytes(lines(0, 3))
    files = files_of(stage, "*.jsonl")
    for _ in range(2):
        assert len(files.poll().values) == 3
        path.unlink(missing_ok=True)
        end = files.poll() or files.poll()  # that it is deleted is seen when nothing is left
        assert end.values == []
        files.restore({})
    assert len(files.poll().values) == 3
    end = files.poll() or files.poll()
    files.committed({end.part: end.position})
    files.restore({end.part: end.position})
    assert files.poll() is None
    files.close()


def test_a_file_that_was_renamed_out_of_the_pattern_is_read_again_until_its_end_is_committed(stage):
    path = stage.incoming / "a.jsonl"
    path.write_bytes(lines(0, 3))
    files = files_of(stage, "*.jsonl")
    found = files.poll()
    path.rename(stage.incoming / "a.done")
    assert files.poll() is None
    files.restore({})
    again = files.poll()
    assert again.values == found.values
    assert files.poll() is None
    files.committed({again.part: again.position})
    assert open_files_of(stage) == []
    files.restore({again.part: again.position})
    named = commit_name(files)
    files.restore(named)
    assert files.poll() is None
    files.close()


def commit_name(files):
    """Commit what a poll returns for a file that has another name since it was read: no records, and the name."""
    found = files.poll()
    assert found.values == []
    positions = {found.part: found.position}
    files.committed(positions)
    return positions


def rotated(stage, files, text):
    """Read a file, and rotate it to a name outside the pattern. Return the committed positions."""
    path = stage.incoming / "a.log"
    path.write_bytes(text)
    found = files.poll()
    path.rename(stage.incoming / "a.log.1")
    files.committed({found.part: found.position})
    assert files.poll() is None  # the rest of the first scan's turns
    assert files.poll() is None  # that it has another name is seen, and it is closed
    return commit_name(files)


def reuse_inode(stage, text):
    """Write a new file of the first name into the inode of the rotated one, as a file system may do once it is gone."""
    inode = (stage.incoming / "a.log.1").stat().st_ino
    path = stage.incoming / "a.log"
    (stage.incoming / "a.log.1").rename(path)
    path.write_bytes(text)
    assert path.stat().st_ino == inode


@pytest.mark.parametrize("restarted", [False, True])
def test_a_new_file_that_reuses_the_inode_of_a_rotated_file_is_read(stage, restarted):
    files = files_of(stage, "*.log")
    positions = rotated(stage, files, lines(0, 3))
    reuse_inode(stage, lines(10, 4))
    if restarted:
        files.close()
        files = files_of(stage, "*.log")
        files.restore(positions)
    assert [json.loads(value)["n"] for value in files.poll().values] == [10, 11, 12, 13]
    files.close()


@pytest.mark.parametrize("more", [b"", lines(1, 2)], ids=["the same line", "more lines"])
def test_a_new_file_that_reuses_the_inode_and_begins_with_the_same_line_stops_ingest(stage, more):
    """Whether it is the old file or a new one can not be known; going on at its end would lose its first lines."""
    files = files_of(stage, "*.log")
    positions = rotated(stage, files, lines(0, 1))
    reuse_inode(stage, lines(0, 1) + more)
    with pytest.raises(AuthorMistake, match=r"a\.log: has the inode of .*a\.log\.1, which was read up to byte"):
        files.poll()
    files.close()
    fresh = files_of(stage, "*.log", start_over=True)
    fresh.restore(positions)
    assert len(fresh.poll().values) == 1 + more.count(b"\n")
    fresh.close()


def test_a_rotated_file_that_gets_its_name_back_is_the_same_file(stage):
    files = files_of(stage, "*.log")
    rotated(stage, files, lines(0, 3))
    (stage.incoming / "a.log.1").rename(stage.incoming / "a.log")
    assert files.poll() is None
    files.close()


def test_a_file_outside_the_pattern_that_reuses_an_inode_is_not_read(stage):
    files = files_of(stage, "*.log")
    positions = rotated(stage, files, lines(0, 3))
    (stage.incoming / "a.log.1").write_bytes(lines(50, 9))
    assert files.poll() is None
    files.restore(positions)
    assert files.poll() is None
    files.close()


def open_files_of(stage):
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(str(each.readlink()))
    return [each for each in found if each.startswith(str(stage.incoming))]


def test_a_csv_file_that_starts_over_has_its_own_line_of_names(stage):
    path = stage.incoming / "a.csv"
    path.write_bytes(b"from,to\na,b\n")
    files = files_of(stage, "*.csv", {"from": "text", "to": "text"}, start_over=True)
    assert [json.loads(value) for value in files.poll().values] == [{"from": "a", "to": "b"}]
    path.write_bytes(b"to,from\nd,c\n")
    assert [json.loads(value) for value in files.poll().values] == [{"from": "c", "to": "d"}]
    files.close()


def test_a_torn_line_that_its_writer_cuts_off_and_writes_again_is_read_as_it_is_now(stage):
    """As after a crash in the middle of a line. Was: the new line followed what was left of the torn one."""
    path = stage.incoming / "a.jsonl"
    path.write_bytes(lines(0, 3) + b'{"id":"e3","n":3,"torn":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa')
    files = files_of(stage, "*.jsonl")
    assert len(files.poll().values) == 3
    assert files.poll() is None
    assert files.waiting()
    os.truncate(path, len(lines(0, 3)))
    with path.open("ab") as file:
        file.write(lines(3, 4))
    assert files.poll().values == lines(3, 4).splitlines()
    files.close()


def test_a_torn_line_of_any_length_can_be_cut_off(stage):
    path = stage.incoming / "a.jsonl"
    path.write_bytes(lines(0, 3) + b"\0" * 2_000_000)
    files = files_of(stage, "*.jsonl")
    assert len(files.poll().values) == 3
    assert files.poll() is None
    os.truncate(path, len(lines(0, 3)))
    with path.open("ab") as file:
        file.write(lines(3, 4))
    found = files.poll()
    assert (found.values, found.dead) == (lines(3, 4).splitlines(), [])
    files.close()


def test_files_that_get_the_inodes_of_one_another_are_not_sent_again(stage):
    """As after a move to another volume. Was: all lines were sent again, with a warning."""
    a, b, spare = (stage.incoming / name for name in ("a.jsonl", "b.jsonl", "spare"))
    a.write_bytes(lines(0, 3))
    b.write_bytes(lines(10, 3))
    files = files_of(stage, "*.jsonl")
    positions = {found.part: found.position for found in (files.poll(), files.poll())}
    files.close()
    for path, to in ((a, spare), (b, a), (spare, b)):
        path.rename(to)
    a.write_bytes(lines(0, 3))
    b.write_bytes(lines(10, 3))
    files = files_of(stage, "*.jsonl")
    files.restore(positions)
    with pytest.raises(AuthorMistake, match=r"a\.jsonl: is not the file with this name .* is it a copy"):
        files.poll()
    files.close()


def test_a_second_name_of_a_file_is_not_read(stage, caplog):
    path = stage.incoming / "a.jsonl"
    path.write_bytes(lines(0, 3))
    (stage.incoming / "hard.jsonl").hardlink_to(path)
    (stage.incoming / "soft.jsonl").symlink_to(path)
    files = files_of(stage, "*.jsonl")
    assert len(files.poll().values) == 3
    assert [files.poll() for _ in range(3)] == [None] * 3
    assert not caplog.records
    files.close()


def test_an_inode_number_that_two_devices_have_stops_ingest(stage, monkeypatch):
    """Was: the second file was taken for the first one under another name, and never read."""
    for name in ("a.jsonl", "b.jsonl"):
        (stage.incoming / name).write_bytes(lines(0, 3))
    files = files_of(stage, "*.jsonl")
    found = {path: tuple(path.stat()) for path in sorted(stage.incoming.iterdir())}
    inode = 7
    listed = {path: os.stat_result((each[0], inode, at, *each[3:])) for at, (path, each) in enumerate(found.items())}
    monkeypatch.setattr(files, "_list", lambda: listed)
    with pytest.raises(
        AuthorMistake, match=r"b\.jsonl: has the inode number 7, which another file .* on another device"
    ):
        files.poll()
    files.close()


def test_a_name_that_is_not_utf8_stops_ingest(stage):
    """Was: an uncaught error."""
    Path(os.fsdecode(os.fsencode(stage.incoming) + b"/a\xff.jsonl")).write_bytes(lines(0, 3))
    files = files_of(stage, "*.jsonl")
    with pytest.raises(AuthorMistake, match=r"a\\xff\.jsonl: has a name that is not UTF-8; rename it"):
        files.poll()
    files.close()


def test_a_csv_file_is_deleted_before_its_header_line_is_complete(stage):
    """Was: it stayed open for ever, and nothing told of it."""
    path = stage.incoming / "a.csv"
    path.write_bytes(b"from,")
    files = files_of(stage, "*.csv", {"from": "text", "to": "text"})
    assert files.poll() is None
    assert files.waiting() == [f"{path}: its header line has no line feed yet"]
    path.unlink()
    assert files.poll() is None
    assert open_files_of(stage) == []
    files.close()


def test_a_csv_file_of_one_endless_line_stops_ingest(stage):
    """Was: it was read again and again, and nothing told of it."""
    (stage.incoming / "a.csv").write_bytes(b"from," * 300_000)
    files = files_of(stage, "*.csv", {"from": "text", "to": "text"})
    with pytest.raises(AuthorMistake, match=r"a\.csv:1: its header line is not CSV"):
        files.poll()
    files.close()


def test_a_csv_cell_may_be_as_large_as_a_record(stage):
    """Was: a dead letter, since Python's reader takes 128 KiB unless told otherwise."""
    (stage.incoming / "a.csv").write_bytes(b"from,to\na," + b"b" * 300_000 + b"\n")
    files = files_of(stage, "*.csv", {"from": "text", "to": "text"})
    found = files.poll()
    assert ([len(json.loads(value)["to"]) for value in found.values], found.dead) == ([300_000], [])
    files.close()


def test_a_link_to_a_rotated_file_is_no_name_of_it(stage):
    """Was: each scan gave the file both names in turn, so ingest committed positions without an end."""
    files = files_of(stage, "*.log")
    rotated(stage, files, lines(0, 3))
    (stage.incoming / "previous").symlink_to(stage.incoming / "a.log.1")
    assert [files.poll() for _ in range(5)] == [None] * 5
    files.close()


@pytest.mark.parametrize("more", [b"", lines(1, 2)], ids=["the same line", "more lines"])
def test_a_file_that_is_rotated_and_deleted_between_two_scans(stage, more):
    """Was: the new file with its inode was read from where the old one ended, if it began with the same line."""
    path = stage.incoming / "a.log"
    path.write_bytes(lines(0, 1))
    files = files_of(stage, "*.log")
    found = files.poll()
    files.committed({found.part: found.position})
    assert files.poll() is None  # the rest of the first scan's turns
    path.rename(stage.incoming / "a.log.1")
    assert files.poll() is None  # that it has another name is seen, and it is closed
    reuse_inode(stage, lines(0, 1) + more)  # before another scan
    with pytest.raises(AuthorMistake, match=r"a\.log: has the inode of .*a\.log\.1, which was read up to byte"):
        files.poll()
    files.close()


def test_a_directory_that_reuses_an_inode_is_ignored(stage, monkeypatch):
    """Was: an uncaught IsADirectoryError at each start."""
    files = files_of(stage, "*.log")
    rotated(stage, files, lines(0, 1))
    (stage.incoming / "sub").mkdir()
    (inode,) = files._known
    status = (stage.incoming / "sub").stat()
    reused = os.stat_result((status[0], inode, *status[2:6], 4096, *status[7:]))
    monkeypatch.setattr(files, "_list", lambda: {stage.incoming / "sub": reused})
    assert files.poll() is None
    files.close()


def test_a_rotated_file_may_have_any_name(stage):
    """Was: an uncaught UnicodeEncodeError at each start."""
    path = stage.incoming / "a.log"
    path.write_bytes(lines(0, 3))
    files = files_of(stage, "*.log")
    found = files.poll()
    path.rename(os.fsdecode(os.fsencode(stage.incoming) + b"/a\xff.old"))
    files.committed({found.part: found.position})
    assert files.poll() is None
    assert files.poll() is None
    assert rb"a\\xff.old" in next(iter(commit_name(files).values()))
    files.close()


def test_a_link_that_leads_nowhere_is_ignored_unless_its_name_matches(stage):
    """Was: nothing of the directory was read."""
    (stage.incoming / "a.log").write_bytes(lines(0, 3))
    (stage.incoming / "loop").symlink_to("loop")
    (stage.incoming / "through").symlink_to("a.log/b")
    files = files_of(stage, "*.log")
    assert len(files.poll().values) == 3
    assert files.poll() is None
    (stage.incoming / "loop.log").symlink_to("loop.log")
    with pytest.raises(AuthorMistake, match=r"loop\.log: cannot be read"):
        files.poll()
    files.close()
