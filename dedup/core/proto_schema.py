"""Parses a Protobuf schema from a file or a schema registry into the message types that it defines.

The parser keeps only the parts that determine how values are encoded: the fields, their types, and their presence. The
imported files are the files that the schema refers to; `read_schema` finds the imports of a local file. The types in
`_WELL_KNOWN` are built in. The parser ignores imports of other files, and refuses a field whose type only such a file
defines.

Source: the language specifications of proto2 and proto3. The tests compare this parser with protoc 33.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from typing import Final, NoReturn

from dedup.core.framing import MOST_SCHEMA_CHARS, LinkedSchema, SchemaRefused, SchemaText, in_reference, linked
from dedup.core.tracking_id import SchemaFile

MAX_DEPTH: Final = 100
"""The maximum nesting depth of message types in schemas, and of groups in values."""
_MOST_NAME_CHARS: Final = 500
_MOST_NUMBER: Final = (1 << 29) - 1
TIMESTAMP: Final = "google.protobuf.Timestamp"
SCALARS: Final = {
    "int32": 0, "int64": 0, "uint32": 0, "uint64": 0, "sint32": 0, "sint64": 0, "bool": 0, "enum": 0,
    "fixed64": 1, "sfixed64": 1, "double": 1, "string": 2, "bytes": 2, "fixed32": 5, "sfixed32": 5, "float": 5,
}  # fmt: skip
"""Maps each scalar type, and `enum`, to the wire type of its values."""
_WRAPPERS: Final = (
    *("Double double", "Float float", "Int64 int64", "UInt64 uint64", "Int32 int32", "UInt32 uint32", "Bool bool"),
    *("String string", "Bytes bytes"),
)
WRAPPERS: Final = {f"google.protobuf.{each.split()[0]}Value" for each in _WRAPPERS}
"""The messages that wrap a single value, so that the value can be absent."""
_WELL_KNOWN: Final = """
syntax = "proto3"; package google.protobuf;
message Any { string type_url = 1; bytes value = 2; }
message Duration { int64 seconds = 1; int32 nanos = 2; }
message Empty {}
message FieldMask { repeated string paths = 1; }
message Timestamp { int64 seconds = 1; int32 nanos = 2; }
enum NullValue { NULL_VALUE = 0; }
message Struct { map<string, Value> fields = 1; }
message Value { oneof kind { NullValue null_value = 1; double number_value = 2; string string_value = 3;
  bool bool_value = 4; Struct struct_value = 5; ListValue list_value = 6; } }
message ListValue { repeated Value values = 1; }
""" + "".join("message {}Value {{ {} value = 1; }}\n".format(*each.split()) for each in _WRAPPERS)
_IMPORTABLE: Final = "of other files, only Any, Duration, Empty, FieldMask, Struct, Timestamp, and wrappers are known"

_TOKEN: Final = re.compile(
    r"""(?P<blank>\s+|//[^\n]*|/\*.*?\*/)|(?P<name>[A-Za-z_]\w*)|(?P<number>[0-9][\w.]*|\.[0-9][\w.]*)"""
    r"""|(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(?P<mark>[{}()\[\]<>=;,.:/+-])""",
    re.ASCII | re.DOTALL,
)
_BASE64: Final = re.compile(r"[A-Za-z0-9+/]{4,}={0,2}", re.ASCII)
"""Matches a Base64 descriptor, which Confluent's Python serializer registers and some registries return."""
_TYPES: Final = (
    *("", "double", "float", "int64", "uint64", "int32", "fixed64", "fixed32", "bool", "string", "group", "message"),
    *("bytes", "uint32", "enum", "sfixed32", "sfixed64", "sint32", "sint64"),
)
"""The types of fields, indexed by their numbers in descriptor.proto."""
_KEYS: Final = SCALARS.keys() - {"enum", "double", "float", "bytes"}
"""The types that the keys of a map can have."""
_REPEATED: Final = 3
_MOST_FAULTS: Final = 3
"""The maximum number of unusable imports that an error text names."""
_WELL_KNOWN_FILES: Final = "google/protobuf/"
"""The directory of the files whose types are built in. No reference can replace these files."""
_CLOSING: Final = {"{": "}", "[": "]", "(": ")"}


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a message."""

    number: int
    kind: str
    """A scalar type, or enum, message, group, map, or repeated."""
    has_presence: bool
    """True if the encoding distinguishes a field that was set to its type's default value from an unset field."""
    oneof: str = ""
    message: Message | None = None
    """The message type of the field, or None if the field is not a single message."""
    item: Field | None = None
    """The element type of a repeated field, a map, or a group, or None for any other field.

    The element is that of a repeated field, an entry of a map (a message with the fields `key` and `value`), or the
    message of a group. The value is also None for a map whose types are unknown or not allowed, because most readers
    skip maps.
    """

    @property
    def type_name(self) -> str:
        """The name of the field's type or, for a wrapper message, of the wrapped value's type."""
        if self.message is None or self.message.name not in {TIMESTAMP, *WRAPPERS}:
            return self.kind
        return TIMESTAMP if self.message.name == TIMESTAMP else self.message.fields["value"].kind


