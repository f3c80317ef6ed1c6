"""Rows of CSV as Python's csv module writes and reads them."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dedup.core.csv_row import CsvLayout, CsvReader, Delimiter
from dedup.core.event_time import FieldTime
from dedup.core.exact_json import Unreadable
from dedup.core.member_reader import Damaged
from dedup.core.odd_rows import NotInColumns

BETWEEN: dict[Delimiter, str] = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}
DELIMITERS = st.sampled_from(list(BETWEEN.items()))
CELL = st.text(st.sampled_from('a"\n\r,;\t| é') | st.characters(codec="utf-8"), max_size=8)


@given(
    st.lists(CELL, min_size=1, max_size=5),
    DELIMITERS,
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    st.sampled_from(["", "\n", "\r\n"]),
)
def test_a_row_that_csv_writes_is_read(cells, delimiter, quoting, end):
    name, between = delimiter
    row = io.StringIO()
    csv.writer(row, delimiter=between, quoting=quoting).writerow(cells)
    layout = CsvLayout(tuple(map(str, range(len(cells)))), name)
    assert layout.cells(row.getvalue().removesuffix("\r\n") + end) == cells


@given(st.text(st.sampled_from('ab"",\n\r'), max_size=12), st.integers(1, 4))
def test_a_row_that_is_read_is_what_csv_reads(text, columns):
    try:
        cells = CsvLayout(tuple(map(str, range(columns)))).cells(text)
    except Damaged:
        return
    read = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    # For csv, a line without characters is no row; here it is a row of one cell, which is missing.
    assert read == ([cells] if text.strip("\r\n") else [[]] * bool(text))


VALUES = st.lists(st.sampled_from(["a", "7", "", "é", "\ufeffa", "1.5"]), min_size=3, max_size=3).map(
    lambda cells: ",".join(cells).encode()
) | st.binary(max_size=6)


@given(st.lists(VALUES, min_size=1, max_size=5), st.sampled_from([None, "ms", "rfc3339"]))
def test_columns_are_what_is_read_one_by_one(values, unit):
    layout = CsvLayout(("a", "b", "c"))
    reader = CsvReader(layout, [("c",), ("a",)], None if unit is None else FieldTime(("b",), unit))
    rows = [one_by_one(reader, value) for value in values]
    refused = {row for row, found in enumerate(rows) if found is None}
    if refused:
        with pytest.raises(NotInColumns) as caught:
            reader.columns(values)
        assert caught.value.rows
        assert set(caught.value.rows) <= refused
    else:
        assert reader.columns(values) == [list(column) for column in zip(*rows, strict=True)]


def one_by_one(reader, value):
    try:
        return reader.read(value)
    except Unreadable:
        return None
