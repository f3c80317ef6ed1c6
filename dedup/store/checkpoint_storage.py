"""Stores checkpoints in a directory or an object store, through fsspec.

``URL/TOPOLOGY/PARTITION/`` contains archives with unique names and `manifest.json`, the description of the current
archive. No archive is ever overwritten, so a reader can finish while a newer archive is written. `manifest.json` is
written last and in one atomic step. Calls to this module may block for minutes, so do not make them in an event loop.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Final

import fsspec

from dedup.errors import CheckpointUnusable, DedupError, Problem, SettingsError
from dedup.store.base import StoreIdentity, TaskRecord
from dedup.store.checkpoint import MOST_BYTES, Checkpoint, Moved, pack

_MANIFEST: Final = "manifest.json"
_ARCHIVE: Final = re.compile(r"([0-9]{1,20})-[0-9a-f]{8}\.tar", re.ASCII)
_DIRECTORIES: Final = frozenset({"file", "ftp", "hdfs", "memory", "sftp", "smb", "webhdfs"})
"""Protocols that need a directory before a file. For others, none is created: s3fs could create a misnamed bucket."""


class CheckpointStorage:
    """Reads and writes the checkpoints under one URL."""

    def __init__(self, url: str) -> None:
        """Raises SettingsError if no installed package supports the protocol of the URL."""
        self._url: Final = url.rstrip("/") or "/"
        refuse_unreadable(url)

    def __str__(self) -> str:
        return self._url

    def place(self, topology: str, partition: int) -> str:
        """Return the URL of a partition's checkpoints."""
        return f"{self._url}/{topology}/{partition}"

    def find(self, topology: str, partition: int) -> Checkpoint | None:
        """Return the partition's current checkpoint, or None if it has none.

        Raises CheckpointUnusable if the description is damaged or the storage does not respond.
        """
        place = f"{self.place(topology, partition)}/{_MANIFEST}"
        with _answers(place):
            try:
                with self._files.open(self._path(place), "rb") as file:
                    data = file.read(MOST_BYTES + 1)
            except FileNotFoundError:
                return None
        if len(data) > MOST_BYTES:
            raise CheckpointUnusable(f"{place}: is damaged: it has more than {MOST_BYTES:,} bytes.")
        return Checkpoint.decode(data, place)

    @contextmanager
    def reading(self, checkpoint: Checkpoint) -> Iterator[IO[bytes]]:
        """Open the archive of a checkpoint for reading. Raises CheckpointUnusable if the storage fails."""
        place = f"{self.place(checkpoint.topology, checkpoint.partition)}/{checkpoint.archive}"
        with _answers(place), self._files.open(self._path(place), "rb") as file:
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
        """Pack the closed store in ``directory`` as the partition's current checkpoint, and return its description.

        The previous checkpoint stays readable, and older ones are deleted. Raises CheckpointUnusable if the storage
        fails.
        """
        place = self.place(identity.topology, identity.partition)
        before = None
        with suppress(CheckpointUnusable):  # a damaged description is replaced
            before = self.find(identity.topology, identity.partition)
        name = f"{position}-{secrets.token_hex(4)}.tar"
        with _answers(f"{place}/{name}"):
            files, path = self._files, self._path(f"{place}/{name}")
            if _DIRECTORIES & set(_protocols(files)):
                files.makedirs(self._path(place), exist_ok=True)
            with files.open(path, "wb") as target:
                size_bytes, sha256 = pack(directory, target, moved)
            there = files.info(path)["size"]
        if there != size_bytes:
            raise CheckpointUnusable(f"{place}/{name}: has {there:,} bytes, but {size_bytes:,} were written.")
        made = Checkpoint(
            **asdict(identity),
            fingerprint_hex=record.fingerprint.hex(),
            segment_ms=record.segment_ms,
            position=position,
            ids=ids,
            archive=name,
            archive_bytes=size_bytes,
            sha256=sha256,
        )
        with _answers(f"{place}/{_MANIFEST}"):
            manifest = self._path(f"{place}/{_MANIFEST}")
            if "file" in _protocols(files):
                files.pipe_file(f"{manifest}.new", made.encode())
                files.mv(f"{manifest}.new", manifest)
            else:
                files.pipe_file(manifest, made.encode())  # in an object store, every write is atomic
            self._delete_old(self._path(place), made, before)
        return made

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Return whether the checkpoint's archive exists and has the correct length."""
        place = f"{self.place(checkpoint.topology, checkpoint.partition)}/{checkpoint.archive}"
        with _answers(place):
            files = self._files
            files.invalidate_cache()
            try:
                return bool(files.info(self._path(place))["size"] == checkpoint.archive_bytes)
            except FileNotFoundError:
                return False

    def partitions(self, topology: str) -> list[int]:
        """Return the partitions of a topology that have a checkpoint or leftover files, in ascending order."""
        place = f"{self._url}/{topology}"
        with _answers(place):
            path = self._path(place)
            named = sorted(int(name) for name in self._names(path) if name.isdecimal())
            return [partition for partition in named if self._ours(f"{path}/{partition}")]

    def delete(self, topology: str, partition: int) -> None:
        """Delete all checkpoints of the partition. Raises CheckpointUnusable if the storage fails."""
        place = self.place(topology, partition)
        with _answers(place):
            path = self._path(place)
            # The description is deleted first, because an archive without a description does not count as a checkpoint.
            for name in sorted(self._ours(path), reverse=True):
                self._files.rm_file(f"{path}/{name}")

    def _delete_old(self, path: str, made: Checkpoint, before: Checkpoint | None) -> None:
        oldest = made.position if before is None else min(before.position, made.position)
        kept = {made.archive, *(() if before is None else (before.archive,))}
        for name in self._names(path):
            found = _ARCHIVE.fullmatch(name)
            # An archive at this or a later position may belong to a run that has not written its description yet.
            if found is not None and name not in kept and int(found[1]) < oldest:
                self._files.rm_file(f"{path}/{name}")

    def _ours(self, path: str) -> list[str]:
        return [name for name in self._names(path) if name == _MANIFEST or _ARCHIVE.fullmatch(name)]

    def _names(self, path: str) -> list[str]:
        files = self._files
        files.invalidate_cache()
        try:
            found = files.ls(path, detail=False)
        except FileNotFoundError:
            return []
        return [each.rstrip("/").rpartition("/")[2] for each in found]

    @cached_property
    def _files(self) -> Any:  # noqa: ANN401  # untyped
        protocol = fsspec.utils.get_protocol(self._url)
        # The URL may contain connection options, such as a host.
        options = fsspec.get_filesystem_class(protocol)._get_kwargs_from_urls(self._url)  # noqa: SLF001
        return fsspec.filesystem(protocol, **options)

    def _path(self, place: str) -> str:
        return str(self._files._strip_protocol(place))  # noqa: SLF001  # fsspec has no public API for this


def refuse_unreadable(url: str) -> None:
    """Raise SettingsError if no installed package supports the protocol of the URL."""
    protocol = fsspec.utils.get_protocol(url)
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        text = f'no storage is known for "{protocol}://"; write a directory, or for example s3://bucket/path'
    except ImportError as error:
        text = f'"{protocol}://" needs a package that is not installed: {error}. Install it with pip'
    else:
        return
    raise SettingsError([Problem(url, text)])


def _protocols(files: Any) -> tuple[str, ...]:  # noqa: ANN401  # untyped
    named = files.protocol
    return (named,) if isinstance(named, str) else tuple(named)


@contextmanager
def _answers(place: str) -> Iterator[None]:
    """Turn the exceptions of storage libraries, which share no base class, into CheckpointUnusable."""
    try:
        yield
    except DedupError:
        raise
    except Exception as error:
        reason = str(error) or "no reason given"
        raise CheckpointUnusable(f"{place}: {type(error).__name__}: {reason}.") from error
