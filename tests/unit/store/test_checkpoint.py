"""Checkpoints: what is stored comes back, and nothing else; what lies somewhere is whole, or is not taken."""

import hashlib
import io
import os
import shlex
import sys
from dataclasses import astuple

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as some
from msgspec.structs import replace
from typer.testing import CliRunner

from dedup.cli.main import create_app
from dedup.embedded.child_process import ChildProcess
from dedup.embedded.kafka_node import free_ports
from dedup.errors import CheckpointUnusable, SettingsError
from dedup.settings import load_settings
from dedup.store.base import StoreIdentity
from dedup.store.changelog import TaskRecord
from dedup.store.checkpoint import Checkpoint, StoreFile, files_of, write_file
from dedup.store.checkpoint_storage import CheckpointStorage
from dedup.store.rocks import RocksStore
from tests.waiting import until

IDENTITY = StoreIdentity("orders", 3, "0123456789abcdef")
RECORD = TaskRecord(b"f" * 16, 5_000, (), 42, 100)
FILES = (StoreFile("CURRENT", 16, "0" * 64), StoreFile("000007.sst", 10_240, "1" * 64))
MADE = Checkpoint(*astuple(IDENTITY), "66" * 16, 100, 7, 2, FILES)


FOREIGN_NAMES = [
    b"../escaped.sst",
    b"/etc/passwd",
    b"a/1.sst",
    b"rocksdict-config.json",
    b"OPTIONS-000007",
    b"LOG",
    b"filter-log-0",
    b".bashrc",
    b"1.sst\\u0000.sh",
    b"1.sst\\n",
    b"",
]


def still(_size_bytes):
    """Nobody is told."""


def store_at(directory, *, ids=50, position=7):
    """A closed store is in the directory."""
    store = RocksStore.open(directory, identity=IDENTITY)
    store.apply({0: {b"id-%d" % number: b"value" for number in range(ids)}}, RECORD, position)
    store.close()
    return directory


@given(
    made=some.builds(
        Checkpoint,
        topology=some.from_regex(r"[a-z0-9-]{1,200}", fullmatch=True),
        partition=some.integers(0, 100_000),
        changelog_topic_id=some.text("0123456789abcdef", min_size=32, max_size=32),
        fingerprint_hex=some.binary(min_size=1, max_size=64).map(bytes.hex),
        segment_ms=some.integers(1, 1 << 50),
        position=some.integers(0, (1 << 63) - 1),
        ids=some.integers(0, 1 << 50),
        files=some.lists(
            some.builds(
                StoreFile,
                name=some.from_regex(r"CURRENT|IDENTITY|MANIFEST-[0-9]{6}|[0-9]{1,20}\.(sst|log)", fullmatch=True),
                size_bytes=some.integers(0, 1 << 50),
                sha256=some.text("0123456789abcdef", min_size=64, max_size=64),
            ),
            max_size=5,
        ).map(tuple),
    )
)
def test_a_description_says_what_was_written(made):
    assert Checkpoint.decode(made.encode(), "here") == made


@given(at=some.integers(0, len(MADE.encode()) - 2))
def test_a_description_cut_anywhere_is_refused(at):
    with pytest.raises(CheckpointUnusable, match="here: is damaged"):
        Checkpoint.decode(MADE.encode()[:at], "here")


@given(data=some.binary(max_size=200))
def test_any_bytes_are_a_description_or_refused(data):
    with pytest.raises(CheckpointUnusable):
        Checkpoint.decode(data, "here")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *((b'"000007.sst"', b'"%b"' % name) for name in FOREIGN_NAMES),
        (b'"bytes": 16', b'"bytes": -1'),
        (b'"position": 7', b'"position": -7'),
        (b'"position": 7', b'"position": "7"'),
        (b'"partition": 3', b'"partition": 3.5'),
        (b'"' + b"66" * 16 + b'"', b'"abc"'),
        (b'"' + b"0" * 64 + b'"', b'"0"'),
        (b'"' + b"0" * 64 + b'"', b'"../' + b"0" * 61 + b'"'),
    ],
)
def test_a_description_with_an_odd_value_is_refused(old, new):
    data = MADE.encode()
    assert old in data
    with pytest.raises(CheckpointUnusable, match="is damaged"):
        Checkpoint.decode(data.replace(old, new), "here")


def test_a_description_of_a_later_format_says_so():
    data = MADE.encode().replace(b'"format": 2', b'"format": 3')
    with pytest.raises(CheckpointUnusable, match="of format 3, but this release reads format 2"):
        Checkpoint.decode(data, "here")


