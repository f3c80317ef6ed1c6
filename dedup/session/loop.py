"""The event loop of a worker: uvloop, with one answer of its own where a connection is gone.

uvloop raises RuntimeError for a write on a connection that the other side has reset, until all were told; asyncio's
own loop does not. aiokafka knows only OSError there, so a cut connection would end a worker with a traceback.
"""

from __future__ import annotations

from typing import Any, Final

import uvloop


class _Checked:
    """A transport whose `write` raises ConnectionResetError once it is closed."""

    __slots__ = ("_inner",)

    def __init__(self, inner: Any) -> None:  # noqa: ANN401  # uvloop has no types for it
        self._inner: Final = inner

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # whatever the transport has
        return getattr(self._inner, name)

    def write(self, data: bytes) -> None:
        """Write, if there is still a connection."""
        if self._inner.is_closing():
            raise ConnectionResetError("the connection is closed")
        self._inner.write(data)


class Loop(uvloop.Loop):
    """uvloop, whose connections say by an OSError that they are closed."""

    async def create_connection(self, *args: Any, **options: Any) -> tuple[Any, Any]:  # noqa: ANN401  # uvloop's signature
        """Connect as uvloop does; the transport returned is checked before each write."""
        transport, protocol = await super().create_connection(*args, **options)
        return _Checked(transport), protocol
