"""Reads a schema file that a topology file names, together with the .proto files that it imports."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import PurePosixPath

from dedup.core.framing import SchemaRefused, in_reference
from dedup.core.proto_schema import imports_of
from dedup.core.tracking_id import SchemaFile

ReadFile = Callable[[str], str]
"""Returns the text of a file, given its path relative to the topology file. Raises OSError or UnicodeDecodeError."""


def read_schema(name: str, read_file: ReadFile) -> SchemaFile:
    """Return a schema file, and the files that it imports if it is a .proto file.

    As protoc does with its option -I, an import is looked for in a directory that contains the importing file: first in
    the file's own directory, then in the directory above, up to the directory of the topology file. An import that is
    not found is left out, because many imports only define options. Raises OSError or UnicodeDecodeError for a file
    that cannot be read, and SchemaRefused for a file that imports itself.
    """
    text = read_file(name)
    if PurePosixPath(name).suffix != ".proto":
        return SchemaFile(name, text)
    found: dict[str, str] = {}
    _find_imports(text, [*PurePosixPath(name).parents], read_file, found, ())
    return SchemaFile(name, text, tuple(found.items()))


def _find_imports(
    text: str, roots: list[PurePosixPath], read_file: ReadFile, found: dict[str, str], importing: tuple[str, ...]
) -> None:
    """Add the files that ``text`` imports to ``found``, each after those that it imports itself."""
    for path in imports_of(text):
        if path in importing:
            raise SchemaRefused(f"imports {path[:64]}, which imports itself, directly or not")
        if path in found:
            continue
        for root in roots:
            with suppress(FileNotFoundError):
                inner = read_file(str(root / path))
                try:
                    _find_imports(inner, roots, read_file, found, (*importing, path))
                except SchemaRefused as refused:
                    raise in_reference(path, refused) from None
                found[path] = inner
                break
