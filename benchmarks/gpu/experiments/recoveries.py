"""R: seconds from a fault to the end of the first new step, less an ordinary step: the product after an exception
and after a `kill -9`, compared with torchrun with DCP checkpoints, on the same GPU in the same run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from lane import Lane
from product import RANK, STEP_OF, STEPS, job_environment, late_step, require_wheels, run_job
from results import FailedError, Figure, Figures

_TORCHRUN = "kill -9: torchrun with DCP"
_NAME = "first_new_step_less_a_step"
_WANTED_S = {"exception": "0.5 s", "kill -9": "5 s", "kill -9 with a warm spare": "1.5 s"}


def run(lane: Lane) -> Figures:
    require_wheels()
    os.environ.update(job_environment(lane))
    figures: Figures = {}
    failed = []
    for name, measure in (("torchrun with DCP", _torchrun), *((fault, _ours(fault)) for fault in _WANTED_S)):
        try:
            found = measure(lane)
        except Exception as error:  # what the others take is worth knowing all the same
            failed.append(f"{name}: {type(error).__name__}: {error}")
            continue
        figures |= found
        print(f"{name}: {found}", flush=True)  # kept when there is no time for the next
    if failed:
        raise FailedError("\n".join(failed), figures)
    killed_s, torchrun_s = (figures[name].value for name in (_name("kill -9"), _TORCHRUN))
    assert isinstance(killed_s, float)
    assert isinstance(torchrun_s, float)
    return figures | {"kill -9, compared with torchrun with DCP (wanted: 0.2)": Figure(killed_s / torchrun_s)}


def _name(fault: str) -> str:
    return f"{fault} (wanted: {_WANTED_S[fault]})"


def _torchrun(lane: Lane) -> Figures:
    return {_TORCHRUN: Figure(_torchrun_s(lane), "s")}


def _ours(fault: str) -> Callable[[Lane], Figures]:
    def measure(lane: Lane) -> Figures:
        warm = "spare" in fault
        seconds, had_spare = _our_s(lane, fault, warm=warm)
        spare = {"the spare was ready": Figure(had_spare)} if warm else {}
        return spare | {_name(fault): Figure(seconds, "s")}

    return measure


def _our_s(lane: Lane, fault: str, *, warm: bool) -> tuple[float, bool]:
    """Seconds, and whether the new worker was a warm spare."""
    from recovery_report import our_recovery

    from hyperpod_ext.runtime.events.of_training import WorkerStarted
    from hyperpod_ext.runtime.events.reading import read_events
    from hyperpod_ext.runtime.events.report import kept_steps

    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        report = run_job(lane, "01-local", [] if warm else [fault], home, compare=False, warm=warm)
        (file,) = home.glob("local/*/*/main/events.jsonl")
        events = read_events(file).all_events()
        had_spare = any(started.warm for started in events.of(WorkerStarted))
        recovery = our_recovery(report, kept_steps(events), late_step(lane) if warm else STEP_OF[fault])
        return recovery.seconds(_NAME), had_spare


def _torchrun_s(lane: Lane) -> float:
    from recovery_sides import EXAMPLE, Setup, measure_torchrun

    from hyperpod_ext.config.files.load import load
    from hyperpod_ext.config.job.job import JobConfig

    setup = Setup(load(JobConfig, EXAMPLE), STEPS, 128, 4, RANK, STEP_OF["kill -9"], device=lane.device)
    with tempfile.TemporaryDirectory() as scratch:
        return measure_torchrun(setup, Path(scratch)).seconds(_NAME)
