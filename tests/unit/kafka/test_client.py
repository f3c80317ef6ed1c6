"""What an error code in a response to a read means for the worker."""

from types import SimpleNamespace

import pytest

from dedup.errors import BrokerUnavailable, StateIncompatible
from dedup.kafka.client import KafkaWire
from dedup.kafka.wire import LEADER_MOVED, NoAnswer, TopicPartition

PLACE = TopicPartition("t.changelog", 0)


@pytest.mark.parametrize(
    ("codes", "kind"),
    [
        (sorted(LEADER_MOVED), NoAnswer),
        # An unknown error of the broker, and a timeout: the same request may succeed later.
        ([-1, 7], NoAnswer),
        ([29], BrokerUnavailable),
        ([1, 2], StateIncompatible),
    ],
)
def test_an_error_code_of_a_read(codes, kind):
    wire = KafkaWire.__new__(KafkaWire)
    wire._client = SimpleNamespace(force_metadata_update=lambda: None)
    for code in codes:
        error = wire._read_failed(PLACE, code, 5)
        assert type(error) is kind, code
        assert "t.changelog/0" in str(error)
