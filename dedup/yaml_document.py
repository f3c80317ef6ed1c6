"""Parses YAML into plain values and validates the values. Each error contains the line and column of the problem.

The parser reports repeated keys, and rejects tags, aliases, and merge keys, which rules out "billion laughs" attacks.
"""

from __future__ import annotations

import ast
import difflib
import errno
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any, Final, TypeVar, cast, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
)

from dedup.errors import AuthorMistake, Problem, TopologyError

_MOST_BYTES: Final = 1 << 20
_MOST_NODES: Final = 20_000
_MOST_DEPTH: Final = 20
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
"""Matches unpaired surrogates, which Python uses for bytes that are not UTF-8 in arguments and variables."""
_CONSTANTS: Final = {"": None, "~": None, "null": None, "true": True, "false": False}
_INTEGER: Final = re.compile(r"[-+]?[0-9]{1,300}")
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]{1,3})?")

_MEANT: Final[Mapping[str, str]] = {
    "iso8601": "rfc3339",
    "iso-8601": "rfc3339",
    "iso": "rfc3339",
    "seconds": "s",
    "millis": "ms",
    "milliseconds": "ms",
    "micros": "us",
    "microseconds": "us",
}
"""Maps words that users may write by mistake to the words that a file must use."""
_WANTED: Final[Mapping[str, str]] = {
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "list_type": 'must be a list; write "[a, b]"',
    "tuple_type": 'must be a list; write "[a, b]"',
    "model_type": "must be a mapping of keys to values",
    "model_attributes_type": "must be a mapping of keys to values",
    "dict_type": "must be a mapping of keys to values",
}
"""Maps a pydantic error type to a message that says what the file should contain instead."""

_BEGUN: Final = ("a quoted scalar", "a flow sequence", "a flow mapping", "a simple key")
"""The contexts in which ruamel detects a mistake only after its position, possibly at the end of the file."""
_REMEDIES: Final[Mapping[str, str]] = {
    "\\t": "indent with spaces, not tabs",
    "a quoted scalar found unexpected": "close the quote that begins here",
    "a flow sequence": "close the bracket that begins here",
    "a flow mapping": "close the brace that begins here",
    "a simple key": 'write "key: value", with a space after the colon',
    "start>": "indent the keys of a mapping, or the items of a list, by the same number of spaces",
    "found '-'": "indent the keys of a mapping, or the items of a list, by the same number of spaces",
    "mapping values": 'put text that contains ": " in quotes, or indent the key like the key above it',
    "<block end>": "put the whole text in quotes, or close an earlier quote",
    "escape character": "use single quotes",
    "start any token": "put the text in quotes",
    "an alias": "put the text in quotes",
}
"""Maps a part of ruamel's message to advice about what to write instead. The first matching part applies."""

_Model = TypeVar("_Model", bound=BaseModel)
At = tuple[str | int, ...]
"""The path from the top-level value to another value, as a tuple of keys and list positions."""


