"""`dedup apply --acls`: the worker's permissions as a table, as kafka-acls commands, and as JSON."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dedup.topology.permissions import Permission


def as_table(permissions: Sequence[Permission]) -> Iterator[str]:
    """Yield a line for each permission."""
    for each in permissions:
        name = f"{each.name}{'*' if each.prefixed else ''}"
        yield f"{each.resource.value:<17} {name:<40} {', '.join(each.operations):<38} {each.why}".rstrip()


def as_commands(permissions: Sequence[Permission], brokers: Sequence[str], principal: str) -> Iterator[str]:
    """Yield one kafka-acls command for each permission; an administrator runs them."""
    for each in permissions:
        parts = ["kafka-acls", "--bootstrap-server", ",".join(brokers), "--add", "--allow-principal", principal]
        parts += [part for operation in each.operations for part in ("--operation", operation)]
        parts += [f"--{each.resource.value}", each.name]
        parts += ["--resource-pattern-type", "prefixed"] if each.prefixed else []
        yield shlex.join(parts)


def as_json(permissions: Sequence[Permission], principal: str) -> dict[str, Any]:
    """Return the list as plain values."""
    rows = [
        {
            "resource": each.resource.value,
            "name": each.name,
            "pattern": "prefixed" if each.prefixed else "literal",
            "operations": list(each.operations),
            "why": each.why,
        }
        for each in permissions
    ]
    return {"principal": principal, "permissions": rows}
