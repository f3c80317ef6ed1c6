"""The progress line of a running worker."""

import io

from rich.console import Console, Group

from dedup.cli.run import restore_bar
from dedup.metrics import TaskNumbers


def drawn(numbers):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(Group(*restore_bar(numbers)))
    return console.export_text()


def test_no_bar_without_a_restore():
    assert restore_bar([TaskNumbers(), TaskNumbers(restore_total=10)]) == []


def test_a_bar_over_the_restores_under_way():
    numbers = [TaskNumbers(restore_total=1000, restore_remaining=250), TaskNumbers(restore_total=50)]
    text = drawn(numbers)
    assert "restoring 1 tasks, 250 of 1,000 changelog offsets to go" in text
    assert text.count("━") > 50