@dataclass(slots=True, eq=False)
class Message:
    """A message type. The parser creates the object before its fields, because a message may contain itself."""

    name: str
    """The full name, which includes the package."""
    fields: dict[str, Field] = field(default_factory=dict, repr=False)
    nested: list[Message | None] = field(default_factory=list, repr=False)
    """The message types that the message defines, with None for the type of a map's entries."""
    is_group: bool = False

    def nested_at(self, index: int) -> Message | None:
        """Return the message type at an index, or None if none has the index or if serializers disagree about the type.

        Confluent's Python serializer counts groups and the types of map entries, but its Java serializer does not.
        """
        without_maps = [each for each in self.nested if each is not None]
        ways = (self.nested, without_maps, [each for each in without_maps if not each.is_group])
        found = {each for way in ways for each in way[index : index + 1] if each is not None}
        return found.pop() if len(found) == 1 else None


_Types = dict[str, Message | None]
"""Maps the full name of each type to its message, or to None if the type is an enum."""


def parse_proto(schema: SchemaText) -> Message:
    """Return an unnamed message in which a schema's messages are nested. Raises SchemaRefused for an invalid schema."""
    found = _parsed(schema)
    if isinstance(found, str):
        raise SchemaRefused(found)
    return found


@lru_cache(maxsize=256)
def _parsed(schema: SchemaText) -> Message | str:
    """Return the result of `parse_proto`, or the text of its error. Both are cached."""
    try:
        return _parse(schema)
    except SchemaRefused as refused:
        return str(refused)


def _parse(schema: SchemaText) -> Message:
    whole = linked(schema)
    files: dict[str, _Types] = {}
    by_text: dict[str, _Types] = {}  # a file that is imported by two names defines its types only once
    for name, text in whole.references:
        if name.startswith(_WELL_KNOWN_FILES):
            continue
        try:
            files[name] = by_text[text] = by_text.get(text) or _read(text, files).exported
        except SchemaRefused as refused:
            raise in_reference(name, refused) from None
    parser = _read(whole.text, files)
    if not parser.top:
        raise SchemaRefused("defines no message")
    return Message("", nested=parser.top)


def _read(text: str, files: Mapping[str, _Types]) -> _Parser:
    encoded = _BASE64.fullmatch(text)
    parser = _Parser("" if encoded else text, dict(_well_known()), files)
    try:
        parser.file() if encoded is None else parser.descriptor(b64decode(text))
    except SchemaRefused:
        raise
    except (ValueError, LookupError):
        raise SchemaRefused("is neither .proto text nor a descriptor") from None
    return parser


