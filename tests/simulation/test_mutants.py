"""Every mutant breaks one rule of design page 1, and some schedule must show it; the correct worker passes them all."""

import re

import pytest

from tests.simulation import scenarios as of
from tests.simulation.explore import enumerate_all, sample
from tests.simulation.variants import MUTANTS, Variant

SHOWN_BY = {
    "store before commit": of.CRASHES,
    "position before keys": of.CRASHES,
    "one position for all segments": of.CRASHES,
    "id per process": of.ZOMBIE,
    "restore before init": of.ZOMBIE_LIVES,
    "committed offset read before init": of.ZOMBIE,
    "start at the committed offset alone": of.STALE_OFFSETS,
    "refused sends ignored": of.REFUSED,
    "a refusal forgotten while others are waited for": of.REFUSED,
    "offsets committed past a refused record": of.REFUSED,
    "a zombie's refused batch judged again on old state": of.ZOMBIE_REFUSED,
    "a refused record of a stateless zombie judged again": of.TWO_HOPS_REFUSED,
    "topics never looked at again": of.CHANGED,
    "topics looked at when a task starts alone": of.CHANGED,
    "the changelog read by its name": of.CHANGED,
    "overlay removed at capture": of.REORDERED,
    "restore to the last stable offset": of.SEEDER,
    "stream time kept outside the changelog": of.STREAM_TIME,
    "feeds that were added forgotten by a restart": of.ADDED,
    "feeds that were added wait for their first record": of.ADDED,
    "expiry by an unapplied stream time": of.EXPIRY,
    "EndTxn sent twice in an epoch": of.DELAYED_ANNOUNCED,
    "no answer to EndTxn is a success": of.ANSWERS_ANNOUNCED,
    "a damaged block read as the end": of.DAMAGED,
    "future by the wall clock alone": of.CLOCKS,
    "state of other partition counts taken over": of.GROWTH,
    "sequence numbers kept over an epoch": of.REFUSED,
    "a transaction aborted in its own epoch": of.DELAYED_UNVERIFIED,
    "a batch put off counts as appended": of.PUT_OFF,
    "batches that wait left out of the commit": of.ANSWERS_HELD,
    "tasks of a group captured one by one": of.GROUP_REORDERED,
    "the offset of a group's first task alone committed": of.IN_GROUP,
    "a failed task closed while its group commits": of.GROUP_DAMAGED,
    "a refused row looked for in the first task": of.GROUP_REFUSED,
    "the layout read before the fence": of.GROUP_SPLIT,
    "the layout read at a start alone": of.GROUP_SPLIT_REFUSED,
    "the layout never read": of.GROUP_SPLIT,
    "the old layout's ids not fenced by a change": of.GROUP_SPLIT,
    "only the first task asked whether it was overtaken": of.GROUP_ZOMBIE_REFUSED,
}
MOST = 10_000
"""Schedules; the mutant that hides best is wrong in one of 715."""


@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_is_caught(mutant: Variant) -> None:
    # By seeds: they spread over all schedules, and find in seconds what an enumeration finds after a minute.
    tally = sample(SHOWN_BY[mutant.name], mutant, range(MOST), until_wrong=True)
    print(tally)  # noqa: T201  # shown with -s
    assert tally.wrong, f"no schedule of {SHOWN_BY[mutant.name].name!r} shows that {mutant.name!r} is wrong: {tally}"
    # A mutant that crashes by itself shows nothing about its rule.
    assert not re.search(r"\b(Attribute|Type|Name|Key|Import)Error\b", tally.first), tally.first


@pytest.mark.long
@pytest.mark.timeout(3_600)
def test_how_many_schedules_each_mutant_spoils() -> None:
    for mutant in MUTANTS:
        tally = enumerate_all(SHOWN_BY[mutant.name], mutant, most=3_000)
        print(tally)  # noqa: T201  # shown with -s
        assert tally.wrong
