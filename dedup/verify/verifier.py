"""Implements `dedup verify`, which replays the records in Kafka with the exact model and reports differences.

The verifier reads the group's committed offsets first. Workers must already have written the results of all records
below these offsets. After that, the verifier reads the end offsets of the topics that workers write to, so all these
results are below the end offsets. Therefore, the committed offsets of different partitions need not be from the same
time. Records that workers judge during the verification are *pending*.

The verifier replays a partition if a log still contains the partition's records in order (`direct`, `repartitioned`).
Otherwise, the verifier runs only the checks that do not depend on order (`findings.OrderFree`). Records whose verdicts
cannot be checked are counted as not provable, never as correct.

The size of the topics hardly affects memory use, because the verifier sorts records into buckets on disk (`spill`).
"""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

from dedup.settings import Settings
from dedup.topology.model import Topology
from dedup.verify.cut import OnProgress, take_cut
from dedup.verify.direct import verify_direct
from dedup.verify.kafka_reader import KafkaReader, without_garbage_collection
from dedup.verify.repartitioned import verify_repartitioned
from dedup.verify.report import Report
from dedup.verify.spill import scratch_directory


def verify(
    topology: Topology,
    settings: Settings,
    *,
    progress: OnProgress = lambda *_: None,
    sample: int = 1,
    scratch: Path | None = None,
) -> Report:
    """Verify a topology, and return the report when all records have been read.

    The verifier selects one in ``sample`` tracking IDs, and judges all records with the selected IDs. ``scratch`` is a
    directory for temporary files, which take about 200 bytes plus the key for each record. The default is the system's
    temporary directory. Raises StateIncompatible if the topology and the cluster do not match, BrokerUnavailable if the
    cluster cannot be read, and DedupError if the disk of the scratch directory is full.
    """
    began_s = time.time()
    report = Report(topology.name, ", ".join(settings.brokers), "replay", int(began_s * 1000), sample=sample)
    with (
        without_garbage_collection(),
        KafkaReader(settings) as reader,
        scratch_directory("dedup-verify-", scratch) as directory,
        closing(take_cut(topology, reader, report, progress, directory, sample)) as cut,
    ):
        (verify_direct if topology.direct else verify_repartitioned)(cut)
        for place in () if cut.plan.flowed is None else cut.plan.flowed.displaced():
            report.violation("reordered", place, "not in the order of the log")
    report.seconds = time.time() - began_s
    report.samples.sort(key=lambda sample: (sample.kind, sample.place))
    return report
