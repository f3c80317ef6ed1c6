"""Commits in the log of a Delta table, as text."""

import pytest

from dedup.spark.table_log import TableCommit, metadata_object


def test_only_a_line_feed_ends_an_action():
    """Was: a value with another line separator, which JSON need not escape, cut its line in two."""
    text = (
        '{"commitInfo":{"operation":"WRITE","userMetadata":"m"}}\n{"add":{"path":"a","stats":"\u2028x\u0085\u2029"}}\n'
    )
    commit = TableCommit(3, text)
    assert (commit.operation, commit.metadata) == ("WRITE", "m")
    assert [each["add"]["path"] for each in commit.actions() if "add" in each] == ["a"]


@pytest.mark.parametrize(
    "text", ["", '{"commitInfo":null}\n', '{"commitInfo":{"operationMetrics":null,"operationParameters":null}}']
)
def test_a_commit_of_another_writer_may_say_little(text):
    commit = TableCommit(0, text)
    assert (commit.metadata, commit.rows, commit.restored_to, metadata_object(commit.metadata)) == (None, 0, None, {})
    assert not commit.is_of("dedup", 1)


def test_the_number_of_an_append_is_its_applications_own():
    commit = TableCommit(1, '{"txn":null}\n{"txn":{"appId":"dedup","version":4}}\n')
    assert commit.is_of("dedup", 4)
    assert not commit.is_of("dedup", 5)
    assert not commit.is_of("other", 4)
