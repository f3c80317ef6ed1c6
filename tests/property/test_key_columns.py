"""A member of the key has the ID that a member of the value in that format has, one by one and in columns."""

import random

import pytest

from dedup.core.extract import Recipe
from dedup.core.extract_one import One
from dedup.core.key_members import KeyFormat
from dedup.core.tracking_id import (
    FieldRule,
    FirstOfRule,
    HeaderRule,
    KeyFieldRule,
    KeyRule,
    Part,
    PartsRule,
    TrackingId,
)
from tests.fuzz.records import mutated
from tests.property.extract_cases import EVENTS, framed
from tests.property.key_cases import FORMATS, PATHS, RULES, as_key, both, index, known, recipes, sent


@pytest.mark.parametrize("form", ["prefix", "header"])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rule", RULES, ids=["member", "parts", "first of"])
def test_a_member_of_the_key_has_the_id_of_a_member_of_the_value(fmt, form, rule):
    times = 2 if len(FORMATS[fmt]) > 20 else 3
    events = [event for event in FORMATS[fmt] * times for _ in range(times)]
    for path in PATHS:
        for steps in ((), ("trim", "lower", "instant")):
            of_values, of_keys = recipes(fmt, rule, path, steps)
            pairs = [sent(fmt, event, form) for event in events]
            column = [payload for payload, _ in pairs]
            headers = [[("h", b"x"), *own] for _, own in pairs]
            nothing = [None] * len(column)
            expected = both(of_values, nothing, column, headers)
            found = both(of_keys, column, nothing, list(map(as_key, headers)))
            for own, one in zip(found, expected, strict=True):
                if isinstance(one, One):
                    assert own == one
                else:
                    assert (own.kind, own.code) == (one.kind, one.code)
                    assert "key" in own.detail or own.code == "id_missing"
                    assert "the value" not in own.detail
                    assert own.format_name == ""


@pytest.mark.parametrize("fmt", FORMATS)
def test_damaged_keys_and_values_side_by_side(fmt):
    """Keys and values are damaged apart from each other; some schemas are unknown, some cannot be read."""
    dice = random.Random(fmt)
    for other in (None, "no schema"):
        book = known(fmt, other=other)
        for rule in (
            KeyFieldRule(("id",)),
            PartsRule((Part(KeyFieldRule(("id",)), True), Part(FieldRule(("id",)), True), Part(KeyRule(), True))),
            FirstOfRule((FieldRule(("id",)), KeyFieldRule(("a", "id")), HeaderRule("h"), KeyFieldRule(("t",)))),
        ):
            recipe = Recipe(TrackingId(rule), fingerprint=True, keys=KeyFormat(fmt, book))
            for _ in range(6):
                spoilt = dice.choice([0, 0.1])
                made = [one_of(fmt, dice, spoilt) for _ in range(40)]
                values = [dice.choice(EVENTS[:6]) if dice.random() > spoilt else mutated(dice, EVENTS) for _ in made]
                values = [None if dice.random() < spoilt else value for value in values]
                both(recipe, [key for key, _ in made], values, [own for _, own in made])


def one_of(fmt, dice, spoilt):
    payload = mutated(dice, FORMATS[fmt]) if dice.random() < spoilt else dice.choice(FORMATS[fmt][:4])
    if dice.random() < spoilt:
        return None, []
    if fmt not in {"json_schema", "avro", "protobuf"}:
        return payload, []
    key, headers = framed(index(fmt) + payload, dice, spoilt)
    if headers:
        key = payload
        headers = [(name, content and content + index(fmt)) for name, content in headers]
    return key, as_key(headers)
