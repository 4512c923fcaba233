"""Asks every system in turn, round by round, and keeps a row of each answer. What the rows mean is for report.py."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

from checkpoint.group import BenchError, Group, Job
from checkpoint.peers import Environment
from checkpoint.processes import MemoryPeak, Neighbours
from checkpoint.systems import KINDS, MEMCPY, System

Row = dict[str, Any]

SETTLE_S = 10.0
"""Between the making of a system and its first save. A job's comes minutes after its start, but memory that a virtual
machine has yet to get from its host comes at 0.3 GB/s."""
COMPUTE_RATIO = 10.0
"""Forward and backward last at least this many copies of the state. With so few tokens that they last three, a step
waits for memory itself, and whatever else moves bytes costs it as many; no job trains with so few."""
CLOCKS = ("wall", "adj")
MOST_REPEATS, SAVING_S, TRAINING_S = 12, 5.0, 12.0
"""What takes milliseconds is asked more often in a round than what takes seconds, and its median kept: one
copy of the state varies by a third, from one time to the next."""
WINDOWS_S, MOST_WINDOWS, KNOWN, KNOWN_SHARE = 60.0, 200, 0.02, 0.1
"""Windows of training go on until the error of their median is so many copies, or such a share of it, or for so long:
from one step to the next, a step varies by more than what is looked for."""
NEIGHBOURS, QUIET_S, DISTURBED = 0.1, 120.0, 3
"""Of a core: where processes that are not measured take more, their end is waited for, so long at most. Windows of
training beside them do not count, and a round may last so many times longer for it."""
_LEAST_WINDOWS = 8
_WINDOWS_A_FLOOR = 16
"""One that was disturbed would change all that a round found."""
_STEPS_WITH_SAVES = 4
"""In a row, each with one."""
COPIES_IN_MEMORY = 4.5
"""States that one rank of one system may have in memory at the same time: its own, the floor's, and the system's."""
COPIES_OF_A_REPLICA = 4.5
"""And as many more for each replica: that of the other rank, those on their way, and the slots they come from."""


@dataclass
class Bench:
    """One run: what is measured, and what came of it so far."""

    systems: Sequence[System]
    environments: dict[str, Environment]
    nbytes: int
    rounds: int
    survivals: int
    """Rounds of kill -9: each is a start of new processes."""
    window_steps: int = 1
    """Steps of a window of training; one with a save goes on until nothing of the save is left."""
    windows: int = MOST_WINDOWS
    """Windows with a save in a round, where they are short."""
    settle_s: float = SETTLE_S
    streams: int = 2
    rows: list[Row] = field(default_factory=list)
    failures: list[Row] = field(default_factory=list)
    states: dict[str, Row] = field(default_factory=dict)
    """Size and tensors of each kind of state."""
    tokens: int = 0
    campaign: str = ""
    """Which is under way."""
    quiet_s: float = QUIET_S
    neighbours: Neighbours = field(default_factory=Neighbours)

    def failed(self, system: System | str, what: str, why: object) -> None:
        """`system`: one of ours, or the name of a client."""
        name, label = (system, system) if isinstance(system, str) else (system.name, system.label)
        print(f"  {label}, {what}: {why}", file=sys.stderr)
        self.failures.append({"campaign": self.campaign, "system": name, "what": what, "why": str(why)})

    def keep(self, what: str, kind: str, system: System | str, number: int, **found: Any) -> None:
        name = system if isinstance(system, str) else system.name
        row = {"campaign": self.campaign, "what": what, "kind": kind, "system": name, "round": number}
        row |= {"load": round(os.getloadavg()[0], 2), "neighbours": round(self.neighbours.share(), 3)}
        self.rows.append({**row, **found})


class Members:
    """The groups of a batch; one that fails leaves it, and the failure is kept."""

    def __init__(self, bench: Bench, what: str) -> None:
        self._bench, self._what = bench, what
        self.groups: dict[str, Group] = {}

    def of(self, *has: str) -> list[Group]:
        return [group for group in self.groups.values() if group.job.system.has.issuperset(has)]

    def each(self, number: int, do: Callable[[Group], None], *has: str) -> None:
        """Do it with every group in turn; who goes first changes from round to round."""
        groups = self.of(*has)
        cut = number % len(groups) if groups else 0
        for group in groups[cut:] + groups[:cut]:
            self._bench.neighbours.wait_quiet(NEIGHBOURS, self._bench.quiet_s)
            try:
                do(group)
            except BenchError as error:
                self._bench.failed(group.job.system, self._what, error)
                del self.groups[group.job.system.name]
                group.__exit__()


@contextmanager
def opened(bench: Bench, what: str, jobs: Sequence[Job]) -> Iterator[Members]:
    """Start the systems of a batch; those that do not start are told of."""
    members = Members(bench, what)
    with ExitStack() as stack:
        stack.callback(lambda: _end(list(members.groups.values())))

        for job in jobs:
            environment = bench.environments[job.system.peer] if job.system.peer else None
            if environment and environment.failure:
                bench.failed(job.system, what, f"not installed: {environment.failure}")
            else:
                members.groups[job.system.name] = Group(job, environment)
        for phase in (Group.start_host, Group.start_ranks, Group.wait_ready):
            members.each(0, phase)
        yield members


def _end(groups: Sequence[Group]) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda group: group.__exit__(), groups))


def batches(bench: Bench, jobs: Sequence[Job]) -> Iterator[Sequence[Job]]:
    """As many systems together as there is memory for; all take their turns in one round."""
    free = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    room = 0.7 * int(free.split()[1]) * 1024
    batch: list[Job] = []
    for job in jobs:
        need = (COPIES_IN_MEMORY + COPIES_OF_A_REPLICA * job.replicas) * job.nbytes * job.world_size
        if batch and (len(batch) + 1) * need > room:
            yield batch
            batch = []
        batch.append(job)
    if batch:
        yield batch


def measure_saves(bench: Bench, kind: str) -> None:
    """Blocked by saves at once, the first and the later ones; of the plain state also memory, and kill -9."""
    jobs = [Job(system, kind, bench.nbytes, KINDS[kind]) for system in bench.systems]
    for members, before in batches_at_work(bench, f"{kind}, at once", jobs):
        for number in range(bench.rounds + 1):
            members.each(number, partial(_save, bench, number))
        if kind == "plain":
            members.each(0, partial(_memory, bench, before))
            for number in range(bench.survivals):
                members.each(number, partial(_survive, bench, number), "survives")


def measure_training(bench: Bench) -> None:
    """The same model trains: what a save costs it, overlapped where a system can."""
    jobs = [Job(system, "plain", bench.nbytes, 1, overlapped="overlapped" in system.has) for system in bench.systems]
    for members, _ in batches_at_work(bench, "plain, training", jobs):
        members.each(0, partial(calibrate, bench))
        members.each(0, partial(_save, bench, 0))
        for number in range(bench.rounds):
            members.each(number, partial(_train, bench, number))


def measure_firsts(bench: Bench, kind: str) -> None:
    """More first saves, each of systems that are made again."""
    jobs = [Job(system, kind, bench.nbytes, KINDS[kind]) for system in bench.systems]
    for number in range(bench.rounds):
        for members, _ in batches_at_work(bench, f"{kind}, first save, {number + 1} of {bench.rounds}", jobs):
            members.each(number, partial(_save, bench, 0, made=number + 1))


def batches_at_work(bench: Bench, what: str, jobs: Sequence[Job]) -> Iterator[tuple[Members, dict[str, MemoryPeak]]]:
    """Each batch, prepared and settled, with the memory of its trainers before they save."""
    for batch in batches(bench, jobs):
        with opened(bench, what, batch) as members:
            print(f"{what}: {', '.join(group.job.system.label for group in members.groups.values())}", file=sys.stderr)
            before = {name: MemoryPeak([rank.pid for rank in group.ranks]) for name, group in members.groups.items()}
            members.each(0, partial(_prepare, bench))
            time.sleep(bench.settle_s)
            yield members, before


def _prepare(bench: Bench, group: Group) -> None:
    bench.states.setdefault(group.job.kind, {name: group.described[0][name] for name in ("nbytes", "tensors")})
    group.ask("prepare")


def _save(bench: Bench, number: int, group: Group, *, made: int = 0) -> None:
    """Round 0 is the first save of the process, so it has no second try. `made`: how often processes were restarted."""
    what = "blocked_overlapped" if group.job.overlapped else "blocked"
    saves = []
    for repeat in repeats(1 if number == 0 else MOST_REPEATS):
        answers = group.ask("save", step=100 * number + repeat + 1)
        saves.append(
            {
                "ratio": max(answer["blocked"]["adj"] / answer["floor"]["adj"] for answer in answers),
                "wall_ratio": max(answer["blocked"]["wall"] / answer["floor"]["wall"] for answer in answers),
                "floor_s": max(answer["floor"]["adj"] for answer in answers),
                "blocked_s": max(answer["blocked"]["adj"] for answer in answers),
                "done_s": max(answer["done"] for answer in answers),
                "faults": max(answer["blocked"]["faults"] for answer in answers),
            }
        )
    found = {name: median(save[name] for save in saves) for name in saves[0]}
    what = what if number else f"first_{what}"
    bench.keep(what, group.job.kind, group.job.system, number or made, **found, saves=len(saves))


def repeats(most: int, seconds: float = SAVING_S) -> Iterator[int]:
    """So many times, or fewer where it takes longer than so."""
    until = time.monotonic() + seconds
    for repeat in range(most):
        if repeat and time.monotonic() > until:
            return
        yield repeat


def _memory(bench: Bench, before: Mapping[str, MemoryPeak], group: Group) -> None:
    """Two saves, watched; the most memory that any of the ranks took beyond what it had before its first save."""
    with MemoryPeak([rank.pid for rank in group.ranks]) as during:
        for step in (1, 2):
            group.ask("save", step=100 * (bench.rounds + 1) + step)
    nbytes, earlier = group.described[0]["nbytes"], before[group.job.system.name].peaks
    percent = {
        name: max(100 * (now[name] - then[name]) / nbytes for now, then in zip(during.peaks, earlier, strict=True))
        for name in ("own", "helpers", "shared")
    }
    bench.keep("memory", group.job.kind, group.job.system, 0, **percent)


def _survive(bench: Bench, number: int, group: Group) -> None:
    """Kill every worker at the very moment the system calls the save safe; then ask those who come after."""
    step = 100_000 + number
    group.ask("fill", step=step)
    answers = group.ask("safe", step=step)
    group.kill()
    group.start()
    group.ask("prepare")
    restored = group.ask("restore", step=step)
    survived = all(answer["equal"] for answer in restored)
    job, seconds = group.job, max(a["safe"] for a in answers) - min(a["start"] for a in answers)
    floor = max(answer["floor"]["wall"] for answer in answers)
    found = {"seconds": seconds, "ratio": seconds / floor, "floor_s": floor}
    bench.keep("survives", job.kind, job.system, number, survived=survived, **found)
    if survived:
        bench.keep("restore", job.kind, job.system, number, **_restore_figures(restored))
    else:
        bench.failed(job.system, f"{job.kind}, kill -9", f"step {step} did not survive; found {restored[0]['found']}")


def _restore_figures(answers: Sequence[Row]) -> Row:
    return {
        "ratio": max(answer["restore"]["adj"] / answer["floor"]["adj"] for answer in answers),
        "seconds": max(answer["restore"]["wall"] for answer in answers),
        "floor_s": max(answer["floor"]["adj"] for answer in answers),
        "faults": max(answer["restore"]["faults"] for answer in answers),
    }


def calibrate(bench: Bench, group: Group) -> None:
    """The floor is asked first, and tells it for all."""
    bench.tokens = bench.tokens or first(group, "calibrate", least_ratio=COMPUTE_RATIO)["tokens"]


def _train(bench: Bench, number: int, group: Group) -> None:
    job, window = group.job, {"steps": bench.window_steps, "tokens": bench.tokens}
    floors, without, saves, ratios = [], [], [], []
    counted, disturbed, until = 0.0, 0, time.monotonic() + DISTURBED * WINDOWS_S
    while len(saves) < bench.windows and counted < WINDOWS_S and time.monotonic() < until and not is_known(ratios):
        if len(saves) % _WINDOWS_A_FLOOR == 0 or not without:
            floors += group.ask("floor")
            without += group.ask("train", **window)
        bench.neighbours.begin()
        began, step = time.monotonic(), 100_000 * (number + 1) + 100 * (len(saves) + disturbed)
        (with_save,) = group.ask("train", **window, save_steps=[0], first_save=step, until_done=True)
        (plain,) = group.ask("train", **window)
        if bench.neighbours.share() > NEIGHBOURS and bench.quiet_s:
            disturbed += 1
            bench.neighbours.wait_quiet(NEIGHBOURS, bench.quiet_s)
            without += group.ask("train", **window)
            continue
        counted += time.monotonic() - began
        saves.append(
            with_save | {"lost": {clock: time_lost(with_save, [without[-1], plain], clock) for clock in CLOCKS}}
        )
        ratios.append(saves[-1]["lost"]["wall"] / floors[0]["wall"])
        without.append(plain)
    if not saves:
        bench.failed(job.system, "training", f"round {number}: other processes were busy all the time")
        return
    floors += group.ask("floor")
    floor = {clock: median(each[clock] for each in floors) for clock in CLOCKS}
    lost = {clock: median(save["lost"][clock] for save in saves) for clock in CLOCKS}
    error = error_of_median(ratios)
    bench.keep(
        "lost",
        job.kind,
        job.system,
        number,
        ratio=lost["wall"] / floor["wall"],
        adj_ratio=lost["adj"] / floor["adj"],
        seconds=lost["wall"],
        floor_s=floor["wall"],
        error=error if math.isfinite(error) else None,
        blocked_ratio=median(sum(save["blocked"]) for save in saves) / floor["adj"],
        steps=[len(save["wall"]) for save in saves],
        whole=all(save["done"] for save in saves),
        disturbed=disturbed,
        step_s=median(each for plain in without for each in plain["wall"]),
        compute_s=median(each for plain in without for each in plain["compute"]),
    )
    _train_with_a_save_each_step(bench, number, group)


def _train_with_a_save_each_step(bench: Bench, number: int, group: Group) -> None:
    steps = _STEPS_WITH_SAVES
    window = {"steps": steps, "tokens": bench.tokens}
    (before,) = group.ask("train", **window)
    (every,) = group.ask("train", **window, save_steps=list(range(steps)), first_save=100_000 * (number + 1) + 90_000)
    (after,) = group.ask("train", **window)
    ratio = median(every["wall"]) / median(before["wall"] + after["wall"])
    mean_ratio = 2 * sum(every["wall"]) / sum(before["wall"] + after["wall"])
    bench.keep("every_step", group.job.kind, group.job.system, number, ratio=mean_ratio, median_ratio=ratio)


def is_known(values: Sequence[float]) -> bool:
    """Whether the median of these, in copies of the state, is known well enough."""
    return len(values) >= _LEAST_WINDOWS and error_of_median(values) <= max(KNOWN, KNOWN_SHARE * abs(median(values)))


def error_of_median(values: Sequence[float]) -> float:
    """Standard error, from the middle half of the values: one that was disturbed does not count."""
    if len(values) < _LEAST_WINDOWS:
        return math.inf
    low, _, high = quantiles(values, n=4)
    return 1.253 * (high - low) / 1.349 / math.sqrt(len(values))


def time_lost(with_save: Row, without: Sequence[Row], clock: str) -> float:
    """Seconds that the steps with a save took beyond as many without."""
    step = mean(each for window in without for each in window[clock])
    return sum(with_save[clock]) - len(with_save[clock]) * step


def first(group: Group, op: str, **arguments: Any) -> Row:
    """Ask only the first rank."""
    group.ranks[0].ask(op, **arguments)
    return group.ranks[0].answer(time.monotonic() + 120)


def order(systems: Sequence[System]) -> list[System]:
    """The floor first, so that it is in the first batch and the length of a step is found with it."""
    return sorted(systems, key=lambda system: system.name != MEMCPY)
