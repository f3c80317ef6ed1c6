"""Who a worker is to its group: the same one after a restart."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from dedup.errors import StateIncompatible

if TYPE_CHECKING:
    from dedup.settings import Settings


def kept_worker_id(settings: Settings) -> str:
    """Return the worker's id: the configured one, or one made once and kept in the state directory.

    It makes the member static (KIP-345): a worker that was killed and comes back has its partitions again at once.
    """
    if settings.worker_id is not None:
        return settings.worker_id
    path = settings.state_dir / "worker-id"
    try:
        settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(f"worker-{secrets.token_hex(4)}\n", encoding="ascii")
        return path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise StateIncompatible(
            f"{settings.state_dir}: can not be used: {error.strerror}. Make state_dir writable for this user, or set "
            f"another one."
        ) from error
