"""CSV values: what is one row, what is a missing cell, and one verdict for each way to be no row."""

import tracemalloc

import pytest

from dedup.core.csv_row import CsvLayout, CsvReader
from dedup.core.event_time import FieldTime
from dedup.core.exact_json import Unreadable
from dedup.core.extract import Recipe
from dedup.core.extract_one import One
from dedup.core.odd_rows import NotInColumns
from dedup.core.tracking_id import (
    FieldRule,
    FieldsRule,
    FirstOfRule,
    KeyRule,
    Part,
    PartsRule,
    RawContentRule,
    TrackingId,
)
from tests.extraction import FEW, everywhere, slow_rows

ROW = CsvLayout(("id", "at", "x"))


def recipe(*names, layout=ROW, **options):
    rule = FieldsRule(tuple((name,) for name in names)) if len(names) > 1 else FieldRule((names[0],))
    return Recipe(TrackingId(rule), fmt="csv", schema=layout, **options)


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
@pytest.mark.parametrize(
    ("row", "cells"),
    [
        (b"a,b,c", "abc"),
        (b'"a","b","c"', "abc"),
        (b'a,"b",c', "abc"),
        (b'"a,""b""",b,c', ['a,"b"', "b", "c"]),
        (b'"a\nb\r\n",b,c', ["a\nb\r\n", "b", "c"]),
        (b'"""",b,c', ['"', "b", "c"]),
        (b" a ,b,c", [" a ", "b", "c"]),
        (b"7,-1.50,true", ["7", "-1.50", "true"]),
        ("é,b,c".encode(), "ébc"),
    ],
)
def test_all_cells_are_text(row, cells, end):
    found = everywhere(recipe("id", "at", "x"), row + end)
    parts = [b"\1" + cell.encode() for cell in cells]
    assert found.id == b"\x09" + b"".join(bytes([len(part)]) + part for part in parts)


def test_a_uuid_is_a_uuid():
    value = b"0b1c2d3e-4f50-6172-8394-a5b6c7d8e9f0,,"
    assert everywhere(recipe("id"), value).id.hex() == "030b1c2d3e4f5061728394a5b6c7d8e9f0"


@pytest.mark.parametrize("row", [b",b,c", b'"",b,c', b",,", b",,\r\n"])
def test_an_empty_cell_is_missing(row):
    assert everywhere(recipe("id"), row).code == "id_missing"
    assert everywhere(recipe("id", layout=CsvLayout(("id",))), b"").code == "id_missing"
    assert everywhere(recipe("x", event_time=FieldTime(("id",), "ms")), b",b,c").code == "time_missing"
    parts = PartsRule((Part(FieldRule(("id",)), True), Part(KeyRule())))
    assert everywhere(Recipe(TrackingId(parts), fmt="csv", schema=ROW), row).id == b"\x09\1\x0c\2\2k"
    rule = FirstOfRule((FieldRule(("id",)), KeyRule()))
    assert everywhere(Recipe(TrackingId(rule), fmt="csv", schema=ROW), row).id == b"\x0d\1\2k"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"", "it has 1 cell, and `source.columns` has 3"),
        (b"\n", "it has 1 cell, and `source.columns` has 3"),
        (b"a,b", "it has 2 cells, and `source.columns` has 3"),
        (b"a,b,c,", "it has 4 cells, and `source.columns` has 3"),
        (b'"a","b"', "it has 2 cells, and `source.columns` has 3"),
        (b'"a"', "it has 1 cell, and `source.columns` has 3"),
        (b'a,b,c,"d",e', "it has more than 3 cells, and `source.columns` has 3"),
        (b'a,b,c,"d', "it has more than 3 cells, and `source.columns` has 3"),
        (b"a,b,c\nd,e,f", "a line break that is not in quotes is inside of it"),
        (b"a,b,c\n\n", "a line break that is not in quotes is inside of it"),
        (b"a,b\r,c", "a line break that is not in quotes is inside of it"),
        (b"a,b,c\r", "a line break that is not in quotes is inside of it"),
        (b'a,b,"c', "a quote or a line break is in the wrong place (character 4 of 6)"),
        (b'a,b,c"d"', "a quote or a line break is in the wrong place (character 5 of 8)"),
        (b'a,b,"c"d', "a quote or a line break is in the wrong place (character 7 of 8)"),
        (b'a,b,"c"\nd,e,f', "a quote or a line break is in the wrong place (character 7 of 13)"),
        (b'a,b,"c" ', "a quote or a line break is in the wrong place (character 7 of 8)"),
    ],
)
@pytest.mark.parametrize("rule", ["id", "key"])
def test_a_value_that_is_not_one_row_is_a_dead_letter(value, said, rule):
    one = recipe("id") if rule == "id" else Recipe(TrackingId(KeyRule()), fmt="csv", schema=ROW)
    found = everywhere(one, value)
    assert (found.kind.value, found.code, found.detail) == ("unreadable", "not_csv", f"the value is not CSV: {said}")


