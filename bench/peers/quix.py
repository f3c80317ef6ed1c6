"""The measured job on Quix Streams, exactly-once, RocksDB state with its changelog topic.

Keys and values stay bytes and the state is asked by the record's key, which is the event's ID: no JSON is parsed, and
IDs never expire. Both are to this peer's advantage.

Usage: quix.py BROKER SOURCE OUTPUT GROUP STATE_DIR COMPRESSION COMMIT_INTERVAL_MS
"""

from __future__ import annotations

import sys

from quixstreams import Application, State  # type: ignore[import-not-found]  # it lives in an environment of its own

GUARD_MS = 3_600_000


def first_of_its_id(_value: bytes, _key: bytes, timestamp: int, _headers: object, state: State) -> bool:
    """Return whether no event of the guard period before had this ID; it is remembered then."""
    seen = state.get("seen")
    if seen is not None and abs(timestamp - seen) <= GUARD_MS:
        return False
    state.set("seen", timestamp)
    return True


def main() -> None:
    """Run until a signal comes."""
    broker, source, output, group, state_dir, compression, commit_ms = sys.argv[1:]
    app = Application(
        broker_address=broker,
        consumer_group=group,
        auto_offset_reset="earliest",
        commit_interval=int(commit_ms) / 1000,
        state_dir=state_dir,
        processing_guarantee="exactly-once",
        consumer_extra_config={"fetch.queue.backoff.ms": 5},
        producer_extra_config={"compression.type": compression, "linger.ms": 20},
        loglevel="WARNING",
    )
    events = app.dataframe(app.topic(source, key_deserializer="bytes", value_deserializer="bytes"))
    unique = events.filter(first_of_its_id, metadata=True, stateful=True)
    unique.to_topic(app.topic(output, key_serializer="bytes", value_serializer="bytes"))
    app.run()


if __name__ == "__main__":
    main()
