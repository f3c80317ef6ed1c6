"""A topology whose `extend` was switched off judges on the sightings that extension has left."""

import random
from dataclasses import replace

from dedup.core.fold import Rules
from dedup.core.reference_model import ModelRecord, ModelRules, ReferenceModel
from dedup.core.window import Source, Window
from dedup.kafka.record_batch import FeedBatch
from dedup.worker.record_collector import Refusals
from tests.fuzz.test_records import TOPICS, judge_of, sent
from tests.property.extract_cases import RECIPES
from tests.simulation.direct import IN
from tests.simulation.scenario import CHANGELOG

GUARD_MS, GRACE_MS, MOST_MS = 10, 100, 70
ROWS, SWITCHED_AT, RUNS = 60, 40, 150


async def run(seed):
    """Return the kinds of verdicts after the switch; each is the model's."""
    dice = random.Random(seed)
    judge = await judge_of(RECIPES["id"], Rules(Window(GUARD_MS, GRACE_MS, extend=True, extend_at_most_ms=MOST_MS)))
    model = ReferenceModel(ModelRules(GUARD_MS, GRACE_MS, extend=True, extend_at_most_ms=MOST_MS))
    kinds = set()
    for offset in range(ROWS):
        if offset == SWITCHED_AT:
            judge.plan = replace(judge.plan, rules=Rules(Window(GUARD_MS, GRACE_MS)))
            model.rules = ModelRules(GUARD_MS, GRACE_MS)
        key = b"%d" % dice.randrange(2)
        # Before: close to each other, so that intervals grow. After: any time that still counts.
        time_ms = 1_000 + 5 * offset - dice.randrange(5 if offset < SWITCHED_AT else 160)
        batch = FeedBatch(IN, [offset], [time_ms], [key], [b'{"id":"%s"}' % key], [[]], offset)
        ((topic, _),) = sent(judge.judge(batch, Refusals())).values()
        verdict = model.judge(ModelRecord(key, time_ms, Source(0, 0, offset)))
        assert topic == TOPICS[verdict.kind], f"seed {seed}, offset {offset}: {topic}, not {verdict}"
        judge.freeze(offset + 1).apply({CHANGELOG: offset + 1})
        if offset >= SWITCHED_AT:
            kinds.add(verdict.kind)
    return kinds


async def test_the_rule_decides_on_what_extension_has_left():
    kinds = [await run(seed) for seed in range(RUNS)]
    assert set().union(*kinds) == {"unique", "duplicate", "late"}
