"""Compiles .proto text with protoc, the oracle of dedup's own parser."""

from __future__ import annotations

import tempfile
from importlib import resources
from itertools import count
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_tools import protoc

_numbers = count()


def described(text: str) -> descriptor_pb2.FileDescriptorSet:
    """Return what protoc says of .proto text, with its imports. Raises ValueError if the text is not valid."""
    with tempfile.TemporaryDirectory() as directory:
        name = f"made{next(_numbers)}.proto"
        source, made = Path(directory, name), Path(directory, "made.binpb")
        source.write_text(text)
        known = resources.files("grpc_tools") / "_proto"
        arguments = [f"-I{directory}", f"-I{known}", "--include_imports", f"--descriptor_set_out={made}", name]
        if protoc.main(["protoc", *arguments]) != 0:
            raise ValueError(text)
        return descriptor_pb2.FileDescriptorSet.FromString(made.read_bytes())


def compiled(text: str, name: str) -> Any:
    """Return the class of a message of .proto text, given its name without the package."""
    pool = descriptor_pool.DescriptorPool()
    files = described(text).file
    for file in files:
        pool.Add(file)
    full = f"{files[-1].package}.{name}" if files[-1].package else name
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(full))