def text_of(path: Path, mistake: type[AuthorMistake] = TopologyError, remedy: str = "name a topology file") -> str:
    """Return the content of a text file. Raises ``mistake`` if the file cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise mistake([Problem(str(path), f"cannot be read: {error.strerror}; {remedy}")]) from error
    except UnicodeDecodeError as error:
        raise mistake([Problem(str(path), f"is not UTF-8 at byte {error.start}; save it as UTF-8")]) from error


def beside(path: Path) -> Callable[[str], str]:
    """Return a function that reads a text file, given the file's name relative to the directory of ``path``.

    The returned function raises OSError or UnicodeDecodeError if the named file cannot be read.
    """

    def read_file(name: str) -> str:
        if "\0" in name:
            raise OSError(errno.EINVAL, "a path cannot contain a NUL character")
        return (path.parent / name).read_text(encoding="utf-8")

    return read_file


@dataclass(slots=True)
class Document:
    """The values in a YAML file, and the position of each value."""

    name: str
    value: Any = None
    """The top-level value: a scalar (None, bool, int, float, str), or a list or string-keyed dict of such values."""
    problems: list[Problem] = field(default_factory=list)
    """The problems that the parser found. If the file is not valid YAML, ``value`` is None."""
    _values: dict[At, str] = field(default_factory=dict)
    _keys: dict[At, str] = field(default_factory=dict)
    _written: dict[At, str] = field(default_factory=dict)

    def place(self, at: At) -> str:
        """Return ``file:line:column`` of a value, or of the innermost enclosing value that exists in the file."""
        for end in range(len(at), -1, -1):
            found = self._values.get(at[:end])
            if found is not None:
                return found
        return self.name

    def place_of_key(self, at: At) -> str:
        """Return ``file:line:column`` of the key that names a value."""
        return self._keys.get(at) or self.place(at)

    def written(self, at: At) -> str | None:
        """Return a scalar exactly as it is written, or None if the value is absent or not a scalar."""
        return self._written.get(at)

    def get(self, at: At) -> Any:  # noqa: ANN401 - any plain value
        """Return the value at a path, or None if the path has no value."""
        value = self.value
        for step in at:
            match value, step:
                case dict(), str():
                    value = value.get(step)
                case list(), int() if step < len(value):
                    value = value[step]
                case _:
                    return None
        return value

    def has(self, at: At) -> bool:
        """Return whether the document has a value at this path."""
        return at in self._values

    def put(self, at: At, value: Any, place: str) -> None:  # noqa: ANN401 - any plain value
        """Set a value from another source, such as the command line or an environment variable."""
        holder = self.value = self.value if isinstance(self.value, dict) else {}
        for depth, step in enumerate(at[:-1], 1):
            inner = holder.get(step)
            if not isinstance(inner, dict):
                inner = holder[step] = {}
                self._values.setdefault(at[:depth], place)
            holder = inner
        holder[at[-1]] = value
        for gone in [known for known in self._values if known[: len(at)] == at]:
            del self._values[gone]
        self._values[at] = self._keys[at] = place
        self._written[at] = str(value)

    def note(self, at: At, place: str, *, key_place: str | None = None, written: str | None = None) -> None:
        """Record the position of a value and of its key."""
        self._values[at] = place
        if key_place is not None:
            self._keys[at] = key_place
        if written is not None:
            self._written[at] = written


def read(text: str, *, name: str, texts: Collection[At] = ()) -> Document:
    """Parse YAML into a document, whose ``problems`` contain the YAML errors.

    At a path in ``texts``, an integer stays a string as written, because ``0042`` may be a name, not the number 42.
    """
    document = Document(name)
    if len(text.encode(errors="replace")) > _MOST_BYTES:
        document.problems.append(Problem(name, f"is larger than {_MOST_BYTES >> 20} MiB, which is the limit"))
        return document
    try:
        _Reading(document, texts, YAML(typ="safe", pure=True).parse(text)).run()
    except AuthorMistake as refused:
        (problem,) = refused.problems
    except MarkedYAMLError as error:
        problem = _not_yaml(name, error)
    except YAMLError as error:
        problem = Problem(name, f"is not YAML: {' '.join(str(error).split())}")
    else:
        return document
    # Report only this problem. The rest of the file was not read, so every later key would be reported as missing.
    return Document(name, problems=[problem])


def _not_yaml(name: str, error: MarkedYAMLError) -> Problem:
    begun = str(error.context).endswith(_BEGUN)
    mark = (error.context_mark if begun else error.problem_mark) or error.context_mark
    place = name if mark is None else _place(name, mark)
    said = f"{error.context} {error.problem}"
    remedy = next((f"; {text}" for part, text in _REMEDIES.items() if part in said), "")
    return Problem(place, f"is not YAML here: {error.problem or error.context}{remedy}")


class _Reading:
    def __init__(self, document: Document, texts: Collection[At], events: Iterator[Any]) -> None:
        self._document: Final = document
        self._texts: Final = texts
        self._events: Final = events
        self._nodes = 0

    def run(self) -> None:
        documents = 0
        for event in self._events:
            if isinstance(event, DocumentStartEvent):
                documents += 1
                if documents > 1:
                    text = 'a second document starts here; remove the "---" and what follows'
                    raise AuthorMistake([Problem(_place(self._document.name, event.start_mark), text)])
            elif isinstance(event, NodeEvent):
                self._document.value = self._value(event, ())

    def _value(self, event: Any, at: At, key_place: str | None = None) -> Any:  # noqa: ANN401 - any event and value
        place = self._place_of_node(event)
        if isinstance(event, ScalarEvent):
            value = _scalar(event)
            if type(value) is int and at in self._texts:
                value = event.value
            if value is None and at:
                # An empty value has no position, so the problem is reported at the value's key, if any.
                place = key_place or place
                text = f"has no value; write one, or leave the {'key' if key_place else 'item'} out"
                self._document.problems.append(Problem(place, f"{dotted(at)}: {text}"))
            self._document.note(at, place, key_place=key_place, written=event.value)
            return value
        if len(at) >= _MOST_DEPTH:
            raise AuthorMistake([Problem(place, f"nested more than {_MOST_DEPTH} levels deep, which is the limit")])
        self._document.note(at, place, key_place=key_place)
        if isinstance(event, MappingStartEvent):
            return self._mapping(at)
        values: list[Any] = []
        while not isinstance(event := next(self._events), SequenceEndEvent):
            values.append(self._value(event, (*at, len(values))))
        return values

    def _mapping(self, at: At) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while not isinstance(event := next(self._events), MappingEndEvent):
            place = self._place_of_node(event)
            if not isinstance(event, ScalarEvent):
                raise AuthorMistake([Problem(place, "a key must be a name")])
            key = event.value
            if key in values:
                first = self._document.place_of_key((*at, key))
                where = first.removeprefix(f"{self._document.name}:").partition(":")[0]
                text = f'the key "{key}" is repeated; it is already on line {where}'
                self._document.problems.append(Problem(place, text))
            values[key] = self._value(next(self._events), (*at, key), place)
        return values

    def _place_of_node(self, event: Any) -> str:  # noqa: ANN401 - ruamel's events share no useful base
        place = _place(self._document.name, event.start_mark)
        if isinstance(event, AliasEvent):
            text = f'without quotes, "*{event.anchor}" is an alias, which is not allowed; put the text in quotes'
            raise AuthorMistake([Problem(place, f"{text}, or write the value out")])
        self._nodes += 1
        if self._nodes > _MOST_NODES:
            raise AuthorMistake([Problem(place, f"more than {_MOST_NODES} values, which is the limit")])
        if event.tag is not None and not (isinstance(event, ScalarEvent) and event.tag == "!"):
            raise AuthorMistake([Problem(place, f"the tag {event.tag} is not allowed; write the plain value")])
        if isinstance(event, ScalarEvent) and not is_utf8(event.value):
            raise AuthorMistake([Problem(place, "an unpaired surrogate, which UTF-8 cannot encode, is not allowed")])
        return place


def is_utf8(text: str) -> bool:
    """Return whether a string from a file, an argument, or an environment variable can be encoded as UTF-8."""
    return _SURROGATE.search(text) is None


def _place(name: str, mark: Any) -> str:  # noqa: ANN401 - ruamel's mark
    return f"{name}:{mark.line + 1}:{mark.column + 1}"


def _scalar(event: Any) -> Any:  # noqa: ANN401 - any plain scalar
    """Return a scalar's value under the YAML 1.2 core schema, in which quoted scalars and timestamps are strings."""
    text: str = event.value
    if not event.implicit[0]:
        return text
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


