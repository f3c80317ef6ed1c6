"""A worker for a long time with a short guard period: ``python -m bench.soak --minutes 20 --rate 9000``.

IDs are forgotten as fast as new ones come (guard period 60 s), so memory, open files and disk of the workers must not
grow. They are looked at every few seconds; after a warm-up of several guard periods, each must be *flat*: the growth
over the time looked at, by a robust slope (Theil-Sen, the median of the slopes of all pairs), is within a share of its
median or a small amount. Prints slopes and R squared, writes a JSON file that adds up with those of other runs and a
page with plots; exit code 1 when something grows, or not every record was judged, or a sample of the topics is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path

from confluent_kafka import Producer

from dedup.chaos.live_checker import Watch
from dedup.chaos.load import make_topic
from dedup.embedded.child_process import ChildProcess
from dedup.embedded.kafka_node import EmbeddedKafka
from dedup.settings import Settings, load_settings
from dedup.topology.parse import parse
from dedup.verify.render import page
from dedup.verify.verifier import verify

NAME = "soak"
PARTITIONS = 4
GUARD_S = 60
LOOK_S = 5.0
TICK_S = 0.02
ENDS_WITHIN_S = 300.0
TOPOLOGY = f"""
dedup: 1
name: {NAME}
source: {{topics: [{NAME}-in], partitioned_by: tracking_id}}
tracking_id: {{field: event_id}}
guard_period: {GUARD_S}s
grace: 10s
output: {{topic: {NAME}-out}}
"""
MIB = 1 << 20
SHARE = 0.05
"""Growth over the time looked at, of the median, that counts as flat."""
LEAST = {"memory_bytes": 16 * MIB, "files": 4.0, "threads": 2.0, "disk_bytes": 32 * MIB}
"""Growth that counts as flat whatever the median is."""
RESULTS = Path(__file__).parent.parent / "docs" / "proof-runs"


@dataclass(frozen=True, slots=True)
class Look:
    """The workers at one moment; sums over all of them."""

    at_s: float
    sent: int
    judged: int
    memory_bytes: int
    files: int
    threads: int
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class Trend:
    """How one figure went; slopes per hour."""

    name: str
    median: float
    robust_slope: float
    slope: float
    r_squared: float
    growth: float
    """By the robust slope, over the time looked at."""
    allowed: float

    @property
    def flat(self) -> bool:
        return self.growth <= self.allowed


def trend(name: str, looks: Sequence[Look]) -> Trend:
    """Return how a figure of the looks went."""
    times = [look.at_s / 3600 for look in looks]
    values = [float(getattr(look, name)) for look in looks]
    pairs = [
        (values[later] - values[earlier]) / (times[later] - times[earlier])
        for earlier in range(len(looks))
        for later in range(earlier + 1, len(looks))
    ]
    slope, intercept = statistics.linear_regression(times, values)
    mean = statistics.fmean(values)
    total = sum((value - mean) ** 2 for value in values)
    rest = sum((value - intercept - slope * at) ** 2 for at, value in zip(times, values, strict=True))
    median = statistics.median(values)
    robust = statistics.median(pairs)
    explained = 1 - rest / total if total else 0.0
    growth = robust * (times[-1] - times[0])
    return Trend(name, median, robust, slope, explained, growth, max(SHARE * median, LEAST[name]))


@dataclass(slots=True)
class Sender:
    """Sends events of now at a steady rate; some repeat an ID of the last minute."""

    producer: Producer
    rate: int
    dice: random.Random = field(default_factory=lambda: random.Random(1))
    sent: int = 0
    next_id: int = 0
    began: float = field(default_factory=time.monotonic)

    def catch_up(self) -> None:
        """Send what is due by now."""
        due = int((time.monotonic() - self.began) * self.rate)
        now_ms = int(time.time() * 1000)
        while self.sent < due:
            if self.next_id and self.dice.random() < 0.3:
                number = self.next_id - 1 - min(self.next_id - 1, int(self.dice.expovariate(1 / 20_000)))
            else:
                number, self.next_id = self.next_id, self.next_id + 1
            name = f"event-{number:016d}"
            value = f'{{"event_id":"{name}","n":{self.sent},"user":"u{number % 977}","padding":"{"x" * 110}"}}'
            try:
                self.producer.produce(f"{NAME}-in", value, name, timestamp=now_ms)
            except BufferError:
                self.producer.poll(TICK_S)
                continue
            self.sent += 1
        self.producer.poll(0)


def look_at(pids: Sequence[int], state: Path, at_s: float, sent: int, judged: int) -> Look:
    """Return the figures of all workers."""
    status = [Path(f"/proc/{pid}/status").read_text(encoding="ascii") for pid in pids]
    memory_kib = sum(int(text.split("VmRSS:")[1].split()[0]) for text in status)
    threads = sum(int(text.split("Threads:")[1].split()[0]) for text in status)
    files = sum(sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()) for pid in pids)
    return Look(at_s, sent, judged, memory_kib * 1024, files, threads, disk_bytes(state))


def disk_bytes(directory: Path) -> int:
    """Return what files take; one that goes while we look takes nothing."""
    total = 0
    for path, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_size  # noqa: PTH118  # quick: thousands of times
            except FileNotFoundError:
                continue
    return total


def run(options: argparse.Namespace, place: Path, kafka: EmbeddedKafka) -> tuple[list[Look], dict[str, object]]:
    """Run the workers under load; return the looks, and what the run came to."""
    topology_file, config_file = place / "soak.yaml", place / "config.yaml"
    topology_file.write_text(TOPOLOGY, encoding="utf-8")
    config_file.write_text(f"brokers: ['{kafka.bootstrap}']\nweb: {{enabled: false}}\n", encoding="utf-8")
    make_topic(kafka.bootstrap, f"{NAME}-in", PARTITIONS)
    command = [sys.executable, "-m", "dedup.cli.main", "run", str(topology_file), "--config", str(config_file)]
    workers = [
        ChildProcess(
            [*command, "--set", f"state_dir={place}/state/{number}", "--set", f"worker_id=w{number}"], place / "log"
        )
        for number in range(options.workers)
    ]
    settings = {"bootstrap.servers": kafka.bootstrap, "linger.ms": 10, "compression.type": "lz4"}
    sender = Sender(Producer({**settings, "partitioner": "murmur2_random"}), options.rate)
    looks: list[Look] = []
    try:
        with Watch(Settings(brokers=(kafka.bootstrap,)), NAME, f"{NAME}-in", PARTITIONS) as watch:
            send_and_look(options, sender, watch, workers, place, looks)
            done = drain(sender, watch, workers)
    finally:
        codes = [worker.stop() for worker in workers]
    topology, config = parse(TOPOLOGY, name="soak.yaml"), load_settings(config_file, [], {})
    found = verify(topology, config, sample=options.sample, scratch=place)
    return looks, {
        "sent": sender.sent,
        "judged": done,
        "exit_codes": codes,
        "verify": found.closing_line(),
        "verified": found.passed,
        "verified_records": found.read,
    }


def send_and_look(
    options: argparse.Namespace,
    sender: Sender,
    watch: Watch,
    workers: Sequence[ChildProcess],
    place: Path,
    looks: list[Look],
) -> None:
    """Events are sent until the time is over, with a look now and then."""
    pids = [worker.pid for worker in workers]
    next_look = LOOK_S
    while (at_s := time.monotonic() - sender.began) < 60 * options.minutes:
        sender.catch_up()
        if at_s >= next_look:
            next_look += LOOK_S
            if not all(worker.running for worker in workers):
                raise SystemExit(f"a worker ended:\n{(place / 'log').read_text(encoding='utf-8')[-4000:]}")
            looks.append(look_at(pids, place / "state", at_s, sender.sent, watch.look().judged))
            if len(looks) % 12 == 0:
                last = looks[-1]
                print(
                    f"{last.at_s:6.0f} s  sent {last.sent:,}  behind {last.sent - last.judged:,}  memory "
                    f"{last.memory_bytes / MIB:.0f} MiB  files {last.files}  disk {last.disk_bytes / MIB:.0f} MiB",
                    flush=True,
                )
        time.sleep(TICK_S)


def drain(sender: Sender, watch: Watch, workers: Sequence[ChildProcess]) -> int:
    """Return how many records are judged once all are, or patience is over."""
    if sender.producer.flush(60):
        raise SystemExit("the broker did not take all records")
    deadline = time.monotonic() + ENDS_WITHIN_S
    while time.monotonic() < deadline and all(worker.running for worker in workers):
        sight = watch.look()
        # Without a duplicate of the producer's own, the last offsets committed are the topic's ends.
        if sight.judged >= sight.in_topic:
            return sight.judged
        time.sleep(0.5)
    return watch.look().judged


def plot(name: str, looks: Sequence[Look], warm_s: float, line: Trend) -> str:
    """Return one figure over time, the warm-up grey."""
    wide, high, left = 960, 160, 80
    values = [float(getattr(look, name)) for look in looks]
    most, last = max(values) or 1.0, looks[-1].at_s
    points = " ".join(
        f"{left + look.at_s / last * (wide - left):.1f},{high - 4 - value / most * (high - 20):.1f}"
        for look, value in zip(looks, values, strict=True)
    )
    scale, unit = (MIB, "MiB") if name.endswith("_bytes") else (1, "")
    warm = warm_s / last * (wide - left)
    told = (
        f"median {line.median / scale:,.1f} {unit} · slope {line.robust_slope / scale:+,.2f} {unit}/h (least squares "
        f"{line.slope / scale:+,.2f}, R² {line.r_squared:.2f}) · growth {line.growth / scale:+,.2f} of "
        f"{line.allowed / scale:,.1f} allowed: {'flat' if line.flat else 'GROWS'}"
    )
    return (
        f"<h2>{escape(name.removesuffix('_bytes'))}</h2><svg viewBox='0 0 {wide} {high}' role=img>"
        f"<rect x='{left}' y='0' width='{warm:.1f}' height='{high}' fill='currentColor' opacity='.08'/>"
        f"<polyline points='{points}' fill='none' stroke='#2a78d6' stroke-width='1.5'/>"
        f"<text x='{left - 6}' y='16' text-anchor='end'>{most / scale:,.0f} {unit}</text>"
        f"<text x='{left - 6}' y='{high - 4}' text-anchor='end'>0</text></svg>"
        f"<p class='{'soft' if line.flat else 'bad'}'>{escape(told)}</p>"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--rate", type=int, default=9_000, help="records a second")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--warm-up", type=float, default=300.0, help="seconds; at most half of the run")
    parser.add_argument("--sample", type=int, default=50, help="one ID in so many is verified at the end")
    parser.add_argument("--result", type=Path, help="the JSON file; the page goes beside it")
    options = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    with tempfile.TemporaryDirectory() as place, EmbeddedKafka() as kafka:
        looks, came = run(options, Path(place), kafka)
    warm_s = min(options.warm_up, 30 * options.minutes)
    steady = [look for look in looks if look.at_s >= warm_s]
    trends = [trend(name, steady) for name in LEAST]
    passed = all(line.flat for line in trends) and came["judged"] == came["sent"] and bool(came["verified"])
    result = {
        "proof_run": "soak",
        "commit": commit.stdout.strip(),
        "began": when,
        "seconds": round(looks[-1].at_s, 1),
        "workers": options.workers,
        "rate": options.rate,
        "guard_s": GUARD_S,
        "warm_up_s": warm_s,
        "passed": passed,
        **came,
        "trends": [asdict(line) | {"flat": line.flat} for line in trends],
        "load": os.getloadavg()[0],
    }
    path = options.result or RESULTS / f"soak-{commit.stdout.strip()}-w{options.workers}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result) + "\n", encoding="utf-8")
    head = [f"<h1>Soak, {looks[-1].at_s / 60:.1f} minutes</h1>", f"<p class=line>{escape(str(came['verify']))}</p>"]
    head.append(f"<p class=soft>{came['judged']:,} of {came['sent']:,} records judged</p>")
    plots = [plot(line.name, looks, warm_s, line) for line in trends]
    path.with_suffix(".html").write_text(page("soak", [*head, *plots]), encoding="utf-8")
    for line in trends:
        print(
            f"{line.name:13s} median {line.median:15,.0f}  robust slope {line.robust_slope:+15,.0f}/h  "
            f"least squares {line.slope:+15,.0f}/h  R2 {line.r_squared:5.2f}  "
            f"growth {line.growth:+13,.0f} (allowed {line.allowed:,.0f})  {'flat' if line.flat else 'GROWS'}"
        )
    print(f"sent {came['sent']:,}  judged {came['judged']:,}  {came['verify']}  {path}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