def message_at(file: Message, indexes: tuple[int, ...]) -> Message:
    """Return the message type with the given indexes. Raises SchemaRefused unless exactly one exists."""
    found: Message | None = file
    for index in indexes:
        found = None if found is None else found.nested_at(index)
    if found is None:
        raise SchemaRefused(f"has no message with the indexes {list(indexes)}, or more than one")
    return found


ReadFile = Callable[[str], str]
"""Returns the text of a file, given its path relative to the topology file. Raises OSError or UnicodeDecodeError."""


def read_schema(name: str, read_file: ReadFile) -> SchemaFile:
    """Return a schema file, and the files that it imports if it is a .proto file and needs types of these files.

    As protoc does with its option -I, the function looks for an import in the directories that contain the importing
    file: first in the file's own directory, then in the directory above, up to the directory of the topology file. An
    import that is not found or cannot be used is left out, because many imports only define options. Raises OSError or
    UnicodeDecodeError if the schema file cannot be read. Raises SchemaRefused if the file is not .proto text, or cannot
    be parsed without imports that were left out.
    """
    text = read_file(name)
    if not name.endswith(".proto"):
        return SchemaFile(name, text)
    imports = _Imports(_directories(name), read_file)
    imports.find(text, ())
    made = SchemaFile(name, text, imports.needed_by(text))
    if imports.unusable:
        try:
            parse_proto(LinkedSchema(text, made.imports))
        except SchemaRefused as refused:
            faults = (f"the import {path[:64]} could not be used: it {why}" for path, why in imports.unusable.items())
            raise SchemaRefused("; ".join((str(refused), *islice(faults, _MOST_FAULTS)))) from None
    return made


def _directories(name: str) -> list[str]:
    """Return the directories that contain a file, nearest first, each as the beginning of a file's path."""
    parts = name.split("/")[:-1]
    found = ["".join(f"{part}/" for part in parts[:most]) for most in range(len(parts), -1, -1)]
    return found[:-1] if name.startswith("/") else found


class _Imports:
    """The local files that a .proto file imports, directly or not."""

    def __init__(self, roots: list[str], read_file: ReadFile) -> None:
        self._roots: Final = roots
        self._read_file: Final = read_file
        self._found: Final[dict[str, str]] = {}
        """The text of each file, after the files that it imports itself."""
        self._types: Final[dict[str, _Types]] = {}
        self._by_text: Final[dict[str, _Types]] = {}
        self.unusable: Final[dict[str, str]] = {}
        """Maps each file that cannot be used to the reason."""

    def find(self, text: str, importing: tuple[str, ...]) -> None:
        """Find the files that ``text`` imports. Raises SchemaRefused if the text has no valid tokens."""
        for path in _imports_of(text):
            if path in importing:
                self.unusable[path] = "imports itself, directly or not"
            if path in self.unusable or path in self._types or path.startswith(_WELL_KNOWN_FILES):
                continue
            try:
                inner = self._text_of(path)
                if inner is None:
                    continue
                if len(importing) > MAX_DEPTH or len(inner) > MOST_SCHEMA_CHARS:
                    raise SchemaRefused("is too large, or imported by too many files that import each other")
                self.find(inner, (*importing, path))
                if path not in self.unusable:
                    types = self._by_text.get(inner) or _read(inner, self._types).exported
                    self._types[path] = self._by_text[inner] = types
                    self._found[path] = inner
            except SchemaRefused as refused:
                self.unusable[path] = str(refused)
            except OSError as error:
                self.unusable[path] = f"cannot be read: {error.strerror}"
            except UnicodeDecodeError as error:
                self.unusable[path] = f"is not UTF-8 at byte {error.start}"

    def _text_of(self, path: str) -> str | None:
        """Return the text of a file, or None if the file does not exist."""
        if path.startswith("/") or ".." in path.split("/") or "\0" in path:
            raise SchemaRefused("has a path that is absolute, or that contains .. or a null character")
        for root in self._roots:
            with suppress(FileNotFoundError, NotADirectoryError):
                return self._read_file(root + path)
        return None

    def needed_by(self, text: str) -> tuple[tuple[str, str], ...]:
        """Return the name and text of each file with a type whose name is a word of ``text`` or of a needed file."""
        due, words, needed = [text], set[str](), set[str]()
        while due:
            words.update(word for kind, word, _ in _tokens(due.pop().removeprefix("\ufeff")) if kind == "name")
            for path in self._found.keys() - needed:
                if any(name.rpartition(".")[2] in words for name in self._types[path]):
                    needed.add(path)
                    due.append(self._found[path])
        return tuple((path, inner) for path, inner in self._found.items() if path in needed)


