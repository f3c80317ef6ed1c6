"""The verifier: reads Kafka only, replays the exact model, and says what is lost, duplicated, changed or out of order.

Theory of operation. Everything is read up to one cut. First the group's committed offsets: only what was judged can be
expected. Then the ends of the topics that the worker writes, open transactions included: whatever the committed
offsets promise was written below those ends. Reading ``read_committed`` up to them waits for transactions still open.
What the worker commits meanwhile is *pending*: it may be there or not.

A partition whose order is in a log is replayed. Where it is not, checks that need no order are made (`orderfree`), and
what they leave open is counted as not provable, never as passed.

Memory is bounded whatever the topics hold: records go to files, parted by tracking ID (`spill`), and one part at a
time is judged and compared. What depends on the order of all records is a column of numbers in a file (`order`).
"""

from __future__ import annotations

import gc
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from dedup.proof.cut import OnProgress, Progress, take_cut
from dedup.proof.direct import verify_direct
from dedup.proof.kafka_reader import KafkaReader
from dedup.proof.repartitioned import verify_repartitioned
from dedup.proof.report import Report
from dedup.settings import Settings
from dedup.topology.model import Topology

__all__ = ["OnProgress", "Progress", "verify"]


def verify(
    topology: Topology,
    settings: Settings,
    *,
    progress: OnProgress = lambda _: None,
    sample: int = 1,
    scratch: Path | None = None,
) -> Report:
    """Return what a verification found. Reads Kafka only; blocks until all is read.

    ``sample``: one tracking ID in so many is judged, with all its records. ``scratch``: where to keep what does not
    fit into memory, about 200 bytes and the key a record; the system's directory for such files if not given.
    Raises StateIncompatible where topology and cluster do not fit, BrokerUnavailable where it can not read.
    """
    began_s = time.time()
    report = Report(topology.name, ", ".join(settings.brokers), "replay", int(began_s * 1000), sample=sample)
    # Millions of small tuples and no cycles: the collector would only walk them again and again.
    collecting = gc.isenabled()
    gc.disable()
    try:
        with KafkaReader(settings) as reader, TemporaryDirectory(prefix="dedup-verify-", dir=scratch) as directory:
            cut = take_cut(topology, reader, report, progress, directory, sample)
            try:
                if topology.direct:
                    verify_direct(cut)
                else:
                    verify_repartitioned(cut)
            finally:
                cut.close()
    finally:
        if collecting:
            gc.enable()
    report.seconds = time.time() - began_s
    report.samples.sort(key=lambda sample: (sample.kind, sample.place))
    return report
