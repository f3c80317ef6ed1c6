"""Checkpoints: what is packed comes back, and nothing else; what lies somewhere is whole, or is not taken."""

import io
import tarfile
from dataclasses import astuple

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as some
from msgspec.structs import replace
from typer.testing import CliRunner

from dedup.cli.main import create_app
from dedup.errors import CheckpointUnusable, SettingsError
from dedup.settings import load_settings
from dedup.store.base import StoreIdentity, TaskRecord
from dedup.store.checkpoint import Checkpoint, pack, unpack
from dedup.store.checkpoint_storage import CheckpointStorage
from dedup.store.rocks import RocksStore

IDENTITY = StoreIdentity("orders", 3, "0123456789abcdef")
RECORD = TaskRecord(b"f" * 16, 5_000, (), 42, 100)
MADE = Checkpoint(*astuple(IDENTITY), "66" * 16, 100, 7, 2, "7-0a1b2c3d.tar", 10_240, "0" * 64)


def still(_size_bytes):
    """Nobody is told."""


def store_at(directory, *, ids=50, position=7):
    """A closed store is in the directory."""
    store = RocksStore.open(directory, identity=IDENTITY)
    store.apply({0: {b"id-%d" % number: b"value" for number in range(ids)}}, RECORD, position)
    store.close()
    return directory


def packed(directory):
    target = io.BytesIO()
    size_bytes, sha256 = pack(directory, target, still)
    assert size_bytes == len(target.getvalue())
    return target.getvalue(), sha256


def unpacked(data, sha256, directory, size_bytes=None):
    directory.mkdir()
    unpack(io.BytesIO(data), directory, size_bytes=size_bytes or len(data), sha256=sha256, moved=still)
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
        archive=some.from_regex(r"[0-9]{1,20}-[0-9a-f]{8}\.tar", fullmatch=True),
        archive_bytes=some.integers(0, 1 << 50),
        sha256=some.text("0123456789abcdef", min_size=64, max_size=64),
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
        (b'"7-0a1b2c3d.tar"', b'"../../orders/4/7-0a1b2c3d.tar"'),
        (b'"7-0a1b2c3d.tar"', b'"7-0a1b2c3d.tar\\n"'),
        (b'"position": 7', b'"position": -7'),
        (b'"position": 7', b'"position": "7"'),
        (b'"partition": 3', b'"partition": 3.5'),
        (b'"' + b"66" * 16 + b'"', b'"abc"'),
        (b'"' + b"0" * 64 + b'"', b'"0"'),
    ],
)
def test_a_description_with_an_odd_value_is_refused(old, new):
    data = MADE.encode()
    assert old in data
    with pytest.raises(CheckpointUnusable, match="is damaged"):
        Checkpoint.decode(data.replace(old, new), "here")


def test_a_description_of_a_later_format_says_so():
    data = MADE.encode().replace(b'"format": 1', b'"format": 2')
    with pytest.raises(CheckpointUnusable, match="of format 2, but this release reads format 1"):
        Checkpoint.decode(data, "here")


def test_a_store_comes_back_from_its_archive(tmp_path):
    data, sha256 = packed(store_at(tmp_path / "store"))
    store = RocksStore.open(unpacked(data, sha256, tmp_path / "copy"), identity=IDENTITY)
    assert (store.position, store.task_record, store.count_ids()) == (7, RECORD, 50)
    assert [key for _, key, _ in store.sightings()] == sorted(b"id-%d" % number for number in range(50))
    store.close()


def test_only_what_makes_the_store_is_packed(tmp_path):
    data, _ = packed(store_at(tmp_path / "store"))
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        names = set(archive.getnames())
    assert "CURRENT" in names
    # Events name the machine; settings and options would be believed when the store is opened.
    assert not any(name.startswith(("LOG", "LOCK", "OPTIONS", "rocksdict")) for name in names)


@pytest.mark.parametrize("number", range(40))
def test_a_damaged_or_cut_archive_is_refused(tmp_path, number):
    data, sha256 = packed(store_at(tmp_path / "store"))
    at = number * len(data) // 40
    broken = data[:at] if number % 2 else data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]
    with pytest.raises(CheckpointUnusable):
        unpacked(broken, sha256, tmp_path / "copy", len(data))


def test_an_archive_with_more_behind_it_is_refused(tmp_path):
    data, sha256 = packed(store_at(tmp_path / "store"))
    with pytest.raises(CheckpointUnusable, match="more than"):
        unpacked(data + b"x", sha256, tmp_path / "copy", len(data))


def member(name, *, kind=tarfile.REGTYPE, link="", content=b"x"):
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname, entry.size = kind, link, len(content) if kind == tarfile.REGTYPE else 0
    return entry, content