def test_only_what_makes_the_store_is_kept(tmp_path):
    directory = store_at(tmp_path / "store")
    assert (directory / "filter-log-0").exists()
    names = {path.name for path in files_of(directory)}
    assert "CURRENT" in names
    # Events name the machine; settings and options would be believed when the store is opened.
    assert not any(name.startswith(("LOG", "LOCK", "OPTIONS", "rocksdict", "filter")) for name in names)
    assert all(StoreFile.of(path).size_bytes == path.stat().st_size for path in files_of(directory))


CONTENT = bytes(range(256)) * 40
WANTED = StoreFile("000007.sst", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


def test_a_file_arrives_as_it_is_described(tmp_path):
    moved = []
    write_file(WANTED, io.BytesIO(CONTENT), tmp_path, moved.append)
    assert (tmp_path / "000007.sst").read_bytes() == CONTENT
    assert sum(moved) == len(CONTENT)


@pytest.mark.parametrize("number", range(40))
def test_a_damaged_or_cut_file_is_refused(tmp_path, number):
    at = number * len(CONTENT) // 40
    broken = CONTENT[:at] if number % 2 else CONTENT[:at] + bytes([CONTENT[at] ^ 0xFF]) + CONTENT[at + 1 :]
    with pytest.raises(CheckpointUnusable, match=r"is damaged.*Delete this file"):
        write_file(WANTED, io.BytesIO(broken), tmp_path, still)


def test_no_more_is_written_than_is_described(tmp_path, monkeypatch):
    monkeypatch.setattr("dedup.store.checkpoint._PIECE_BYTES", 1_000)

    class Endless:
        def read(self, size):
            return bytes(size)

    with pytest.raises(CheckpointUnusable, match="is damaged"):
        write_file(WANTED, Endless(), tmp_path, still)
    assert (tmp_path / "000007.sst").stat().st_size <= len(CONTENT)


def test_a_name_that_is_there_is_not_written_over(tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes(b"kept")
    for make in (lambda path: path.symlink_to(outside), lambda path: path.write_bytes(b"kept")):
        make(tmp_path / "000007.sst")
        with pytest.raises(CheckpointUnusable, match="twice"):
            write_file(WANTED, io.BytesIO(CONTENT), tmp_path, still)
        assert (tmp_path / "000007.sst").read_bytes() == outside.read_bytes() == b"kept"
        (tmp_path / "000007.sst").unlink()


BUCKET = "dedup-checkpoints"


@pytest.fixture(scope="session")
def s3(tmp_path_factory):
    """A server with the interface of S3 has an empty bucket, and s3fs finds the server."""
    pytest.importorskip("moto", reason="no S3: pip install s3fs 'moto[server]'")
    s3fs = pytest.importorskip("s3fs", reason="no S3: pip install s3fs 'moto[server]'")
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = ChildProcess(command, tmp_path_factory.mktemp("s3") / "moto.log")
    try:
        until(lambda: "Running on" in server.log or not server.running, "an S3 server")
        assert server.running, server.log
        with pytest.MonkeyPatch.context() as patched:
            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
                patched.setenv(name, "testing")
            patched.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
            patched.setenv("AWS_DEFAULT_REGION", "us-east-1")
            s3fs.S3FileSystem().mkdir(BUCKET)
            yield
    finally:
        server.stop()


@pytest.fixture(params=["file", "memory", pytest.param("s3", marks=pytest.mark.long)])
def depot(request, tmp_path):
    """A directory, fsspec's store in memory as an object store, and an object store behind the interface of S3."""
    if request.param == "s3":
        request.getfixturevalue("s3")
        yield CheckpointStorage(f"s3://{BUCKET}/{tmp_path.name}")
        return
    url = str(tmp_path / "kept") if request.param == "file" else f"memory://{tmp_path.name}"
    yield CheckpointStorage(url)
    files = fsspec.filesystem("memory")
    if files.exists(f"/{tmp_path.name}"):
        files.rm(f"/{tmp_path.name}", recursive=True)


def put(depot, directory, position, **others):
    made, _ = depot.write(directory, IDENTITY, RECORD, position=position, ids=50, **others)
    return made


def grown(directory, first, *, position):
    """A closed store with 2,000 more IDs, in a data file of their own."""
    store = RocksStore.open(directory, identity=IDENTITY)
    store.apply({0: {b"id-%07d" % (first + number): os.urandom(15) for number in range(2_000)}}, RECORD, position)
    store._segments[0].family.rows.flush()
    store.close()
    return directory


def contents(depot):
    return set(depot._ours(depot._path(depot.place("orders", 3)))) - {"manifest.json"}


def named(*checkpoints):
    return {file.sha256 for checkpoint in checkpoints for file in checkpoint.files}


def test_where_nothing_lies_nothing_is_found(depot):
    assert depot.find("orders", 3) is None
    assert depot.partitions("orders") == []


def test_what_was_put_is_found_and_read(depot, tmp_path):
    made = put(depot, store_at(tmp_path / "store"), 7)
    assert depot.find("orders", 3) == made
    assert depot.find("orders", 4) is None
    assert depot.holds(made)
    assert not depot.holds(replace(made, files=(*made.files, FILES[0])))
    (tmp_path / "copy").mkdir()
    depot.read(made, tmp_path / "copy", still)
    store = RocksStore.open(tmp_path / "copy", identity=IDENTITY)
    assert (store.position, store.task_record, store.count_ids()) == (7, RECORD, 50)
    assert [key for _, key, _ in store.sightings()] == sorted(b"id-%d" % number for number in range(50))
    assert store.warm(1_000)
    store.close()


def test_only_files_that_are_new_are_written(depot, tmp_path):
    directory = tmp_path / "store"
    first, first_bytes = depot.write(grown(directory, 0, position=7), IDENTITY, RECORD, position=7, ids=1)
    grown(directory, 2_000, position=8)
    moved = []
    second, second_bytes = depot.write(directory, IDENTITY, RECORD, position=8, ids=1, moved=moved.append)
    assert first_bytes == first.size_bytes
    assert sum(moved) == second.size_bytes
    shared = [file for file in second.files if file in first.files]
    assert any(file.name.endswith(".sst") and file.size_bytes > 50_000 for file in shared)
    assert second_bytes == second.size_bytes - sum(file.size_bytes for file in shared)
    assert contents(depot) == named(first, second)
    assert depot.write(directory, IDENTITY, RECORD, position=8, ids=1) == (second, 0)


def test_a_reader_of_the_one_before_reads_it_to_its_end_and_older_ones_go(depot, tmp_path):
    directory = tmp_path / "store"
    made = [put(depot, grown(directory, 2_000 * number, position=7 + number), 7 + number) for number in range(3)]
    assert contents(depot) == named(*made[1:])
    assert not depot.holds(made[0])
    assert depot.find("orders", 3) == made[2]
    (tmp_path / "copy").mkdir()
    depot.read(made[1], tmp_path / "copy", still)
    with pytest.raises(CheckpointUnusable):
        depot.read(made[0], tmp_path / "copy", still)


@pytest.mark.parametrize("dies_after", range(6))
def test_an_upload_that_is_killed_leaves_the_one_before_and_goes_with_the_next(depot, tmp_path, dies_after):
    directory = tmp_path / "store"
    first, moves = put(depot, grown(directory, 0, position=7), 7), []

    def dies(size_bytes):
        moves.append(size_bytes)
        if len(moves) > dies_after:
            raise KeyboardInterrupt

    grown(directory, 2_000, position=8)
    with pytest.raises(KeyboardInterrupt):
        put(depot, directory, 8, moved=dies)
    assert depot.find("orders", 3) == first
    assert depot.holds(first)
    last = put(depot, grown(directory, 4_000, position=9), 9)
    assert contents(depot) == named(first, last)
    (tmp_path / "copy").mkdir()
    depot.read(last, tmp_path / "copy", still)


def test_a_file_of_another_length_is_written_again(depot, tmp_path):
    """An upload to a storage that does not write atomically was killed."""
    directory = grown(tmp_path / "store", 0, position=7)
    made = put(depot, directory, 7)
    largest = max(made.files, key=lambda file: file.size_bytes)
    depot._files.pipe_file(depot._path(f"{depot.place('orders', 3)}/{largest.sha256}"), b"half")
    assert not depot.holds(made)
    again, written_bytes = depot.write(directory, IDENTITY, RECORD, position=7, ids=50)
    assert (again, written_bytes, depot.holds(made)) == (made, largest.size_bytes, True)


def test_another_process_that_deletes_is_noticed(depot, tmp_path):
    first = put(depot, grown(tmp_path / "store", 0, position=7), 7)
    path = depot._path(depot.place("orders", 3))

    def deletes(_size_bytes):
        for name in [each for each in contents(depot) - named(first) if not each.endswith(".new")]:
            depot._files.rm_file(f"{path}/{name}")

    with pytest.raises(CheckpointUnusable, match="another process deletes them"):
        put(depot, grown(tmp_path / "store", 2_000, position=8), 8, moved=deletes)
    assert depot.find("orders", 3) == first


def test_a_damaged_description_is_replaced(depot, tmp_path):
    store = store_at(tmp_path / "store")
    put(depot, store, 7)
    depot._files.pipe_file(depot._path(f"{depot.place('orders', 3)}/manifest.json"), b"{")
    with pytest.raises(CheckpointUnusable, match=r"manifest\.json: is damaged"):
        depot.find("orders", 3)
    made = put(depot, store, 8)
    assert depot.find("orders", 3) == made


def test_a_description_of_any_length_is_not_read_whole(depot, tmp_path):
    put(depot, store_at(tmp_path / "store"), 7)
    depot._files.pipe_file(depot._path(f"{depot.place('orders', 3)}/manifest.json"), b" " * 5_000_000)
    with pytest.raises(CheckpointUnusable, match="more than 4,194,304 bytes"):
        depot.find("orders", 3)


def test_deleted_is_deleted(depot, tmp_path):
    store = store_at(tmp_path / "store")
    put(depot, store, 7)
    put(depot, store, 8)
    assert depot.partitions("orders") == [3]
    depot.delete("orders", 3)
    assert depot.partitions("orders") == []
    assert depot.find("orders", 3) is None
    depot.delete("orders", 3)


def test_a_store_that_fails_is_told_with_its_place(tmp_path):
    (tmp_path / "kept").write_text("a file")
    depot = CheckpointStorage(str(tmp_path / "kept"))
    with pytest.raises(CheckpointUnusable, match="kept/orders/3"):
        depot.find("orders", 3)
    with pytest.raises(CheckpointUnusable, match="kept/orders/3"):
        put(depot, store_at(tmp_path / "store"), 7)


@pytest.mark.parametrize(
    ("url", "says"), [("gs://bucket/dedup", "gcsfs"), ("nonsense://bucket", 'no storage is known for "nonsense://"')]
)
def test_a_url_that_nothing_here_can_read_ends_with_2(url, says, tmp_path):
    with pytest.raises(SettingsError, match=says) as caught:
        CheckpointStorage(url)
    assert caught.value.exit_code == 2
    path = tmp_path / "t.yaml"
    path.write_text(
        "dedup: 1\nname: t\nsource: {topics: [c]}\ntracking_id: {field: id}\nguard_period: 1h\noutput: {topic: o}\n"
    )
    result = CliRunner().invoke(create_app(), ["checkpoint", str(path), "--to", url, "--set", "brokers=127.0.0.1:1"])
    assert isinstance(result.exception, SettingsError)
    assert says in str(result.exception)


@pytest.mark.parametrize(
    ("url", "module", "package"),
    [
        ("s3://bucket/dedup", "s3fs", "s3fs"),
        ("gs://bucket/dedup", "gcsfs", "gcsfs"),
        ("abfs://container/dedup", "adlfs", "adlfs"),
        ("sftp://host/dedup", "paramiko", "'fsspec[sftp]'"),  # fsspec's own code, which needs another package
        ("dbfs://host/dedup", "requests", "requests"),  # the same, without an extra of fsspec
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(url, module, package, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SettingsError) as caught:
        CheckpointStorage(url)
    assert str(caught.value).endswith(f"install it: {shlex.quote(sys.executable)} -m pip install {package}")


def test_without_a_place_there_is_nothing_to_do(tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text(
        "dedup: 1\nname: t\nsource: {topics: [c]}\ntracking_id: {field: id}\nguard_period: 1h\noutput: {topic: o}\n"
    )
    result = CliRunner().invoke(create_app(), ["checkpoint", str(path), "--set", "brokers=127.0.0.1:1"])
    assert isinstance(result.exception, SettingsError)
    assert "--to: is missing" in str(result.exception)


@pytest.mark.parametrize("url", ["/var/backups/dedup", "s3://bucket/a@b/c:d", "gs://bucket", "sftp://user@host/path"])
def test_a_place_is_taken_as_it_is_written(url):
    found = load_settings(None, ["brokers=a:1", f"state.checkpoint={url}"], {})
    assert found.state.checkpoint == url


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("ftp://me:secret@host/path", "contains a password"),
        ("simplecache::s3://bucket", "is not a location"),
        ("", "is not a location"),
    ],
)
def test_a_place_that_must_not_be_is_refused(url, says):
    with pytest.raises(SettingsError, match=says) as caught:
        load_settings(None, ["brokers=a:1"], {"DEDUP_STATE__CHECKPOINT": url})
    assert "secret" not in str(caught.value)
