"""The verifier: reads only Kafka, replays the exact model, and reports what is lost, duplicated, changed or reordered.

Everything is read up to one cut (`cut`). First the group's committed offsets: only judged records can be expected. Then
the ends of the topics that the worker writes, open transactions included: what belongs to the committed offsets was
written below those ends. Reading ``read_committed`` up to them waits for transactions that are still open. What the
worker commits meanwhile is *pending*: it may or may not be there.

A partition whose order is in a log is replayed (`direct`, `repartitioned`). Otherwise checks that need no order are
made (`findings.OrderFree`), and what they leave open is counted as not provable, never as passed.

Memory is bounded whatever the topics hold: records go to files in buckets by tracking ID (`spill`), and one bucket at a
time is judged and compared. What depends on the order of all records is a column of integers in a file (`cut.Order`).
"""

from __future__ import annotations

import gc
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from dedup.settings import Settings
from dedup.topology.model import Topology
from dedup.verify.cut import OnProgress, take_cut
from dedup.verify.direct import verify_direct
from dedup.verify.kafka_reader import KafkaReader
from dedup.verify.repartitioned import verify_repartitioned
from dedup.verify.report import Report


def verify(
    topology: Topology,
    settings: Settings,
    *,
    progress: OnProgress = lambda _: None,
    sample: int = 1,
    scratch: Path | None = None,
) -> Report:
    """Return what a verification found; reads only Kafka, and blocks until everything is read.

    ``sample``: one tracking ID in so many is judged, with all its records. ``scratch``: directory for what does not fit
    into memory, about 200 bytes plus the key per record; the system's temporary directory by default.
    Raises StateIncompatible if topology and cluster do not fit, BrokerUnavailable if the cluster cannot be read.
    """
    began_s = time.time()
    report = Report(topology.name, ", ".join(settings.brokers), "replay", int(began_s * 1000), sample=sample)
    # Millions of small tuples and no cycles: the garbage collector would only traverse them repeatedly.
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
