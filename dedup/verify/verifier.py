"""Implements `dedup verify`, which reads only from Kafka, replays the records through an exact model, and reports
every difference.

All topics are read up to one cut (`cut`). The verifier first reads the group's committed offsets, because only the
results of judged records can be expected. The verifier then reads the ends of the topics that workers write, including
open transactions. The results of all records below the committed offsets are below those ends. Reading up to the ends
with ``read_committed`` waits for transactions that are still open. Records that workers judge in the meantime are
*pending*, because their results may be missing.

A partition is replayed if a log still contains its records in order (`direct`, `repartitioned`). If no log preserves
the order, the verifier makes only checks that do not depend on order (`findings.OrderFree`). Records that these checks
cannot decide are counted as not provable, never as correct.

The memory that a verification needs hardly depends on the size of the topics. Records are written to files in buckets
by tracking ID (`spill`), and one bucket at a time is judged and compared. Data that depends on the order of all records
is kept in a file by ranges of offsets (`cut.Order`); only the positions of its parts are in memory.
"""

from __future__ import annotations

import gc
import time
from contextlib import closing
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
    progress: OnProgress = lambda *_: None,
    sample: int = 1,
    scratch: Path | None = None,
) -> Report:
    """Verify a topology by reading only Kafka, and return the report. The function blocks until all records are read.

    One tracking ID out of ``sample`` is judged, with all its records. ``scratch`` is a directory for data that does not
    fit into memory, about 200 bytes plus the key for each record; the default is the system's temporary directory.
    Raises StateIncompatible if the topology and the cluster do not match, and BrokerUnavailable if the cluster cannot
    be read.
    """
    began_s = time.time()
    report = Report(topology.name, ", ".join(settings.brokers), "replay", int(began_s * 1000), sample=sample)
    # The verification creates millions of small tuples without cycles, which the garbage collector would only traverse
    # repeatedly.
    collecting = gc.isenabled()
    gc.disable()
    try:
        with (
            KafkaReader(settings) as reader,
            TemporaryDirectory(prefix="dedup-verify-", dir=scratch) as directory,
            closing(take_cut(topology, reader, report, progress, directory, sample)) as cut,
        ):
            (verify_direct if topology.direct else verify_repartitioned)(cut)
    finally:
        if collecting:
            gc.enable()
    report.seconds = time.time() - began_s
    report.samples.sort(key=lambda sample: (sample.kind, sample.place))
    return report
