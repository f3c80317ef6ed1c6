"""Exactly-once deduplication for Kafka topics.

`run` does the same as the command `dedup run`, and `TopologyTestDriver` tests a topology file without a broker.
`IdempotentWriter` and `IdempotentReader` are for applications that produce to a deduplicated topic or consume from it.
A `Flow` wraps your function, which the topology calls for each forwarded record. `dedup.errors` contains the error
classes. To keep `import dedup` fast, all names except `errors`, `load_topology`, and `run` are imported on first
access.
"""

from __future__ import annotations

import threading
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dedup import errors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dedup.connect.idempotent_reader import Event, IdempotentReader, Work
    from dedup.connect.idempotent_writer import IdempotentWriter, Transaction
    from dedup.core.flow import Flow, FlowRecord
    from dedup.settings import Settings, load_settings
    from dedup.topology.model import Topology
    from dedup.worker.faust_app import DedupApp
    from dedup.worker.topology_test_driver import OutputRecord, TopologyTestDriver

__all__ = [
    "Event",
    "Flow",
    "FlowRecord",
    "IdempotentReader",
    "IdempotentWriter",
    "OutputRecord",
    "Settings",
    "Topology",
    "TopologyTestDriver",
    "Transaction",
    "Work",
    "errors",
    "load_settings",
    "load_topology",
    "run",
]

_PLACES: Final[Mapping[str, str]] = {
    "Event": "connect.idempotent_reader",
    "Flow": "core.flow",
    "FlowRecord": "core.flow",
    "IdempotentReader": "connect.idempotent_reader",
    "IdempotentWriter": "connect.idempotent_writer",
    "OutputRecord": "worker.topology_test_driver",
    "Settings": "settings",
    "Topology": "topology.model",
    "TopologyTestDriver": "worker.topology_test_driver",
    "Transaction": "connect.idempotent_writer",
    "Work": "connect.idempotent_reader",
    "load_settings": "settings",
}
"""Maps each name that is imported on first access to its module."""


def __getattr__(name: str) -> Any:  # noqa: ANN401  # any of the public classes
    """Import a public class or function on first access. Raises AttributeError if the name is not public."""
    if name not in _PLACES:
        raise AttributeError(f"module 'dedup' has no attribute {name!r}")
    return getattr(import_module(f"dedup.{_PLACES[name]}"), name)


def load_topology(path: Path | str) -> Topology:
    """Return the topology defined in a file. Raises `TopologyError`, listing every problem, if the file is invalid."""
    from dedup.topology.parse import parse
    from dedup.yaml_document import beside, text_of

    return parse(text_of(Path(path)), name=str(path), read_file=beside(Path(path)))


def run(
    topology: Topology,
    settings: Settings,
    *,
    exit_when_done: bool = False,
    onto_existing_output: bool = False,
    on_tick: Callable[[DedupApp], None] | None = None,
) -> None:
    """Run a worker in this process, as `dedup run` does, until SIGTERM, SIGINT, or an error stops the worker.

    With ``exit_when_done``, the worker stops when its group has judged every record that the source topics contained
    when the worker started. ``onto_existing_output`` permits a new consumer group to write to an output topic that
    already contains records. About 20 times a second, the worker calls ``on_tick``, which can display progress. The
    argument of ``on_tick`` is the worker's app, which is not part of the public API. The calling program must configure
    logging.

    Raises RuntimeError outside the main thread, because only the main thread can handle signals, and inside an event
    loop, such as a notebook's, because the worker runs its own loop. Also raises the error that stops the worker:
    `StateIncompatible` if the state or the topics do not match the topology, `BrokerUnavailable` if no broker answers,
    or `RecordFailed` if the policy for a record is `fail`. Results committed before the error stay committed, and the
    next run continues after them.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("call dedup.run in the main thread, because signals stop the worker")
    from dedup.kafka.topic_admin import in_event_loop

    if in_event_loop():
        raise RuntimeError(
            "an event loop runs in this thread, as it does in a notebook; call dedup.run in a program without one, or "
            "run the command `dedup run`"
        )
    from dedup.web.server import WebServer
    from dedup.worker.worker import RunOptions, main_loop

    make_pages = partial(WebServer, settings.web) if settings.web.enabled else None
    main_loop(topology, settings, RunOptions(exit_when_done, on_tick, make_pages, onto_existing_output))
