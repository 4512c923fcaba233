"""What the processes of a job hold while faults strike it, one after another: threads, descriptors and memory."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from made_events import events_of

from hyperpod_ext.runtime.events.phases import spans, totals

MEASURES = ("threads", "fds", "rss_mib")
WINDOW = 10
"""Faults before the one of which the table tells: what is held goes up and down with each."""
LASTING = {"agent": 2, "memory server": 2, "zygote": 2, "trainer": 1}
"""How many processes live through all faults. The trainer is that of the rank which is never killed."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Every process of a job at one moment of the log's clock."""

    t: float
    held: dict[int, dict[str, float]]


class Watched:
    """A job that runs, looked at again and again until it ends."""

    def __init__(self, running: Any) -> None:
        self.samples: list[Sample] = []
        self._roles: dict[int, str] = {agent.pid: "agent" for agent in running.agents}
        while True:
            try:
                running.agents[0].wait(0.2)
                break
            except subprocess.TimeoutExpired:
                held = {pid: seen for pid in running.processes() if (seen := self._measure(pid)) is not None}
                self.samples.append(Sample(time.monotonic(), held))
        self.report: dict[str, Any] = running.wait()
        self.events: list[dict[str, Any]] = list(running.events())
        for event in self.events:
            if event["event"] == "worker_started":  # the fork server's command line is its children's, too
                self._roles[event["pid"]] = "trainer"
        self.faults = [event["t"] for event in self.events if event["event"] == "fault"]
        # while they train: not those before the first step, nor after the last
        begun, done = (next(e["t"] for e in events if e["event"] == kind) for events, kind in self._both_ways())
        self.samples = [sample for sample in self.samples if begun < sample.t < done]

    def _both_ways(self) -> Iterable[tuple[Iterable[dict[str, Any]], str]]:
        return (self.events, "begun"), (reversed(self.events), "step")

    def _measure(self, pid: int) -> dict[str, float] | None:
        try:
            if (
                self._roles.get(pid, "zygote") == "zygote"
            ):  # or it has the words of what started it, and not yet its own
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                self._roles[pid] = "memory server" if b"memory_server" in words else "zygote"
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            fds = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            return {"threads": int(status["Threads"]), "fds": fds, "rss_mib": int(status["VmRSS"].split()[0]) / 1024}
        except (OSError, KeyError):  # it has ended
            return None

    # --- tables ---------------------------------------------------------------------------------

    def rows(self) -> Iterable[str]:
        """What each kind of process held at a tenth of the faults, at half of them and at the last."""
        count = len(self.faults)
        yield "threads/descriptors/MiB (most of one process, the upper quartile of ten faults)"
        yield f"{'fault':>16}" + "".join(f"{role:>20}" for role in LASTING)
        for number in sorted({max(WINDOW + 1, count // 10), count // 2, count}):
            window = [s for s in self.samples if self.faults[number - 1 - WINDOW] <= s.t <= self._after(number)]
            cells = []
            for role in LASTING:
                most = [self._most(sample, role) for sample in window]
                cells.append("/".join(f"{high(one[m] for one in most if one):.0f}" for m in MEASURES))
            yield f"{number:>16}" + "".join(f"{cell:>20}" for cell in cells)

    def _after(self, number: int) -> float:
        return self.faults[number] if number < len(self.faults) else self.samples[-1].t

    def _most(self, sample: Sample, role: str) -> dict[str, float]:
        held = [seen for pid, seen in sample.held.items() if self._roles[pid] == role]
        return {measure: max(seen[measure] for seen in held) for measure in MEASURES} if held else {}

    def phase_rows(self) -> Iterable[str]:
        """Seconds of a recovery by phase, the medians of each third of them; and where all ranks' time went."""
        recoveries = self.report["recoveries"]
        names = list(recoveries[0]["phases"])
        yield "median seconds of a recovery, and its phases"
        yield f"{'recoveries':>16}" + "".join(f"{name:>17}" for name in ["seconds", *names])
        for some in thirds(recoveries):
            cells = [median(one["seconds"] for one in some)]
            cells += [median(one["phases"][name] or 0.0 for one in some) for name in names]
            first = recoveries.index(some[0]) + 1
            yield f"{f'{first}-{first + len(some) - 1}':>16}" + "".join(f"{cell:>17.3f}" for cell in cells)
        slowest = sorted(recoveries, key=lambda one: one["seconds"] or 0.0)[-3:]
        for one in slowest:
            yield f"slow: {one['seconds']} s {one['phases']} {one['fault']['cause'][:60]}"
        sums: dict[str, float] = {}
        for of_rank in spans(events_of(self.events)).values():
            for phase, seconds in totals(of_rank).items():
                sums[phase] = sums.get(phase, 0.0) + seconds
        whole = sum(sums.values())
        yield "of all ranks' time: " + ", ".join(f"{name} {s / whole:.1%}" for name, s in sums.items() if s)

    # --- judgement ------------------------------------------------------------------------------

    def assert_flat(self) -> None:
        """Compare the second quarter of the run with its last, for every process that lived through both."""
        quarter = len(self.samples) // 4
        early, late = self.samples[quarter : 2 * quarter], self.samples[-quarter:]
        lasting = set.intersection(*(set(sample.held) for sample in self.samples[quarter:]))
        roles = [self._roles[pid] for pid in lasting]
        for role, count in LASTING.items():
            assert roles.count(role) >= count, f"{roles.count(role)} processes lived through all faults as {role}"
        for pid in sorted(lasting, key=lambda pid: self._roles[pid]):
            before, after = ({m: high(s.held[pid][m] for s in some) for m in MEASURES} for some in (early, late))
            print(f"{self._roles[pid]} {pid}:", {m: (round(before[m], 1), round(after[m], 1)) for m in MEASURES})
            # of 200 faults, 100 lie between the two: one descriptor in thirty that stayed would be seen. A memory
            # server has a thread for each connection, and short ones come and go
            assert after["threads"] <= before["threads"] + 2
            assert after["fds"] <= before["fds"] + 3
            assert after["rss_mib"] <= before["rss_mib"] * 1.01 + 3


def thirds(of: Sequence[Any]) -> list[Sequence[Any]]:
    """Three parts in order, of the same length or almost."""
    cuts = [round(len(of) * part / 3) for part in range(4)]
    return [of[low:high] for low, high in pairwise(cuts)]


def median(values: Iterable[float]) -> float:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else 0.0


def high(seen: Iterable[float]) -> float:
    """The upper quartile: with groups open, which they are most of the time; not the moment of a thread that helps to
    close them, or that serves a connection which ends. A run of 20 faults has 20 samples a quarter: of those the 95th
    percentile is the highest, so that one such moment made it."""
    return statistics.quantiles(seen, n=4)[-1]