@pytest.mark.parametrize(
    "members",
    [
        [member("../escaped.sst")],
        [member("/etc/passwd")],
        [member("a/1.sst")],
        [member("CURRENT", kind=tarfile.SYMTYPE, link="/etc/passwd")],
        [member("1.sst", kind=tarfile.LNKTYPE, link="/etc/passwd")],
        [member("1.sst", kind=tarfile.SYMTYPE, link="..")],
        [member("1.sst", kind=tarfile.DIRTYPE)],
        [member("1.sst", kind=tarfile.FIFOTYPE)],
        [member("1.sst", kind=tarfile.CHRTYPE)],
        [member("1.sst"), member("1.sst")],
        [member("rocksdict-config.json", content=b'{"raw_mode":false}')],
        [member("OPTIONS-000007")],
        [member(".bashrc")],
        [member("1.sst\x00.sh")] * 2,
        [member("1.sst\n")],
    ],
)
def test_an_archive_of_somebody_else_changes_nothing_outside(tmp_path, members):
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        for entry, content in members:
            archive.addfile(entry, io.BytesIO(content))
    data = target.getvalue()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointUnusable):
        unpacked(data, "0" * 64, tmp_path / "copy")
    inside = [path for path in (tmp_path / "copy").rglob("*") if not path.is_file() or path.is_symlink()]
    assert inside == []
    assert [path for path in sorted(tmp_path.rglob("*")) if (tmp_path / "copy") not in (path, path.parent)] == before


def test_a_sparse_file_is_refused(tmp_path):
    """Some kilobytes that would become a terabyte on the disk."""
    entry = tarfile.TarInfo("1.sst")
    entry.size = 512
    entry.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 40)}
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(entry, io.BytesIO(b"0\n".ljust(512, b"\0")))
    with pytest.raises(CheckpointUnusable):
        unpacked(target.getvalue(), "0" * 64, tmp_path / "copy")


@pytest.fixture(params=["file", "memory"])
def depot(request, tmp_path):
    """A directory, and fsspec's store in memory as an object store."""
    url = str(tmp_path / "kept") if request.param == "file" else f"memory://{tmp_path.name}"
    yield CheckpointStorage(url)
    files = fsspec.filesystem("memory")
    if files.exists(f"/{tmp_path.name}"):
        files.rm(f"/{tmp_path.name}", recursive=True)


def put(depot, directory, position):
    return depot.write(directory, IDENTITY, RECORD, position=position, ids=50)


def archives(depot):
    return sorted(name for name in depot._ours(depot._path(depot.place("orders", 3))) if name != "manifest.json")


def test_where_nothing_lies_nothing_is_found(depot):
    assert depot.find("orders", 3) is None
    assert depot.partitions("orders") == []


def test_what_was_put_is_found_and_read(depot, tmp_path):
    made = put(depot, store_at(tmp_path / "store"), 7)
    assert depot.find("orders", 3) == made
    assert depot.find("orders", 4) is None
    assert depot.holds(made)
    assert not depot.holds(replace(made, archive_bytes=made.archive_bytes + 1))
    assert not depot.holds(replace(made, archive="8-00000000.tar"))
    (tmp_path / "copy").mkdir()
    with depot.reading(made) as file:
        unpack(file, tmp_path / "copy", size_bytes=made.archive_bytes, sha256=made.sha256, moved=still)
    RocksStore.open(tmp_path / "copy", identity=IDENTITY).close()


def test_a_reader_of_the_one_before_reads_it_to_its_end_and_older_ones_go(depot, tmp_path):
    store = store_at(tmp_path / "store")
    first, second = put(depot, store, 7), put(depot, store, 9)
    assert archives(depot) == sorted([first.archive, second.archive])
    third = put(depot, store, 12)
    assert archives(depot) == sorted([second.archive, third.archive])
    assert depot.find("orders", 3) == third
    with depot.reading(second) as file:
        assert len(file.read()) == second.archive_bytes


def test_what_a_killed_upload_left_goes_when_it_is_old(depot, tmp_path):
    store = store_at(tmp_path / "store")

    def dies(_size_bytes):
        raise KeyboardInterrupt

    put(depot, store, 7)
    with pytest.raises(KeyboardInterrupt):
        depot.write(store, IDENTITY, RECORD, position=8, ids=50, moved=dies)
    assert depot.find("orders", 3).position == 7
    # As far as any of it is there, it may belong to a run that is only slower than the next one.
    second = put(depot, store, 9)
    third, fourth = put(depot, store, 10), put(depot, store, 11)
    assert depot.find("orders", 3) == fourth
    assert second.archive not in archives(depot)
    assert archives(depot) == sorted([third.archive, fourth.archive])


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
    depot._files.pipe_file(depot._path(f"{depot.place('orders', 3)}/manifest.json"), b" " * 100_000)
    with pytest.raises(CheckpointUnusable, match="more than 65,536 bytes"):
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
    ("url", "says"), [("s3://bucket/dedup", "s3fs"), ("nonsense://bucket", 'no storage is known for "nonsense://"')]
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