class Keys(BaseModel):
    """The base class for models of mappings in YAML files. Unknown keys are rejected, and values are not converted.

    Every command imports models, so importing them must be fast. Therefore, pydantic builds a validator only on first
    use, and `schema_of`, not pydantic, reads the key descriptions from the source.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True, defer_build=True)


def accepting(
    accepts: Callable[[Any], object], text: str, *, kind: Callable[[Callable[[Any], Any]], Any] = AfterValidator
) -> Any:  # noqa: ANN401 - a validator of this kind
    """Return a validator that rejects a value if ``accepts(value)`` is false.

    In the error message ``text``, ``{}`` stands for the value.
    """

    def check(value: Any) -> Any:  # noqa: ANN401 - any value in the file
        if not accepts(value):
            raise ValueError(text.replace("{}", str(value)))
        return value

    return kind(check)


def some(what: str) -> Any:  # noqa: ANN401 - a validator
    """Return a validator that rejects empty lists."""
    return accepting(bool, f"is an empty list; name at least one {what}")


def matching(pattern: re.Pattern[str], remedy: str) -> Any:  # noqa: ANN401 - a validator
    """Return a validator that rejects strings that do not match ``pattern``, with an error that contains ``remedy``."""
    return accepting(pattern.fullmatch, f'"{{}}" {remedy}')


def within(low: int, high: int) -> Any:  # noqa: ANN401 - a validator
    """Return a validator that accepts numbers from ``low`` to ``high``."""
    return accepting(lambda number: low <= number <= high, f'"{{}}" must be {low} to {high}')


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean "..."?`` for the closest known word, or a list of all known words if none is close."""
    names = sorted(known)
    return _nearest(word, names) or (f"; the valid names are {', '.join(names)}" if names else "")


