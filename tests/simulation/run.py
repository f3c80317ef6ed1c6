"""One schedule: choices are taken until nothing is left to do, then a healthy worker finishes, then all is compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dedup.core.window import Sighting, Source
from dedup.errors import StateIncompatible
from dedup.kafka.record_batch import fill
from dedup.kafka.wire import Position, TopicPartition
from dedup.store.changelog import encode_sighting, sighting_key
from dedup.worker.layout import Layout
from tests.simulation.choice import Chooser, Healthy
from tests.simulation.cluster import Record
from tests.simulation.loop import Running
from tests.simulation.oracle import Violation
from tests.simulation.process import Disk, MemoryDisk, Parked, Process
from tests.simulation.scenario import (
    CHANGELOG,
    FINGERPRINT,
    GROWN,
    NOW_MS,
    REPARTITION,
    Bounds,
    Builder,
    Scenario,
    transactional_id,
)
from tests.simulation.variants import Variant
from tests.simulation.watcher import Watcher
from tests.simulation.ways import SETTLED_WAYS, ways

MOST_STEPS = 4_000
MOST_REBALANCES = 3
MOST_PAUSES = 8
"""A worker that only asks again and again lets the other one go on: no scheduler is unfair for ever."""
DAY_MS = 86_400_000
SEEDER = "t.seed"
FOREIGN = b"foreign"
"""An ID in the changelog of a fleet that began anew."""


@dataclass(slots=True)
class Worker:
    """A machine: its disks stay, its processes come and go."""

    number: int
    disks: dict[TopicPartition, Disk]
    copies: dict[TopicPartition, Disk] = field(default_factory=dict)
    process: Process | None = None
    incarnations: int = 0


class Run:
    """One schedule of a scenario with the worker of a variant."""

    def __init__(self, scenario: Scenario, variant: Variant, chooser: Chooser) -> None:
        self.scenario = scenario
        self.variant = variant
        self.chooser = chooser
        self.cluster = scenario.new_cluster()
        self.trace: list[str] = []
        self.violations: list[Violation] = []
        self.steps = 0
        self.bounds: Bounds = scenario.bounds
        self._faults, self._switches, self._reorders = self.bounds.faults, self.bounds.switches, self.bounds.reorders
        self._deliveries = self.bounds.deliveries
        self._together = self.bounds.together
        self._rebalances = MOST_REBALANCES
        self._workers = [Worker(number, self._new_disks()) for number in range(2)]
        self._owner = self._current = self._workers[0]
        self._network: list[Callable[[], object]] = []
        """Requests whose sender no longer waits for them; they may still arrive."""
        self._watcher = Watcher(scenario, self.cluster)
        self._old_offsets: dict[tuple[str, TopicPartition], Position] = {}
        self._pauses = 0
        self._wall_ms = NOW_MS
        self._grown = False
        """The source has more partitions now, to which IDs may have moved: every later start must be refused."""
        self._regrouped = False
        """The layout is another one now than at the beginning."""
        self._refused = False
        self._changed = False
        """The topics of the running workers are not what they began with: none of them may go on."""

    def _new_disks(self) -> dict[TopicPartition, Disk]:
        return {judged: self.variant.disk() for judged in self.scenario.judged_logs}

    def go(self) -> list[Violation]:
        """Run the schedule; return what must not be."""
        try:
            if self.scenario.seeder:
                self._open_seeder()
            self._start(self._owner)
            self._until_quiet()
            if not self.violations:
                self._finish()
            self._end_all()
        finally:
            Running.change_to(None)
        return self.violations

    def _open_seeder(self) -> None:
        _, identity = self.cluster.init_producer_id(SEEDER)
        self.cluster.add_partitions(SEEDER, identity, [CHANGELOG])
        (batch,) = fill(CHANGELOG, [(-1, NOW_MS, b"T", b"never committed", [])], compression="none")
        self.cluster.produce(SEEDER, identity, [(CHANGELOG, batch.sealed(identity, 0))])

    def _start(self, worker: Worker) -> None:
        worker.incarnations += 1
        for feeding, disk in worker.disks.items():
            if isinstance(disk, MemoryDisk) and "stale" in self.bounds.kinds:
                worker.copies[feeding] = disk.copy()
        process = worker.process = Process(worker.number, worker.incarnations, self.cluster, worker.disks)
        process.dies_at_write = self._dies_at_write
        process.finds_damage = self._damage_finder()
        process.now_ms = self._wall_ms
        process.grouped = self.scenario.group != self._regrouped
        process.fingerprint = GROWN if self._grown else FINGERPRINT
        self._old_offsets = dict(self.cluster.offsets)
        builder = Builder(self.scenario, self.variant, process)
        process.assign(self.scenario.feeding, builder, self.scenario.most_records)
        self._current = worker

    def _until_quiet(self) -> None:
        while not self.violations:
            self._run_processes()
            heads = [[] if worker.process is None else self._heads(worker.process) for worker in self._workers]
            ready = [worker for worker in self._workers if heads[worker.number]]
            if self.violations:
                return
            if not ready:
                if self._waits() and self.cluster.time_passes():
                    continue
                return
            if self._current not in ready:
                self._current, self._pauses = ready[0], 0
            elif self._pauses > MOST_PAUSES:
                self._wait_no_longer(ready)
            self.steps += 1
            if self.steps > MOST_STEPS:
                self.violations.append(Violation("stuck", "the workers do not come to an end"))
                return
            self._step(self._current, heads[self._current.number])

    def _run_processes(self) -> None:
        for worker in self._workers:
            if worker.process is not None and worker.process.loop.ready:
                self._run_process(worker, worker.process)
        if self._watcher.behind:
            self.violations += self._watcher.look()

    def _wait_no_longer(self, ready: list[Worker]) -> None:
        """Let the other worker go on, or the coordinator: its markers are written, its timeouts end what is open."""
        self._pauses = 0
        others = [worker for worker in ready if worker is not self._current]
        if others:
            self._current = others[0]
        else:
            self.cluster.time_passes()

    def _waits(self) -> bool:
        """Tell whether somebody can not read on because of an open transaction."""
        processes = [worker.process for worker in self._workers if worker.process is not None]
        return any(call.name in {"Fetch", "Poll"} for process in processes for call in process.parked)

    def _run_process(self, worker: Worker, process: Process) -> None:
        process.loop.run_until_idle()
        if process.dead:
            self._crashed(worker)
            if worker.process is not None:
                worker.process.loop.run_until_idle()
            return
        for call in [call for call in process.parked if call.future.cancelled()]:
            process.parked.remove(call)
            if call.writes:
                self._network.append(call.effect)
        failure = process.failure
        old = process.grouped != (self.scenario.group != self._regrouped)
        if isinstance(failure, StateIncompatible) and (self._grown or self._changed):
            self._refused = True
            self._end_all()
            return
        if old and isinstance(failure, StateIncompatible):
            self._end(worker)  # who has the old layout ends, and the other worker goes on
            return
        if failure is not None:
            self.violations.append(Violation("stopped", repr(failure)))
        if process.loop.complaints:
            self.violations.append(Violation("stopped", "; ".join(process.loop.complaints)))

    def _heads(self, process: Process) -> list[Parked]:
        """Return the calls that can go on: the oldest of each lane."""
        heads: dict[str, Parked] = {}
        for call in process.parked:
            if call.lane not in heads and call.enabled():
                heads[call.lane] = call
        calls = list(heads.values())
        if self.scenario.lazy_feed:
            calls.sort(key=lambda call: call.name == "Poll")
        if self.scenario.group and process.polls % self.scenario.feeds:
            # Every task of the group has judged something when it commits.
            calls.sort(key=lambda call: call.name == "Timer")
        return calls

    def _step(self, worker: Worker, heads: list[Parked]) -> None:
        call = heads[0]
        if not self._together or not (
            self._faults or self._switches or self._reorders or (self._network and self._deliveries)
        ):
            self._answer(worker, call)
            return
        options = [f"{call.name} go", *self._failing(call)]
        if self._network and self._deliveries:
            options.append(f"{call.name} deliver")
        if self._switches and self._other(worker) is not None:
            options.append(f"{call.name} switch")
        if self._reorders:
            options += [f"{other.name} first" for other in heads[1:]]
        choice = self.chooser.pick(options) if len(options) > 1 else 0
        way = options[choice]
        if choice:
            self.trace.append(f"{self.steps}: worker {worker.number}: {way}")
            self._together -= 1
        if way.endswith(" first"):
            self._reorders -= 1
            call = heads[1:][choice - len(options)]
            choice = 0
        match way.removeprefix(f"{call.name} "):
            case _ if not choice:
                self._answer(worker, call)
            case "deliver":
                self._deliveries -= 1
                self._network.pop(0)()
            case "switch":
                self._switches -= 1
                self._switch(worker)
            case fault:
                self._faults -= 1
                self._fault(worker, call, fault)

    def _failing(self, call: Parked) -> list[str]:
        """Return what may go wrong here."""
        if not self._faults:
            return []
        options = list(ways(self.bounds.kinds, call.name, writes=call.writes, again=call.put_off is not None))
        if call.name == "Poll" and self._settled():
            options += [f"Poll {way}" for kind in self.bounds.kinds for way in SETTLED_WAYS.get(kind, ())]
        return options

    def _settled(self) -> bool:
        """Tell whether there is a committed stream time."""
        return not self._grown and self._watcher.judged_an_id and not self.scenario.two_hops

    def _answer(self, worker: Worker, call: Parked) -> None:
        assert worker.process is not None
        self._pauses = self._pauses + 1 if call.name == "pause" else self._pauses
        worker.process.parked.remove(call)
        worker.process.polls += call.name == "Poll"
        worker.process.answer(call, call.effect())

    def _fault(self, worker: Worker, call: Parked, way: str) -> None:
        process = worker.process
        assert process is not None
        if way.endswith("done, answer lost") or way == "done late, no answer":
            process.parked.remove(call)
            if way == "done, answer lost":
                call.effect()
            elif way == "done late, no answer":
                self._network.append(call.effect)
            process.no_answer(call)
            return
        match way:
            case "put off":
                assert call.put_off is not None
                process.parked.remove(call)
                process.answer(call, call.put_off())
            case "markers late":
                self.cluster.late_markers = True
                self._answer(worker, call)
                self.cluster.late_markers = False
            case "transaction timed out":
                self.cluster.expire(
                    transactional_id(self.scenario, self.scenario.judged_logs[0], grouped=self.scenario.group)
                )
                self._answer(worker, call)
            case "rebalance, old owner goes on" | "rebalance, old owner drains":
                self._rebalance(worker, drain=way.endswith("drains"))
            case "the layout changes, and another worker starts":
                self._regroup(worker)
            case "source made again" | "source gets a partition" | "frozen through a reset":
                self._change(worker, way)
            case _:
                self._crash(worker, call, way)

    def _regroup(self, worker: Worker) -> None:
        """What `dedup layout --apply` does while no worker is a member: the old owner is frozen, and goes on later."""
        if self._regrouped or worker is not self._owner:
            return
        scenario, sizes = self.scenario, (self.scenario.feeds, 1)
        old, new = sizes if scenario.group else sizes[::-1]
        scenario.write_layout(self.cluster, Layout(old, scenario.counts, new))
        if self.variant.fences_old_ids:
            for place in scenario.judged_logs:
                while self.cluster.init_producer_id(transactional_id(scenario, place, grouped=scenario.group))[0]:
                    pass
        scenario.write_layout(self.cluster, Layout(new, scenario.counts))
        self._regrouped = True
        other = self._workers[1 - worker.number]
        if other.process is not None:
            other.process.bury()
        self._take_over(other)

    def _change(self, worker: Worker, way: str) -> None:
        """The topics change under a worker, and its source gets records that it must not judge."""
        self._changed = True
        self._faults = self._switches = 0
        self._end(self._workers[1 - worker.number])
        assert worker.process is not None
        if worker is not self._owner:
            # The group has nobody else: the zombie joins again and gets the partitions.
            self._owner, worker.process.owner = worker, True
            worker.process.loop.within(worker.process.rejoin)
        source = self.scenario.sources[0]
        match way:
            case "source made again":
                self.cluster.make_again(source.topic)
            case "source gets a partition":
                self.cluster.added[source.topic] += 1
            case _:
                self._reset()
        # More of them than the worker has read, so that its position is inside the new log, too.
        moved = [Record(0, time_ms, b"moved", b"moved%d" % time_ms, ()) for time_ms in range(20)]
        self.cluster.append_plain(source, moved)

    def _reset(self) -> None:
        """What `dedup reset` does to the cluster while no worker is a member."""
        grouped = self.scenario.group != self._regrouped  # it fences the owners of the layout that it reads
        for place in self.scenario.feeding:
            while self.cluster.init_producer_id(transactional_id(self.scenario, place, grouped=grouped))[0]:
                pass
        self.cluster.offsets.clear()
        self.cluster.make_again(CHANGELOG.topic)
        if self.scenario.two_hops:
            self.cluster.make_again(REPARTITION.topic)
        # What the fleet writes that starts anew: nothing of it may reach the old disk.
        sighting = encode_sighting(Sighting(0, 0, Source(0, 0, 0), b""))
        record = Record(0, NOW_MS, sighting_key(0, FOREIGN), sighting, ())
        self.cluster.append_plain(CHANGELOG, [record])

    def _crash(self, worker: Worker, call: Parked, way: str) -> None:
        match way:
            case "crash before":
                pass
            case "source grows":
                # Every worker of the group sees it, and stops; the next start is one that must refuse.
                self._grown = True
                self._faults = self._switches = 0
                self._owner = worker
                self._end(self._workers[1 - worker.number])
            case "crash, clock a day ahead" | "crash, clock a day back":
                self._wall_ms += DAY_MS if way.endswith("ahead") else -DAY_MS
            case "crash, done late":
                self._network.append(call.effect)
            case _:
                call.effect()
        if way == "crash and wipe":
            worker.disks = self._new_disks()
        if way == "crash and old copy":
            worker.disks = dict(worker.copies)
        assert worker.process is not None
        worker.process.loop.dead = True
        self._crashed(worker)

    def _crashed(self, worker: Worker) -> None:
        """Bury the process; its worker starts another one if the group still counts on it."""
        assert worker.process is not None
        worker.process.bury()
        worker.process = None
        self._lose_offsets()
        if worker is self._owner:
            self._start(worker)

    def _lose_offsets(self) -> None:
        match self.scenario.offsets:
            case "forgotten":
                self.cluster.offsets.clear()
            case "stale":
                self.cluster.offsets = dict(self._old_offsets)
            case "kept":
                pass

    def _dies_at_write(self, name: str) -> str:
        """Return how the process dies at a write, if it does."""
        options, fates = ["disk go"], [""]
        if "crash" in self.bounds.kinds:
            options.append(f"disk crash before {name}")
            fates.append("before")
        if "torn" in self.bounds.kinds and name == "apply":
            options.append(f"disk crash in {name}")
            fates.append("torn")
        choice = self.chooser.pick(options) if self._faults and self._together and len(options) > 1 else 0
        if choice:
            self._faults -= 1
            self._together -= 1
            self.trace.append(f"{self.steps}: {options[choice]}")
        return fates[choice]

    def _damage_finder(self) -> Callable[[str], bool]:
        """Return what tells a process of a damaged store; once a process: the second time it stops, as it should."""
        left = [None]

        def found(name: str) -> bool:
            options = ["disk go", f"disk damaged at {name}"]
            if (
                not left
                or not self._faults
                or not self._together
                or "damage" not in self.bounds.kinds
                or not self.chooser.pick(options)
            ):
                return False
            left.pop()
            self._faults -= 1
            self._together -= 1
            self.trace.append(f"{self.steps}: {options[1]}")
            return True

        return found

    def _other(self, worker: Worker) -> Worker | None:
        """Return who could go on instead."""
        other = self._workers[1 - worker.number]
        if other.process is None:
            return other if other.incarnations == 0 else None
        return other if self._heads(other.process) else None

    def _switch(self, worker: Worker) -> None:
        self._pauses = 0
        other = self._workers[1 - worker.number]
        if other.process is None:
            self._take_over(other)
        self._current = other

    def _take_over(self, other: Worker) -> None:
        old = self._owner
        if old.process is not None:
            old.process.owner = False
        self._owner = other
        self._start(other)

    def _rebalance(self, worker: Worker, *, drain: bool) -> None:
        """The group gives the partitions to the other worker; the old owner drains, or knows nothing of it."""
        if not self._rebalances or worker is not self._owner:
            return
        self._rebalances -= 1
        other = self._workers[1 - worker.number]
        if other.process is not None:
            other.process.bury()
        if drain:
            assert worker.process is not None
            worker.process.revoke()
        self._take_over(other)

    def _finish(self) -> None:
        """No more faults: a last incarnation reads everything, and then all must agree."""
        if self._changed:
            self._finish_changed()
            return
        fresh = self.scenario.last_incarnation or self._owner.process is None
        if self._grown and not self._refused:
            self.violations.append(Violation("wrong", "the worker goes on after its source grew"))
            return
        # Who refused has touched nothing: with the old partitions all goes on.
        self._grown = False
        if fresh:
            self._end_all()
            self._lose_offsets()
        for effect in self._network:
            effect()
        self._network.clear()
        self.chooser, self._faults, self._switches, self._reorders = Healthy(), 0, 0, 0
        if self.scenario.probes:
            for source, records in self.scenario.records(self.scenario.probes, len(self.scenario.input)).items():
                self.cluster.append_plain(source, records)
            self._watcher.expect_probes()
        if fresh and self.scenario.new_disk_at_end:
            self._owner.disks = self._new_disks()
        self.trace.append(f"{self.steps}: no more faults")
        if fresh:
            self._start(self._owner)
        self._until_quiet()
        if not self.violations:
            self.violations += self._watcher.compare_all(self._owner.process)

    def _finish_changed(self) -> None:
        """Whoever ran when the topics changed has stopped, and its disk is what it was."""
        if not self._refused:
            self.violations.append(Violation("wrong", "the worker goes on although its topics are others"))
        kept = [disk.kept for disk in self._owner.disks.values() if isinstance(disk, MemoryDisk)]
        if any(key == FOREIGN for store in kept for _, key, _ in store.sightings()):
            self.violations.append(Violation("state", "state of another changelog was mixed into this disk's"))

    def _end_all(self) -> None:
        for worker in self._workers:
            self._end(worker)

    def _end(self, worker: Worker) -> None:
        if worker.process is not None:
            worker.process.bury()
            worker.process = None
