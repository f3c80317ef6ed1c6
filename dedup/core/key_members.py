"""Reads the members of records' keys that are part of the tracking ID.

A key is read like a value of the same format. The members are read one record at a time, or as columns of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dedup.core import exact_json
from dedup.core.avro import Leaf
from dedup.core.exact_json import Absent, JsonValue, Unreadable, look_up
from dedup.core.formats import Format, Reader, reader_of
from dedup.core.framing import KEY_HEADER, SchemaBook, SchemaRef, payload_of, payloads_of, refs_of, rows_by_ref, split
from dedup.core.json_columns import compile_columns
from dedup.core.odd_rows import NotInColumns, Pieces, at_rows, in_order, of_other_types, ordered
from dedup.core.tracking_id import Path

_Headers = Sequence[tuple[str, bytes | None]]


@dataclass(frozen=True, slots=True)
class KeyFormat:
    """The format of records' keys. A framed key's schema ID is in the header or, without a header, before the key."""

    fmt: Format
    """Any format except csv and bytes."""
    schemas: SchemaBook | None = None
    """For Avro and Protobuf, the schemas that the framings of keys refer to."""

    @property
    def indexed(self) -> bool:
        """True if message indexes follow the schema ID."""
        return self.fmt == "protobuf"

    def reader(self, ref: SchemaRef, paths: tuple[Path, ...], *, zeros: bool) -> Reader:
        """Return the reader for keys with a given schema ID.

        Raises Unreadable, about a value, if the schema is unknown or unusable.
        """
        return reader_of(self.fmt, "" if self.schemas is None else self.schemas, ref, paths, None, zeros=zeros)


def read_key(
    keys: KeyFormat, paths: tuple[Path, ...], key: bytes, headers: _Headers, *, zeros: bool
) -> Sequence[JsonValue | Absent | Leaf]:
    """Return the members of a key at the paths. Raises Unreadable if the key cannot be read."""
    try:
        if keys.fmt in {"json", "json_schema"}:
            framed = keys.fmt == "json_schema"
            content = exact_json.decode(payload_of("auto", key, headers, header=KEY_HEADER) if framed else key)
            return [look_up(content, path) for path in paths]
        ref, payload = (b"", key)
        if keys.schemas is not None:
            ref, payload = split("auto", key, headers, indexed=keys.indexed, header=KEY_HEADER)
        return keys.reader(ref, paths, zeros=zeros).read(payload)
    except Unreadable as refused:
        # The readers word faults as faults of values. `format_name` is also about the format of values.
        detail = refused.detail.replace("the value's", "the key's").replace("the value", "the record's key")
        if detail == refused.detail and KEY_HEADER not in detail:
            detail = f"in the record's key, {detail}"
        raise Unreadable(refused.code, detail) from None


class KeyColumns:
    """Reads the members of keys at given paths as columns, with the same result as `read_key` for every row."""

    def __init__(self, keys: KeyFormat, paths: tuple[Path, ...], *, zeros: bool) -> None:
        self._keys: Final = keys
        self._paths: Final = paths
        self._zeros: Final = zeros
        self._is_json: Final = keys.fmt in {"json", "json_schema"}
        self._json: Final = compile_columns(paths, None) if self._is_json else None
        self.columnar: Final = self._json is not None or not self._is_json
        """False if keys can be read only one by one."""

    def __call__(self, keys: Sequence[bytes | None], headers: Sequence[_Headers]) -> list[list[str | int]]:
        """Return one column per path. Raises NotInColumns with rows that have types other than string and integer."""
        payloads, refs = list(keys), [b""] * len(keys)
        if self._keys.fmt == "json_schema" or self._keys.schemas is not None:
            indexed = self._keys.indexed
            payloads = payloads_of("auto", keys, headers, indexed=indexed, header=KEY_HEADER)
            if self._keys.schemas is not None:
                refs = refs_of("auto", keys, headers, indexed=indexed, header=KEY_HEADER)  # type: ignore[assignment]
        there = [payload for payload in payloads if payload is not None]
        if len(there) < len(payloads):
            raise NotInColumns([row for row, payload in enumerate(payloads) if payload is None])
        if self._is_json:
            if self._json is None:
                raise NotInColumns(range(len(there)))
            return self._json.decode(there)[0]
        groups = rows_by_ref(refs)
        pieces: Pieces[list[list[str | int]]] = []
        odd: list[int] = []
        for rows in groups:
            try:
                pieces.append((rows, self._typed(refs[rows[0]], at_rows(rows, there))))
            except NotInColumns as refused:
                odd += [rows[at] for at in refused.rows] or rows
        if odd:
            raise NotInColumns(sorted(odd))
        if len(pieces) == 1:
            return pieces[0][1]
        places = in_order(len(there), pieces)
        return [ordered(places, parts, 0) for parts in zip(*(columns for _, columns in pieces), strict=True)]

    def _typed(self, ref: SchemaRef, payloads: Sequence[bytes]) -> list[list[str | int]]:
        """Return the columns of keys with one schema."""
        try:
            reader = self._keys.reader(ref, self._paths, zeros=self._zeros)
        except Unreadable:
            raise NotInColumns(range(len(payloads))) from None
        if not reader.columnar:
            raise NotInColumns(range(len(payloads)))
        columns = reader.columns(payloads)
        odd = set[int]().union(*(of_other_types(column, {str, int}) for column in columns))
        if odd:
            raise NotInColumns(sorted(odd))
        return columns  # type: ignore[return-value]  # strings and integers only
