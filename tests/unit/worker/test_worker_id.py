"""The worker's ID that is kept in the state directory."""

import os

import pytest

from dedup.errors import StateIncompatible
from dedup.settings import WORKER_ID, Settings
from dedup.worker.worker import kept_worker_id


@pytest.fixture
def settings(tmp_path):
    return Settings(brokers=("127.0.0.1:1",), state_dir=tmp_path / "state")


def kept_in(settings):
    return settings.state_dir / "worker-id"


def test_an_id_is_made_once(settings):
    made = kept_worker_id(settings)
    assert WORKER_ID.fullmatch(made)
    assert kept_worker_id(settings) == made
    assert [path.name for path in settings.state_dir.iterdir()] == ["worker-id"]


@pytest.mark.parametrize("content", [b"", b"\n", b"two words\n", b"\x00\x00\x00", b"w\xff"])
def test_a_damaged_id_is_replaced(settings, content, caplog):
    """Was: a worker whose first start had found a full disk used an empty ID from then on, like all such workers."""
    settings.state_dir.mkdir()
    kept_in(settings).write_bytes(content)
    made = kept_worker_id(settings)
    assert WORKER_ID.fullmatch(made)
    assert kept_worker_id(settings) == made
    (line,) = caplog.messages
    assert f"this worker is {made} from now on" in line


def test_a_full_disk_leaves_no_half_written_id(settings, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StateIncompatible, match="No space left on device"):
            kept_worker_id(settings)
    assert list(settings.state_dir.iterdir()) == []
    assert WORKER_ID.fullmatch(kept_worker_id(settings))