@pytest.mark.parametrize(
    ("value", "code", "name"),
    [
        (b'{"id":"a"}', "not_csv", "json"),
        (b"\xef\xbb\xbfa,b,c", "not_csv", "utf_8_bom"),
        (b"\xff\xfea\0", "not_utf8", "utf_16"),
        (b"a,\xff,c", "not_utf8", ""),
    ],
)
def test_a_value_of_another_format_is_recognized(value, code, name):
    found = everywhere(recipe("id"), value)
    assert (found.code, found.format_name) == (code, name)


@pytest.mark.parametrize(
    ("cell", "unit", "time"),
    [
        ("2026-01-31T08:00:00Z", "rfc3339", 1769846400000),
        ("1769846400000", "ms", 1769846400000),
        ("-1", "s", -1000),
        ("1.5", "s", 1500),
        ("15e2", "ms", 1500),
        ("1999", "us", 1),
        ("9223372036854775807", "ms", 9223372036854775807),
        ("9223372036854775808", "ms", "time_out_of_range"),
        ("1" * 5_000, "ms", "time_out_of_range"),
        ("1769846400000", "rfc3339", "time_unparsable"),
        ("2026-01-31T08:00:00Z", "ms", "time_ill_typed"),
        (" 1", "ms", "time_ill_typed"),
        ("01", "ms", "time_ill_typed"),
        ("NaN", "s", "time_ill_typed"),
        ("\uff11", "s", "time_ill_typed"),
        ("", "ms", "time_missing"),
    ],
)
def test_a_time(cell, unit, time):
    found = everywhere(recipe("id", event_time=FieldTime(("at",), unit)), f"a,{cell},c".encode())
    assert (found.time_ms if isinstance(found, One) else found.code) == time


@pytest.mark.parametrize(("delimiter", "between"), [("comma", ","), ("semicolon", ";"), ("tab", "\t"), ("pipe", "|")])
def test_delimiters(delimiter, between):
    layout = CsvLayout(("id", "x"), delimiter)
    others = "".join({",", ";", "\t", "|"} - {between})
    value = f'"{between}",{others}'.replace(",", between, 1) if between != "," else f'"{between}",{others}'
    cells = layout.cells(value)
    assert cells == [between, others]


def test_a_cell_may_be_long():
    value = b'"' + b'""' * 300_000 + b'",b,' + b"c" * 300_000
    assert everywhere(recipe("x"), value).id[:1] == b"\0"


def test_payloads_are_compared_as_bytes():
    one = recipe("id", fingerprint=True)
    assert everywhere(one, b"a,b,c").id == everywhere(one, b'"a",b,c').id
    assert everywhere(one, b"a,b,c").fingerprint != everywhere(one, b'"a",b,c').fingerprint


@pytest.mark.parametrize(
    "odd", [b",1,x", b'"a",1,x', b"a,1,x\n", b"a,1,x\r\n", b"a,b,c", b"a,1", b"\xff", b"\xef\xbb\xbfa,1,x"]
)
def test_one_unusual_row_slows_down_only_a_few(odd):
    one = recipe("id", event_time=FieldTime(("at",), "ms"), fingerprint=True)
    assert slow_rows(one, b"a,1,x", odd) <= FEW


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_rows_with_equal_ends_are_read_in_columns(end):
    assert slow_rows(recipe("id", fingerprint=True), b"a,1,x" + end, b"b,2,y" + end) == 0
    content = Recipe(TrackingId(RawContentRule()), fmt="csv", schema=ROW, fingerprint=True)
    assert slow_rows(content, b"a,1,x" + end, b"b,2,y" + end) == 0


@pytest.mark.parametrize("row", [b"a," * 1_000_000, b'"",' * 1_000_000], ids=["plain", "quoted"])
def test_a_row_with_too_many_cells_is_refused_before_they_are_split(row):
    reader = CsvReader(ROW, (("id",),), None)
    tracemalloc.start()
    with pytest.raises(Unreadable, match=r"cells, and `source\.columns` has 3"):
        reader.read(row)
    with pytest.raises(NotInColumns):
        reader.columns([row] * 2)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 10 * len(row)