def _nearest(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f'; did you mean "{near[0]}"?' if near else ""


def dotted(at: At) -> str:
    """Return a path as a string such as ``source.topics[0]``."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in at).lstrip(".")


def models_of(model: type[BaseModel], holder: At = ()) -> dict[At, type[BaseModel]]:
    """Map the path of each nested mapping to the mapping's model. The paths contain no list positions."""
    found = {holder: model}
    for name, key in model.model_fields.items():
        for inner in _models_in(key.annotation):
            found |= models_of(inner, (*holder, name))
    return found


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:  # noqa: ANN401 - any type
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def validated(document: Document, model: type[_Model]) -> tuple[_Model | None, list[Problem]]:
    """Return the document as an instance of the model (None if the document is invalid), and all problems."""
    try:
        return model.model_validate(document.value), []
    except ValidationError as error:
        return None, list(_told(error, document, model))


def schema_of(model: type[BaseModel], title: str) -> dict[str, Any]:
    """Return the JSON Schema of the files that a model describes, for use in editors."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **model.model_json_schema()}
    mappings = {model.__name__: schema, **schema.get("$defs", {})}
    for holder in set(models_of(model).values()):
        keys = mappings[holder.__name__]["properties"]
        for name, text in _docstrings(holder).items():
            key = holder.model_fields[name].alias or name
            keys[key] = dict(sorted({**keys[key], "description": text}.items()))
    return schema | {"title": title}


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Map each field of a model, including inherited fields, to its docstring, the string literal after the field."""
    found: dict[str, str] = {}
    for holder in reversed([base for base in model.__mro__ if issubclass(base, Keys)]):
        (definition,) = ast.parse(dedent(inspect.getsource(holder))).body
        for key, text in pairwise(cast("ast.ClassDef", definition).body):
            match key, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(docstring))):
                    found[name] = inspect.cleandoc(docstring)
                case _:
                    pass
    return found


def _told(error: ValidationError, document: Document, model: type[BaseModel]) -> Iterator[Problem]:
    for found in error.errors(include_url=False, include_input=False):
        at = _in_document(found["loc"], document)
        if at and document.get(at) is None:
            # `read` has already reported that this value is empty.
            continue
        label = f"{dotted(at)}: " if at else ""
        written = document.written(at)
        shown = f'"{written}" ' if written else ""
        match found["type"]:
            case "extra_forbidden":
                holder = models_of(model).get(tuple(step for step in at[:-1] if isinstance(step, str)))
                suffix = did_you_mean(str(at[-1]), holder.model_fields if holder else ())
                yield Problem(document.place_of_key(at), f'unknown key "{dotted(at)}"{suffix}')
            case "missing":
                key = found["loc"][-1]
                inside = f" in {dotted(at)}" if at else ""
                yield Problem(document.place_of_key(at), f'the key "{key}" is missing{inside}')
            case "literal_error":
                words = [word.strip("'") for word in re.split(r", | or ", found["ctx"]["expected"])]
                meant = _MEANT.get(written or "", "")
                suffix = f'; did you mean "{meant}"?' if meant in words else _nearest(written or "", words)
                yield Problem(document.place(at), f"{label}{shown}is not one of {' | '.join(words)}{suffix}")
            case "value_error":
                yield Problem(document.place(at), f"{label}{found['ctx']['error']}")
            case "string_type" | "is_instance_of":
                yield Problem(document.place(at), f"{label}{shown}{_text_wanted(document.get(at))}")
            case kind:
                yield Problem(document.place(at), f"{label}{shown}{_WANTED.get(kind, found['msg'])}")


def _text_wanted(value: Any) -> str:  # noqa: ANN401 - any plain value
    match value:
        case dict():
            return "must be text, not a mapping; write the text alone"
        case list():
            return "must be text, not a list; write the text alone"
        case bool():
            return "must be text, not true or false; if this word is a name, put it in quotes"
        case _:
            return "must be text; put it in quotes"


def in_order(problems: list[Problem]) -> list[Problem]:
    """Return the problems without duplicates, sorted by position."""

    def position(problem: Problem) -> tuple[int, int]:
        parts = problem.place.rsplit(":", 2)
        numbers = [int(part) for part in parts[1:] if part.isdigit()]
        return (numbers[0], numbers[1]) if len(numbers) == len(parts) - 1 == 2 else (0, 0)  # noqa: PLR2004 - line, column

    return sorted(dict.fromkeys(problems), key=position)


def _in_document(loc: Sequence[str | int], document: Document) -> At:
    at: At = ()
    for step in loc:
        if document.has((*at, step)):
            at = (*at, step)
    return at