def _imports_of(text: str) -> list[str]:
    """Return the paths of the files that .proto text imports. Raises SchemaRefused if the text has no valid tokens."""
    tokens = [(kind, word) for kind, word, _ in _tokens(text.removeprefix("\ufeff"))]
    found: list[str] = []
    for at, (_, word) in enumerate(tokens):
        after = tokens[at + 1 : at + 3]
        if word == "import" and after:
            kind, named = after[0] if after[0][1] not in {"public", "weak"} else after[-1]
            found += [named[1:-1]] if kind == "string" else []
    return found


@lru_cache(maxsize=1)
def _well_known() -> _Types:
    parser = _Parser(_WELL_KNOWN, {}, {})
    parser.file()
    return parser.named


class _Parser:
    def __init__(self, text: str, named: _Types, files: Mapping[str, _Types]) -> None:
        self.named: Final = named
        """The types that fields can have."""
        self.exported: Final[_Types] = {}
        """The types that files which import this file can use."""
        self._files: Final = files
        self.top: Final[list[Message | None]] = []
        self._known: Final = frozenset(named)
        self._tokens: Final = [*_tokens(text.removeprefix("\ufeff")), ("end", "", text.count("\n") + 1)]
        self._at = 0
        self._entries: Final[dict[str, tuple[str, ...]]] = {}
        """Maps the name by which fields refer to a map's entry type to the types of the key and the value."""
        self._proto3 = False
        self._package = ""
        self._numbers: Final[set[tuple[int, int]]] = set()
        self._later: Final[list[Callable[[], None]]] = []
        """The functions that add the fields to the messages once all types are known."""

    def file(self) -> None:
        while self._kind != "end":
            word = self._take()
            if self._defines(word, self._package, self.top, 0):
                continue
            match word:
                case "syntax":
                    self._syntax()
                case "edition":
                    self._refuse("has an edition, and only proto2 and proto3 are supported")
                case "package":
                    self._enter(self._type_name())
                    self._expect(";")
                case "import":
                    public = self._word == "public"
                    self._at += self._word in {"public", "weak"}
                    self._import(self._take("string")[1:-1], public=public)
                    self._expect(";")
                case "service":
                    self._take("name")
                    self._skip_block()
                case _:
                    self._at -= 1
                    self._refuse("is not .proto text")
        for add in self._later:
            add()

    def descriptor(self, data: bytes) -> None:
        """Parse a FileDescriptorProto instead of text. The field numbers are those of descriptor.proto."""
        file = _fields(data)
        self._proto3 = _text(file, 12) == "proto3"
        if _text(file, 12) not in {"", "proto2", "proto3"}:
            self._refuse("has an edition, and only proto2 and proto3 are supported")
        self._enter(_text(file, 2))
        public = file.get(10, [])
        for at, name in enumerate(_texts(file, 3)):
            self._import(name, public=at in public)
        for enum in _each(file, 5):
            self._define(_join(self._package, _text(enum, 1)), None)
        for message in _each(file, 4):
            self._described(self.top, message, self._package, 0)
        for add in self._later:
            add()

    def _described(self, nested: list[Message | None], found: _Fields, scope: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            self._refuse(f"is nested more than {MAX_DEPTH} levels deep")
        made = Message(_join(scope, _text(found, 1)))
        if any(_number(options, 7) for options in _each(found, 7)):  # map_entry
            nested.append(None)
            types = {_number(each, 3): _described_type(each) for each in _each(found, 2)}
            self._entries[f".{made.name}"] = (types.get(1, ""), types.get(2, ""))
            return
        nested.append(made)
        self._define(made.name, made)
        for enum in _each(found, 4):
            self._define(_join(made.name, _text(enum, 1)), None)
        for message in _each(found, 3):
            self._described(made.nested, message, made.name, depth + 1)
        oneofs = [_text(oneof, 1) for oneof in _each(found, 8)]
        for each in _each(found, 2):
            self._described_field(made, each, oneofs)

    def _described_field(self, message: Message, found: _Fields, oneofs: list[str]) -> None:
        number, label, kind = (_number(found, key) for key in (3, 4, 5))
        name, type_name = _text(found, 1), _described_type(found)
        types: tuple[str, ...] = (type_name,)
        is_optional = bool(_number(found, 17))  # proto3_optional, with a oneof for this field alone
        oneof = oneofs[_number(found, 9)] if found.get(9) and not is_optional else ""
        word = _TYPES[kind]
        is_group = word == "group"
        if is_group:
            self._later.append(lambda: self._mark_group(type_name[1:]))
        if label == _REPEATED:
            word = "map" if type_name in self._entries else "repeated"
            types = self._entries.get(type_name, types)
        made = Field(number, word, not self._proto3 or is_optional or bool(oneof), oneof)
        self._later.append(lambda: self._add(message, name, made, types, is_group=is_group))

    def _import(self, name: str, *, public: bool) -> None:
        """Register the types of a file."""
        types = self._files.get(name, {})
        for full, found in types.items():
            if self.named.setdefault(full, found) is not found:
                self._refuse(f"has two types with the name {full[:64]}")
        if public:
            self.exported.update(types)

    def _mark_group(self, name: str) -> None:
        found = self.named.get(name)
        if found is not None:
            found.is_group = True

    def _enter(self, package: str) -> None:
        if self._known and f"{package}.".startswith("google.protobuf."):
            self._refuse("has the package google.protobuf, whose types are known")
        if len(package) > _MOST_NAME_CHARS:
            self._refuse(f"has a name with more than {_MOST_NAME_CHARS:,} characters")
        self._package = package

    def _syntax(self) -> None:
        self._expect("=")
        syntax = self._take("string")[1:-1]
        if syntax not in {"proto2", "proto3"}:
            self._refuse("has a syntax other than proto2 and proto3")
        self._proto3 = syntax == "proto3"
        self._expect(";")

    def _defines(self, word: str, scope: str, nested: list[Message | None], depth: int) -> bool:
        """Parse a statement allowed in files and messages. Return False if ``word`` begins any other statement."""
        match word:
            case "message":
                made = Message(_join(scope, self._take("name")))
                nested.append(made)
                self._body(made, depth)
            case "enum":
                self._define(_join(scope, self._take("name")), None)
                self._skip_block()
            case "extend":  # extension fields stay unknown, but a group among them is a type
                self._type_name()
                self._fields(Message(scope, nested=nested), depth, "")
            case "option":
                self._skip_statement()
            case ";":
                pass
            case _:
                return False
        return True

    def _body(self, message: Message, depth: int) -> None:
        if depth > MAX_DEPTH:
            self._refuse(f"is nested more than {MAX_DEPTH} levels deep")
        self._define(message.name, message)
        self._expect("{")
        while (word := self._take()) != "}":
            if self._defines(word, message.name, message.nested, depth + 1):
                continue
            match word:
                case "extensions" | "reserved":
                    self._skip_statement()
                case "oneof":
                    self._fields(message, depth, self._take("name"))
                case _:
                    self._field(word, message, depth, "")

    def _fields(self, message: Message, depth: int, oneof: str) -> None:
        self._expect("{")
        while (word := self._take()) != "}":
            match word:
                case "option":
                    self._skip_statement()
                case ";":
                    pass
                case _:
                    self._field(word, message, depth, oneof)

    def _field(self, word: str, message: Message, depth: int, oneof: str) -> None:
        label = word if word in {"optional", "required", "repeated"} else ""
        if label:
            word = self._take()
        is_group = word == "group"
        types: list[str] = []
        if word == "map" and self._word == "<":
            for mark in ("<", ","):
                self._expect(mark)
                types.append(self._type_name())
            self._expect(">")
            name, kind = self._take("name"), "map"
            message.nested.append(None)
        else:
            self._at -= not is_group
            types.append(self._type_name())
            name = types[0].lower() if is_group else self._take("name")
            kind = "repeated" if label == "repeated" else "group" if is_group else ""
        self._expect("=")
        number = self._field_number()
        if self._word == "[":
            self._skip_block()
        if is_group:
            made = Message(_join(message.name, types[0]), is_group=True)
            message.nested.append(made)
            self._body(made, depth + 1)
        else:
            self._expect(";")
        presence = not self._proto3 or label == "optional" or bool(oneof)
        found = Field(number, kind, presence, oneof)
        self._later.append(lambda: self._add(message, name, found, types, is_group=is_group))

    def _add(self, message: Message, name: str, made: Field, types: Sequence[str], *, is_group: bool) -> None:
        if not name or not 0 < made.number <= _MOST_NUMBER:
            self._refuse(f"has a field without a name, or whose number is not 1 to {_MOST_NUMBER:,}")
        if name in message.fields or (id(message), made.number) in self._numbers:
            self._refuse(f"has two fields with the name or the number of {message.name}.{name}")
        self._numbers.add((id(message), made.number))
        if made.kind == "map":
            message.fields[name] = replace(made, item=self._entry(made.number, types, message.name))
            return
        single = self._single(made, types[0], message.name, is_group=is_group)
        if made.kind == "repeated":
            single = replace(made, item=replace(single, has_presence=True))
        message.fields[name] = single

    def _single(self, made: Field, type_name: str, scope: str, *, is_group: bool = False) -> Field:
        """Return a field with the given type, which is not repeated."""
        if type_name in SCALARS and not is_group:
            return replace(made, kind=type_name)
        found = self._find(type_name, scope)
        if found is None:
            return replace(made, kind="enum")
        message = replace(made, kind="message", has_presence=True, message=found)
        return replace(made, kind="group", item=message) if is_group else message

    def _entry(self, number: int, types: Sequence[str], scope: str) -> Field | None:
        if types[0] not in _KEYS:
            return None
        try:
            key, value = (
                self._single(Field(at, "", has_presence=True), each, scope) for at, each in enumerate(types, 1)
            )
        except SchemaRefused:
            return None
        return Field(number, "message", has_presence=True, message=Message("", {"key": key, "value": value}))

    def _find(self, name: str, scope: str) -> Message | None:
        """Return the message with the given name, or None if the name belongs to an enum."""
        while not name.startswith("."):
            full = _join(scope, name)
            if full in self.named:
                return self.named[full]
            if not scope:
                break
            scope = scope.rpartition(".")[0]
        if name[1:] in self.named and name.startswith("."):
            return self.named[name[1:]]
        why = "nor does a file that it both imports and refers to" if self._files else _IMPORTABLE
        return self._refuse(f"uses a type that it does not define: {name[:64]} ({why})")

    def _define(self, name: str, made: Message | None) -> None:
        if name in self.named:
            self._refuse(f"defines {name[:64]} twice")
        if len(name) > _MOST_NAME_CHARS or name[-1:] in {"", "."}:
            self._refuse(f"has a type without a name, or with more than {_MOST_NAME_CHARS:,} characters")
        self.named[name] = self.exported[name] = made

    @property
    def _kind(self) -> str:
        return self._tokens[self._at][0]

    @property
    def _word(self) -> str:
        return self._tokens[self._at][1]

    def _take(self, kind: str = "") -> str:
        found, word, _ = self._tokens[self._at]
        if found == "end" or (kind and found != kind):
            self._refuse(f"is not .proto text: a {kind or 'word'} is missing")
        self._at += 1
        return word

    def _expect(self, mark: str) -> None:
        if self._word != mark:
            self._refuse(f'is not .proto text: "{mark}" is missing')
        self._at += 1

    def _type_name(self) -> str:
        name = "." if self._word == "." else ""
        self._at += len(name)
        name += self._take("name")
        while self._word == ".":
            self._at += 1
            name += "." + self._take("name")
        return name

    def _field_number(self) -> int:
        word = self._take("number")[:12]
        with suppress(ValueError):
            return int(word, 8 if word.isdigit() and word.startswith("0") else 0)
        return 0  # `_add` refuses a field with this number

    def _skip_statement(self) -> None:
        while self._word != ";":
            if self._word in _CLOSING:
                self._skip_block()
            elif self._kind == "mark" and self._word in _CLOSING.values():
                self._refuse("is not .proto text: brackets do not match")
            else:
                self._take()
        self._at += 1

    def _skip_block(self) -> None:
        """Skip an opening bracket, its closing bracket, and everything between them."""
        due: list[str] = []
        while True:
            word = self._word if self._kind == "mark" else ""
            self._take()
            if word in _CLOSING:
                due.append(_CLOSING[word])
            elif not due or (word in _CLOSING.values() and word != due.pop()):
                self._at -= 1
                self._refuse("is not .proto text: brackets do not match")
            if not due:
                return

    def _refuse(self, text: str) -> NoReturn:
        raise SchemaRefused(f"{text} (line {self._tokens[self._at][2]})")


_Fields = dict[int, list[int | bytes]]


def _fields(data: bytes) -> _Fields:
    """Return an encoded message's values by field number. Raises ValueError or LookupError for a damaged message."""
    found: _Fields = {}
    at = 0

    def varint() -> int:
        nonlocal at
        number = 0
        for shift in range(0, 70, 7):
            number |= (data[at] & 0x7F) << shift
            at += 1
            if data[at - 1] <= 0x7F:  # noqa: PLR2004 - the last byte of a number
                return number
        raise ValueError(at)

    while at < len(data):
        tag = varint()
        value: int | bytes = varint() if tag & 7 in {0, 2} else 0
        size = {0: 0, 1: 8, 2: value, 5: 4}[tag & 7]
        if not isinstance(size, int) or size > len(data) - at:
            raise ValueError(tag)
        found.setdefault(tag >> 3, []).append(data[at : at + size] if tag & 7 == 2 else value)  # noqa: PLR2004 - bytes
        at += size
    return found


def _each(found: _Fields, number: int) -> list[_Fields]:
    return [_fields(each) for each in found.get(number, ()) if isinstance(each, bytes)]


def _texts(found: _Fields, number: int) -> list[str]:
    return [each.decode() for each in found.get(number, ()) if isinstance(each, bytes)]


def _text(found: _Fields, number: int) -> str:
    return (_texts(found, number) or [""])[-1]


def _described_type(found: _Fields) -> str:
    """Return the type of an encoded FieldDescriptorProto: a scalar type, or the full name of a type after a dot."""
    return _text(found, 6) or _TYPES[_number(found, 5)]


def _number(found: _Fields, number: int) -> int:
    numbers = [each for each in found.get(number, ()) if isinstance(each, int)]
    return numbers[-1] if numbers else 0


def _tokens(text: str) -> Iterator[tuple[str, str, int]]:
    at, line = 0, 1
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise SchemaRefused(f"is not .proto text (line {line})")
        if found.lastgroup != "blank":
            yield found.lastgroup or "", found[0], line
        line += found[0].count("\n")
        at = found.end()


def _join(scope: str, name: str) -> str:
    return f"{scope}.{name}" if scope else name
