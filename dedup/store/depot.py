"""Where checkpoints lie: a directory or an object store, through fsspec.

``URL/TOPOLOGY/PARTITION/`` holds archives, each under a name of its own, and `manifest.json`, which names the one in
force. An archive is never written over: whoever reads one reads it to its end while a newer one comes to lie beside it.
The description is put there last and at once, by renaming where a file can be seen half written.

Stores of objects raise whatever their libraries like; it all becomes CheckpointUnusable, as there is one thing to do:
go on without. Calls block, possibly for minutes: not for an event loop.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import fsspec

from dedup.errors import CheckpointUnusable, DedupError, Problem, SettingsError
from dedup.store.archive import Moved, pack
from dedup.store.base import StoreIdentity, TaskRecord
from dedup.store.checkpoint import MOST_BYTES, Checkpoint

_MANIFEST: Final = "manifest.json"
_ARCHIVE: Final = re.compile(r"([0-9]{1,20})-[0-9a-f]{8}\.tar", re.ASCII)
_DIRECTORIES: Final = frozenset({"file", "ftp", "hdfs", "memory", "sftp", "smb", "webhdfs"})
"""Where a file needs a directory. In a store of objects none is made: s3fs would make the bucket of a misspelt URL."""


class Depot:
    """The checkpoints under one URL."""

    def __init__(self, url: str) -> None:
        """Raises SettingsError where nothing installed can read such a URL; nothing is connected to."""
        self._url: Final = url.rstrip("/") or "/"
        self._fs: Any = None
        refuse_unreadable(url)

    def __str__(self) -> str:
        return self._url

    def place(self, topology: str, partition: int) -> str:
        """Return where a partition's checkpoints lie."""
        return f"{self._url}/{topology}/{partition}"

    def find(self, topology: str, partition: int) -> Checkpoint | None:
        """Return the checkpoint in force; None where there is none.

        Raises CheckpointUnusable where that can not be known, or it is damaged.
        """
        place = f"{self.place(topology, partition)}/{_MANIFEST}"
        with self._answers(place):
            try:
                with self._files().open(self._path(place), "rb") as file:
                    data = file.read(MOST_BYTES + 1)
            except FileNotFoundError:
                return None
        if len(data) > MOST_BYTES:
            raise CheckpointUnusable(f"{place}: is damaged: it has more than {MOST_BYTES:,} bytes.")
        return Checkpoint.decode(data, place)

    @contextmanager
    def reading(self, checkpoint: Checkpoint) -> Iterator[IO[bytes]]:
        """Inside ``with``, the archive can be read, from its beginning; raises CheckpointUnusable."""
        identity = checkpoint.identity
        place = f"{self.place(identity.topology, identity.partition)}/{checkpoint.archive}"
        with self._answers(place), self._files().open(self._path(place), "rb") as file:
            yield file

    def write(
        self,
        directory: Path,
        identity: StoreIdentity,
        record: TaskRecord,
        *,
        position: int,
        ids: int,
        moved: Moved = lambda _: None,
    ) -> Checkpoint:
        """The closed store in the directory is the partition's checkpoint in force; return it.

        The one that was in force until now stays readable, older ones are deleted. Killed at any moment, what was in
        force is. Raises CheckpointUnusable.
        """
        place = self.place(identity.topology, identity.partition)
        before = self._in_force(identity)
        name = f"{position}-{secrets.token_hex(4)}.tar"
        with self._answers(f"{place}/{name}"):
            files, path = self._files(), self._path(f"{place}/{name}")
            if _DIRECTORIES & set(_protocols(files)):
                files.makedirs(self._path(place), exist_ok=True)
            with files.open(path, "wb") as target:
                size_bytes, sha256 = pack(directory, target, moved)
            there = files.info(path)["size"]
        if there != size_bytes:
            raise CheckpointUnusable(f"{place}/{name}: has {there:,} bytes, and {size_bytes:,} were written.")
        made = Checkpoint(identity, record.fingerprint, record.segment_ms, position, ids, name, size_bytes, sha256)
        with self._answers(f"{place}/{_MANIFEST}"):
            self._put(self._path(f"{place}/{_MANIFEST}"), made.encode())
            self._delete_old(self._path(place), made, before)
        return made

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Tell whether the archive that a description names is there, in its length."""
        identity = checkpoint.identity
        place = f"{self.place(identity.topology, identity.partition)}/{checkpoint.archive}"
        with self._answers(place):
            files = self._files()
            files.invalidate_cache()
            try:
                return bool(files.info(self._path(place))["size"] == checkpoint.archive_bytes)
            except FileNotFoundError:
                return False

    def partitions(self, topology: str) -> list[int]:
        """Return the partitions of a topology that have a checkpoint, or remains of one, ascending."""
        place = f"{self._url}/{topology}"
        with self._answers(place):
            path = self._path(place)
            named = sorted(int(name) for name in self._names(path) if name.isdecimal())
            return [partition for partition in named if self._ours(f"{path}/{partition}")]

    def delete(self, topology: str, partition: int) -> None:
        """No checkpoint of the partition is left; raises CheckpointUnusable."""
        place = self.place(topology, partition)
        with self._answers(place):
            path = self._path(place)
            # The description first: what is half deleted is no checkpoint.
            for name in sorted(self._ours(path), reverse=True):
                self._files().rm_file(f"{path}/{name}")

    def _in_force(self, identity: StoreIdentity) -> Checkpoint | None:
        """Return what a new checkpoint takes the place of; a damaged description is none."""
        try:
            return self.find(identity.topology, identity.partition)
        except CheckpointUnusable:
            return None

    def _delete_old(self, path: str, made: Checkpoint, before: Checkpoint | None) -> None:
        """Delete archives older than the one that was in force before; what a killed run left goes with them."""
        oldest = made.position if before is None else min(before.position, made.position)
        kept = {made.archive, *(() if before is None else (before.archive,))}
        for name in self._names(path):
            found = _ARCHIVE.fullmatch(name)
            # One of the same or a later position may be another run's, not yet described.
            if found is not None and name not in kept and int(found[1]) < oldest:
                self._files().rm_file(f"{path}/{name}")

    def _ours(self, path: str) -> list[str]:
        return [name for name in self._names(path) if name == _MANIFEST or _ARCHIVE.fullmatch(name)]

    def _names(self, path: str) -> list[str]:
        files = self._files()
        files.invalidate_cache()
        try:
            found = files.ls(path, detail=False)
        except FileNotFoundError:
            return []
        return [each.rstrip("/").rpartition("/")[2] for each in found]

    def _put(self, path: str, data: bytes) -> None:
        """Make a small file, in one go for whoever reads it. An object is one in any case."""
        if "file" in _protocols(self._files()):
            self._files().pipe_file(f"{path}.new", data)
            self._files().mv(f"{path}.new", path)
        else:
            self._files().pipe_file(path, data)

    def _files(self) -> Any:  # noqa: ANN401  # untyped
        if self._fs is None:
            self._fs = fsspec.filesystem(fsspec.utils.get_protocol(self._url), **_options(self._url))
        return self._fs

    def _path(self, place: str) -> str:
        return str(self._files()._strip_protocol(place))  # noqa: SLF001  # its only way from a URL to a path

    def _answers(self, place: str) -> _Answers:
        return _Answers(place)


def refuse_unreadable(url: str) -> None:
    """Raise SettingsError where nothing installed can read such a URL."""
    protocol = fsspec.utils.get_protocol(url)
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        text = f'no store is known for "{protocol}://"; write a directory, or for example s3://bucket/path'
    except ImportError as error:
        text = f'"{protocol}://" needs a package that is not here: {error}. Add it to this installation with pip'
    else:
        return
    raise SettingsError([Problem(url, text)])


def _options(url: str) -> dict[str, Any]:
    """Return what a URL itself says of the connection, such as a host."""
    found = fsspec.get_filesystem_class(fsspec.utils.get_protocol(url))._get_kwargs_from_urls(url)  # noqa: SLF001
    return dict(found)


def _protocols(files: Any) -> tuple[str, ...]:  # noqa: ANN401  # untyped
    named = files.protocol
    return (named,) if isinstance(named, str) else tuple(named)


class _Answers:
    """Inside ``with``, whatever a store's library raises is CheckpointUnusable; it knows no common class of errors."""

    __slots__ = ("_place",)

    def __init__(self, place: str) -> None:
        self._place = place

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Raise the error named by what to do about it."""
        if kind is None or issubclass(kind, DedupError) or not issubclass(kind, Exception):
            return
        raise CheckpointUnusable(f"{self._place}: {kind.__name__}: {error or 'no reason given'}.") from error
