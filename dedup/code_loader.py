"""Imports the user's code that a topology names, such as a flow or a function that returns tracking IDs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import blake2b
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import Any, Final

from dedup.errors import Problem, TopologyError

_DIGEST_BYTES: Final = 8
_Headers = Sequence[tuple[str, bytes | None]]


def load_attribute(key: str, name: str, directory: str, file: str) -> tuple[Any, Path]:
    """Import ``module:attribute``, and return the attribute (None if there is none) and the module's file.

    The import runs the user's code. The module is in ``directory``, which contains the topology file, or is installed.
    Raises TopologyError, which names ``key`` and ``file``, if the module cannot be imported, or if another module hides
    the module in ``directory``.
    """
    module_name, _, attribute = name.partition(":")
    directory = str(Path(directory).resolve())
    if directory not in sys.path:
        sys.path.append(directory)  # Append, so that no file in the directory hides a module that dedup imports.
        invalidate_caches()
    try:
        module = import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # A module that raises SystemExit must not end the command as if it had succeeded.
        text = f"{key}: {module_name} cannot be imported: {type(error).__name__}: {error}"
        raise TopologyError([Problem(file, f"{text}; put it into {directory}, or install it")]) from error
    top = module_name.partition(".")[0]
    beside = [each for each in (Path(directory, top), Path(directory, f"{top}.py")) if each.exists()]
    found = Path(getattr(module, "__file__", None) or "").resolve()
    if beside and directory not in map(str, found.parents):
        text = f"{key}: {module_name} is {found}, not the module beside the topology file; give that one another name"
        raise TopologyError([Problem(file, text)])
    return getattr(module, attribute, None), found


@cache
def load_id_function(
    name: str, directory: str, file: str, digest: str
) -> Callable[[bytes | None, bytes | None, _Headers], object]:
    """Import and return the function ``module:attribute`` that returns tracking IDs; see `load_attribute`.

    ``digest`` is the `source_digest` of the module where the topology was read, or an empty string if the module is
    installed. Raises TopologyError if the attribute is not a function, if the function is async, or if the module in
    this process has another digest, because another function may return other IDs.
    """
    key = "tracking_id.python"
    function, found = load_attribute(key, name, directory, file)
    if not callable(function):
        text = f"{key}: {name.partition(':')[2]} in {found} is no function of (key, value, headers)"
        raise TopologyError([Problem(file, text)])
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise TopologyError([Problem(file, f"{key}: {name} is async; a tracking ID must not wait for anything")])
    if digest:
        own = source_digest(found.read_text(encoding="utf-8"))
        if own != digest:
            text = (
                f"{key}: {found} has the digest {own}, and the module beside the topology file {digest}. "
                f"Use the same file on every machine"
            )
            raise TopologyError([Problem(file, text)])
    return function  # type: ignore[no-any-return]


def source_digest(text: str) -> str:
    """Return the digest of a module's source text, in hexadecimal digits."""
    return blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()
