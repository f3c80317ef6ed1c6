"""Compiles .proto text with protoc, the oracle of dedup's own parser."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from importlib import resources
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_tools import protoc

_numbers = count()


NO_FILES: Mapping[str, str] = MappingProxyType({})


def described(text: str, files: Mapping[str, str] = NO_FILES) -> descriptor_pb2.FileDescriptorSet:
    """Return what protoc says of .proto text, with its imports. Raises ValueError if the text is not valid.

    ``files`` are the texts of the files that it imports, by their paths.
    """
    with tempfile.TemporaryDirectory() as directory:
        name = f"made{next(_numbers)}.proto"
        source, made = Path(directory, name), Path(directory, "made.binpb")
        source.write_text(text)
        for path, each in files.items():
            Path(directory, path).parent.mkdir(parents=True, exist_ok=True)
            Path(directory, path).write_text(each)
        known = resources.files("grpc_tools") / "_proto"
        arguments = [f"-I{directory}", f"-I{known}", "--include_imports", f"--descriptor_set_out={made}", name]
        if protoc.main(["protoc", *arguments]) != 0:
            raise ValueError(text)
        return descriptor_pb2.FileDescriptorSet.FromString(made.read_bytes())


def compiled(text: str, name: str, files: Mapping[str, str] = NO_FILES) -> Any:
    """Return the class of a message of .proto text, given its name without the package."""
    pool = descriptor_pool.DescriptorPool()
    found = described(text, files).file
    for file in found:
        pool.Add(file)
    full = f"{found[-1].package}.{name}" if found[-1].package else name
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(full))
