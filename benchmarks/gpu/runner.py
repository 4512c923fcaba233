"""Runs a plan: one experiment after the other, each in a process of its own, and records what it found.

A process that hangs or dies is ended with all that it has started, and the plan goes on. Results are written before
and after each experiment, so what was found is not lost when the plan itself is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from catalog import Experiment
from lane import Lane, lane_of
from results import NO_TIME, Result, Results, Row, read

from hyperpod_ext.processes import become_subreaper, descendants, is_alive

HERE = Path(__file__).resolve().parent
_LAST_LINES = 40
_LONGEST_LINE = 400
_GRACE_S = 10.0
"""For processes that were killed to be gone: the driver takes their memory back first."""
_ENDED = "the plan ended while it ran"


class PlanError(Exception):
    """The plan cannot begin."""


class Plan:
    """Experiments of one command.

    Args:
        experiments: all of them; the page has a row for each.
        chosen: names of those to run.
        limit_s: seconds for all of them. An experiment whose own limit does not fit into what is left is not begun.
        again: run what was run before, too.
    """

    def __init__(
        self,
        experiments: Sequence[Experiment],
        chosen: Collection[str],
        *,
        out: Path,
        fake: bool,
        limit_s: float,
        again: bool = False,
    ) -> None:
        self._experiments, self._chosen, self._again = experiments, chosen, again
        self._out, self._fake, self._deadline = out, fake, time.monotonic() + limit_s
        machine = _machine()
        self._lanes = {one.name: lane_of(machine, fake=fake, shared=one.shared) for one in experiments}
        rows: Sequence[Row] = experiments
        self.results = Results("fake" if fake else "GPU", machine, rows, self._earlier())

    def _earlier(self) -> dict[str, Result]:
        earlier = read(self._out)
        if earlier is None:
            return {}
        lane, found = earlier
        if lane != ("fake" if self._fake else "GPU"):
            raise PlanError(f"{self._out} has results of lane {lane}; name another folder with --out")
        return found

    def run(self) -> None:
        """Everything that is to be run; what was not is recorded with its reason."""
        become_subreaper()
        with tempfile.TemporaryDirectory(prefix="gpu-") as scratch:
            for one in self._experiments:
                if self._is_due(one):
                    self._record(one, self._result_of(one, Path(scratch)))
        self.results.write(self._out)

    def _is_due(self, one: Experiment) -> bool:
        return one.name in self._chosen and (self._again or self.results.of(one.name).outcome == "not run")

    def _result_of(self, one: Experiment, scratch: Path) -> Result:
        lane, left_s = self._lanes[one.name], self._deadline - time.monotonic()
        if one.limit_s > left_s:
            return Result("not run", NO_TIME)
        self.results.found[one.name] = Result("not run", _ENDED)
        self.results.write(self._out)
        return run_experiment(one.name, one.module, lane, min(one.limit_s * lane.patience, left_s), scratch)

    def _record(self, one: Experiment, result: Result) -> None:
        self.results.found[one.name] = result
        self.results.write(self._out)
        print(self.results.text(one.name), flush=True)


def run_experiment(name: str, module: str, lane: Lane, limit_s: float, scratch: Path) -> Result:
    """In a process of its own, of which nothing is left."""
    file, log = scratch / f"{name}.json", scratch / f"{name}.log"
    command = [sys.executable, str(HERE / "experiment.py"), module, lane.to_json(), str(file), str(os.getpid())]
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=_environment(scratch), stdout=output, stderr=output, start_new_session=True
        )
    with _ended(process) as left:
        why = _wait(process, limit_s)
    seconds, lines = round(time.monotonic() - began, 1), _last_lines(log)
    lines += _of_driver(began)
    if not file.exists():
        return Result("failed", why, seconds=seconds, output=lines)
    found = Result.from_json(json.loads(file.read_text()))
    if left:
        why = f"{len(left)} processes that it started could not be ended within {_GRACE_S:g} s of SIGKILL"
        return Result("failed", why, found.figures, seconds, lines)
    return Result(found.outcome, found.reason, found.figures, seconds, lines if found.outcome == "failed" else ())


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> str:
    """Until it ends, or its time is over: why it left no result, if it leaves none."""
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"no result within its {limit_s:g} s"
    return f"it ended with exit code {code}" if code >= 0 else f"it was ended by {signal.Signals(-code).name}"


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """At the end of the block everything below this process is killed; gives what could not be."""
    left: list[int] = []
    try:
        yield left
    finally:
        deadline = time.monotonic() + _GRACE_S
        while (living := _living()) and time.monotonic() < deadline:
            for pid in living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        left += living
        process.poll()


def _living() -> list[int]:
    """Descendants of this process that run. Those that have ended are reaped: as a subreaper it inherits them."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return [pid for pid in descendants(os.getpid()) if is_alive(pid)]


def _environment(scratch: Path) -> Mapping[str, str]:
    """Modules of these folders can be imported, installed or not; files go where they are removed."""
    folders = (HERE, HERE / "experiments", HERE.parents[1], HERE.parents[1] / "tests" / "support", HERE.parent / "cpu")
    path = os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    return os.environ | {"PYTHONPATH": path, "TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"}


def _machine() -> Mapping[str, str]:
    command = [sys.executable, str(HERE / "machine.py")]
    environment = _environment(Path(tempfile.gettempdir()))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PlanError(f"{sys.executable} cannot say what is here: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def _of_driver(since: float) -> list[str]:
    """What NVIDIA's driver has told the kernel meanwhile, where this process may read that: an Xid names what happened
    on the GPU.

    Args:
        since: seconds of the machine's monotonic clock, as the kernel's lines begin with.
    """
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return []
    return [line[:_LONGEST_LINE] for line in done.stdout.splitlines() if "NVRM" in line and _time_of(line) >= since]


def _time_of(line: str) -> float:
    found = re.match(r"\[ *([0-9.]+)\]", line)
    return float(found[1]) if found else 0.0


def _last_lines(log: Path) -> list[str]:
    with log.open(errors="replace") as lines:
        return [line.rstrip("\n")[:_LONGEST_LINE] for line in deque(lines, _LAST_LINES)]
