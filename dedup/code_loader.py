"""Imports the user's code that a topology names, such as a flow or an ID function."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import blake2b
from importlib import import_module, invalidate_caches
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from dedup.errors import Problem, Terminated, TopologyError

_DIGEST_BYTES: Final = 8
_Headers = Sequence[tuple[str, bytes | None]]


def directory_of(file: str) -> str:
    """Return the absolute path of a file's directory, which stays valid if the working directory changes."""
    return str(Path(file).resolve().parent)


def load_attribute(key: str, name: str, directory: str, file: str) -> tuple[Any, ModuleType]:
    """Import the module in ``module:attribute``, and return the attribute (None if it is missing) and the module.

    The import runs the user's code. The module must be in ``directory``, next to the topology file, or be installed.
    Raises TopologyError, naming ``key`` and ``file``, if the module cannot be imported, or if another module with the
    same name shadows the one in ``directory``.
    """
    module_name, _, attribute = name.partition(":")
    if directory not in sys.path:
        sys.path.append(directory)  # Append, so that no file in the directory hides a module that dedup imports.
        invalidate_caches()
    try:
        module = import_module(module_name)
    except (KeyboardInterrupt, Terminated):
        raise
    except BaseException as error:  # A module that raises SystemExit must not end the command as a success.
        text = f"{key}: {module_name} cannot be imported: {type(error).__name__}: {error}"
        raise TopologyError([Problem(file, f"{text}; {_remedy(error, module_name, directory)}")]) from error
    top = module_name.partition(".")[0]
    beside = [each.resolve() for each in (Path(directory, top), Path(directory, f"{top}.py")) if each.exists()]
    found = Path(getattr(module, "__file__", None) or "").resolve()
    if beside and not any(each == found or each in found.parents for each in beside):
        text = f"{key}: {module_name} is {found}, not the module beside the topology file; give that one another name"
        raise TopologyError([Problem(file, text)])
    _imported(module)  # keep this digest even if the file changes later
    return getattr(module, attribute, None), module


def _remedy(error: BaseException, module_name: str, directory: str) -> str:
    if not isinstance(error, ModuleNotFoundError):
        return "correct the module"
    if f"{module_name}.".startswith(f"{error.name}."):
        return f"put it into {directory}, or install it"
    return f"install {error.name}, which the module imports"


@cache
def load_id_function(
    name: str, directory: str, file: str, digest: str
) -> Callable[[bytes | None, bytes | None, _Headers], object]:
    """Import the ID function ``module:attribute`` as `load_attribute` does, and return the function.

    ``digest`` is the `source_digest` of the module next to the topology file, taken when that file was read, or an
    empty string if no such module existed. Raises TopologyError if the attribute is not a function or is an async
    function. Also raises TopologyError if the imported module's digest is not ``digest``, because changed code may
    return different IDs.
    """
    key = "tracking_id.python"
    function, module = load_attribute(key, name, directory, file)
    if not callable(function):
        text = f"{key}: {name} is not a function; define it as def {name.partition(':')[2]}(key, value, headers)"
        raise TopologyError([Problem(file, text)])
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise TopologyError([Problem(file, f"{key}: {name} is async; a tracking ID must not wait for anything")])
    imported = _imported(module)
    if digest and imported != digest:
        text = (
            f"{key}: {module.__file__} (digest {imported or 'unknown'}) differs from the module that was next to the "
            f"topology file when it was read (digest {digest}). Deploy the same file to every machine"
        )
        if _digest_of(module) == digest:
            text = f"{key}: {module.__file__} was changed after this process had imported it; restart the process"
        raise TopologyError([Problem(file, text)])
    return function  # type: ignore[no-any-return]


def imported_digest(name: str) -> str:
    """Return the source digest that the module in ``module:attribute`` had when this process imported it.

    Returns an empty string if the process has not imported the module, or if the module has no source.
    """
    module = sys.modules.get(name.partition(":")[0])
    return "" if module is None else _imported(module)


@cache
def _imported(module: ModuleType) -> str:
    """Return the source digest computed at the first call, immediately after `load_attribute` imported the module."""
    return _digest_of(module)


def _digest_of(module: ModuleType) -> str:
    """Return the digest of a module's source, or an empty string without a source. The source may be in a zip file."""
    try:
        spec = module.__spec__
        text = None if spec is None else spec.loader.get_source(spec.name)  # type: ignore[union-attr]
    except (AttributeError, ImportError, OSError, UnicodeDecodeError):
        text = None
    return "" if text is None else source_digest(text)


def source_digest(text: str) -> str:
    """Return the digest of a module's source text as a hexadecimal string, without a byte order mark.

    Python drops the mark when it reads the source of a module.
    """
    return blake2b(text.removeprefix("\ufeff").encode(), digest_size=_DIGEST_BYTES).hexdigest()
