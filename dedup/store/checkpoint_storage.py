"""Stores checkpoints in a directory or an object store, through fsspec.

``URL/TOPOLOGY/PARTITION/`` contains `manifest.json`, which describes the current checkpoint, and the checkpoint's
files, each named by its SHA-256. RocksDB never changes a data file, so a new checkpoint writes only the files that the
storage lacks. `manifest.json` is written last and in one atomic step. A file is deleted when neither the current nor
the previous checkpoint needs it, so a reader can finish while a newer checkpoint is being written. The methods of
`CheckpointStorage` may block for minutes, so do not call them in an event loop.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cached_property
from importlib.metadata import metadata
from pathlib import Path
from typing import Any, Final

import fsspec
from fsspec.registry import known_implementations

from dedup.errors import CheckpointUnusable, DedupError, Problem, SettingsError, install_command
from dedup.store.base import StoreIdentity
from dedup.store.changelog import TaskRecord
from dedup.store.checkpoint import MOST_BYTES, Checkpoint, Moved, StoreFile, files_of, pieces, write_file

_MANIFEST: Final = "manifest.json"
_OUR_FILE: Final = re.compile(r"(manifest\.json|[0-9a-f]{64})(\.new)?", re.ASCII)
_DIRECTORIES: Final = frozenset({"file", "ftp", "hdfs", "memory", "sftp", "smb", "webhdfs"})
"""The protocols for which a directory is created before its files. For other protocols, no directory is created,
because s3fs, for example, might create an unwanted bucket.
"""


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
        """Return the partition's current checkpoint, or None if the partition has no checkpoint.

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

    def read(self, checkpoint: Checkpoint, directory: Path, moved: Moved) -> None:
        """Write the files of a checkpoint into an existing, empty directory, and sync them to disk.

        Raises CheckpointUnusable if the storage fails or a file differs from its description. After a failure, some of
        the files may exist.
        """
        place = self.place(checkpoint.topology, checkpoint.partition)
        for wanted in checkpoint.files:
            at = f"{place}/{wanted.sha256}"
            with _answers(at), self._files.open(self._path(at), "rb") as source:
                write_file(wanted, source, directory, moved)
        file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def write(
        self,
        directory: Path,
        identity: StoreIdentity,
        record: TaskRecord,
        *,
        position: int,
        ids: int,
        moved: Moved = lambda _: None,
    ) -> tuple[Checkpoint, int]:
        """Save the closed store in ``directory`` as the partition's current checkpoint.

        Returns the checkpoint and the number of bytes written. The previous checkpoint stays readable. Files that only
        older checkpoints need are deleted. Raises CheckpointUnusable if the storage fails.
        """
        place = self.place(identity.topology, identity.partition)
        before = None
        with suppress(CheckpointUnusable):  # a damaged description is replaced
            before = self.find(identity.topology, identity.partition)
        with _answers(place):
            if _DIRECTORIES & set(_protocols(self._files)):
                self._files.makedirs(self._path(place), exist_ok=True)
            there = self._sizes(self._path(place))
        stored, written_bytes = [], 0
        for path in files_of(directory):
            file = StoreFile.of(path)
            stored.append(file)
            if there.get(file.sha256) == file.size_bytes:
                moved(file.size_bytes)
                continue
            there[file.sha256] = file.size_bytes
            written_bytes += file.size_bytes
            with _answers(f"{place}/{file.sha256}"), path.open("rb") as source:
                self._put(f"{place}/{file.sha256}", pieces(source, moved))
        made = Checkpoint(
            **asdict(identity),
            fingerprint_hex=record.fingerprint.hex(),
            segment_ms=record.segment_ms,
            position=position,
            ids=ids,
            files=tuple(stored),
        )
        if not self.holds(made):
            raise CheckpointUnusable(f"{place}: lacks files that were just written: another process deletes them.")
        with _answers(f"{place}/{_MANIFEST}"):
            self._put(f"{place}/{_MANIFEST}", [made.encode()])
            self._delete_old(self._path(place), made, before)
        return made, written_bytes

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Return whether all files of the checkpoint exist and have the described lengths."""
        place = self.place(checkpoint.topology, checkpoint.partition)
        with _answers(place):
            there = self._sizes(self._path(place))
        return all(there.get(file.sha256) == file.size_bytes for file in checkpoint.files)

    def partitions(self, topology: str) -> list[int]:
        """Return the partitions of a topology that have a checkpoint or leftover files, in ascending order."""
        place = f"{self._url}/{topology}"
        with _answers(place):
            path = self._path(place)
            named = sorted(int(name) for name in self._sizes(path) if name.isdecimal())
            return [partition for partition in named if self._ours(f"{path}/{partition}")]

    def delete(self, topology: str, partition: int) -> None:
        """Delete all checkpoints of the partition. Raises CheckpointUnusable if the storage fails."""
        place = self.place(topology, partition)
        with _answers(place):
            path = self._path(place)
            # The description is deleted first, because files without a description do not form a checkpoint.
            for name in sorted(self._ours(path), key=lambda name: name != _MANIFEST):
                self._files.rm_file(f"{path}/{name}")

    def _put(self, place: str, content: Iterable[bytes]) -> None:
        """Write a file so that readers get either the complete old content or the complete new content."""
        path = self._path(place)
        # In an object store, every write is atomic.
        target = f"{path}.new" if "file" in _protocols(self._files) else path
        with self._files.open(target, "wb") as file:
            for piece in content:
                file.write(piece)
        if target != path:
            self._files.mv(target, path)

    def _delete_old(self, path: str, made: Checkpoint, before: Checkpoint | None) -> None:
        recent = (made,) if before is None else (made, before)
        kept = {_MANIFEST, *(file.sha256 for checkpoint in recent for file in checkpoint.files)}
        for name in self._ours(path):
            if name not in kept:
                self._files.rm_file(f"{path}/{name}")

    def _ours(self, path: str) -> list[str]:
        return [name for name in self._sizes(path) if _OUR_FILE.fullmatch(name)]

    def _sizes(self, path: str) -> dict[str, int]:
        files = self._files
        files.invalidate_cache()
        try:
            found = files.ls(path, detail=True)
        except FileNotFoundError:
            return {}
        return {each["name"].rstrip("/").rpartition("/")[2]: each["size"] for each in found}

    @cached_property
    def _files(self) -> Any:  # noqa: ANN401  # fsspec has no types
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
        command = install_command(_package_of(protocol, error))
        missing = f"a package that is not installed ({error.__cause__ or error})"
        text = f'"{protocol}://" needs {missing}; install it: {command}'
    else:
        return
    raise SettingsError([Problem(url, text)])


def _package_of(protocol: str, error: ImportError) -> str:
    """Return the package, or the extra of fsspec, that supports a protocol."""
    if protocol in known_implementations:
        module = str(known_implementations[protocol]["class"]).partition(".")[0]
        if module != "fsspec":
            return module
    if protocol in (metadata("fsspec").get_all("Provides-Extra") or ()):
        return f"fsspec[{protocol}]"
    return str(getattr(error.__cause__, "name", None) or protocol)


def _protocols(files: Any) -> tuple[str, ...]:  # noqa: ANN401  # fsspec has no types
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
