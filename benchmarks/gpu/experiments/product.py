"""P1 to P5: jobs of the product, several workers on one GPU, through exceptions and `kill -9`.

P1 and P2 are examples with DDP and FSDP2; P3 and P4 are `jobs/train.py`, P5 those of Lightning, Transformers and
Accelerate, each with the real package.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lane import Lane
from machine import how_to_bring, missing_wheels
from results import Figure, Figures, NotRunError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
JOB = HERE.parent / "jobs" / "job.yaml"
TRAINERS = {"15-lightning": "lightning", "16-hugging-face": "transformers", "17-accelerate": "accelerate"}
"""By example, the package that it needs."""
RANK, STEPS = 2, 20
"""Where faults are injected, and optimizer steps of each job."""
STEP_OF = {"exception": 8, "kill -9": 13}
"""In which step, so that one job can have both."""
_HP_EXT = """
import sys, hyperpod_ext
hyperpod_ext.__path__.append(sys.argv.pop(1))
from hyperpod_ext.cli import main
main()
"""
"""`hp-ext` of a checkout that is not installed."""


def kill_at(step: int) -> str:
    """The change of a job in which a rank is killed in that step."""
    return f'chaos.faults=[{{"kind": "kill", "rank": {RANK}, "step": {step}}}]'


FAULTS = {
    "exception": f'chaos.inject=[{{"kind": "exception", "rank": {RANK}, "step": {STEP_OF["exception"]}, '
    '"phase": "backward"}]',
    "kill -9": kill_at(STEP_OF["kill -9"]),
}


def late_step(lane: Lane) -> int:
    """Where a warm spare should be ready; on CPU there is none to wait for."""
    return 30 if lane.fake else 150


def ddp(lane: Lane) -> Figures:
    return _through_faults(lane, "01-local")


def fsdp2(lane: Lane) -> Figures:
    return _through_faults(lane, "03-sharded")


def compiled(lane: Lane) -> Figures:
    require_wheels()
    changes = [f"args={json.dumps(['--compiled', '--device', lane.device])}", *FAULTS.values(), "chaos.compare=true"]
    with tempfile.TemporaryDirectory() as home:
        return _checked(lane, run_spec(lane, JOB, changes, Path(home)))


def cuda_errors(lane: Lane) -> Figures:
    """In-process after memory that is not there; another process after an index that is too large."""
    require_wheels()
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        undisturbed = run_spec(lane, JOB, [f"args={json.dumps(['--device', lane.device])}"], Path(first))
        found = run_spec(lane, JOB, [f"args={json.dumps(['--errors', '--device', lane.device])}"], Path(second))
        processes = _processes(Path(second))
    equal = {name: found[part] == undisturbed[part] for name, part in (("loss", "losses"), ("weights", "weights"))}
    causes = [recovery["fault"]["cause"] for recovery in found["recoveries"]]
    assert "out of memory" in causes[0], causes
    assert "device-side assert" in causes[1], causes
    assert len(processes[RANK]) == 2, f"rank {RANK} had processes {processes[RANK]}, where one was to be replaced"
    report = dict(found) | {f"{name}_equal": same for name, same in equal.items()}
    return _checked(lane, report, ("memory that is not there", "an index that is too large"))


def trainers(lane: Lane) -> Figures:
    """All at once: each waits for its imports most of the time."""
    require_wheels()
    there = [name for name, package in TRAINERS.items() if importlib.util.find_spec(package) is not None]
    if not there:
        raise NotRunError(f"none of {', '.join(TRAINERS.values())} is installed")

    def run(name: str) -> Mapping[str, Any]:
        with tempfile.TemporaryDirectory() as home:
            return run_spec(lane, ROOT / "examples" / name / "job.yaml", [], Path(home))

    with ThreadPoolExecutor() as pool:
        reports = pool.map(run, there)
        found = [(name, _checked(lane, report, ("kill -9",))) for name, report in zip(there, reports, strict=True)]
    return {f"{TRAINERS[name]}: {what}": figure for name, figures in found for what, figure in figures.items()}


def _processes(home: Path) -> dict[int, list[int]]:
    """Of each rank, the processes that were this rank."""
    from hyperpod_ext.runtime.events.of_training import Joined
    from hyperpod_ext.runtime.events.reading import read_events

    (file,) = home.glob("local/*/*/main/events.jsonl")
    found: dict[int, list[int]] = {}
    for event in read_events(file).all_events().of(Joined):
        pids = found.setdefault(event.rank, [])
        pids += [event.pid] if event.pid not in pids else []
    return found


def _through_faults(lane: Lane, example: str) -> Figures:
    require_wheels()
    with tempfile.TemporaryDirectory() as home:
        return _checked(lane, run_job(lane, example, list(STEP_OF), Path(home)))


def require_wheels() -> None:
    if wheels := missing_wheels():
        raise NotRunError(f"no {', '.join(wheels)}; bring wheels: {how_to_bring(wheels)}")


def _checked(lane: Lane, found: Mapping[str, Any], faults: Collection[str] = tuple(STEP_OF)) -> Figures:
    assert found["steps_lost"] == 0, f"{found['steps_lost']} steps were lost"
    # some of torch's kernels for GPUs add up in any order, so there bits may differ with no fault at all
    equal = bool(found["loss_equal"] and found["weights_equal"])
    assert equal or not lane.fake, "losses or weights differ from those of the undisturbed run"
    figures: Figures = {"losses and weights equal those of the undisturbed run": Figure(equal)}
    for fault, recovery in zip(faults, found["recoveries"], strict=True):
        assert recovery["survivor_pids_kept"], f"{fault}: survivors did not keep their processes"
        figures[f"{fault}: fault to the first new step"] = Figure(float(recovery["seconds"]), "s")
    return figures


def run_job(
    lane: Lane, example: str, faults: Collection[str], home: Path, *, compare: bool = True, warm: bool = False
) -> Mapping[str, Any]:
    """The report of a job on two local nodes with two workers each; `warm`: killed late, with a warm spare.

    Raises:
        RuntimeError: it failed.
    """
    late = late_step(lane)
    arguments = json.dumps(["--steps", str(late + 10 if warm else STEPS), "--device", lane.device])
    changes = [FAULTS[fault] for fault in faults]
    if warm:
        changes = [kill_at(late), "restart.warm_spares=true"]
    changes = [f"args={arguments}", "chaos.faults=[]", *changes, f"chaos.compare={str(compare).lower()}"]
    return run_spec(lane, ROOT / "examples" / example / "job.yaml", changes, home)


def run_spec(lane: Lane, spec: Path, changes: Collection[str], home: Path) -> Mapping[str, Any]:
    """The report of this job with these changes, on local nodes.

    Raises:
        RuntimeError: it failed.
    """
    command = [sys.executable, "-c", _HP_EXT, str(ROOT), "create-job", "-f", str(spec)]
    command += ["--target", "local", "--wait", "-o", "json"]
    for change in changes:
        command += ["--set", change]
    environment = job_environment(lane) | {"HPX_HOME": str(home)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        logs = "".join(map(_end_of, sorted(home.glob("local/*/*/main/logs/rank*.log"))))
        raise RuntimeError(f"{spec}, {' and '.join(changes)}: exit code {done.returncode}\n{done.stderr[-3000:]}{logs}")
    report: Mapping[str, Any] = json.loads(done.stdout)
    return report


def _end_of(log: Path) -> str:
    return "".join(f"\n{log.stem}: {line[:300]}" for line in log.read_text(errors="replace").splitlines()[-8:])


def job_environment(lane: Lane) -> dict[str, str]:
    """Of a job whose workers share a GPU; the product sets what else it needs of NCCL itself."""
    ours = [str(ROOT)] if lane.fake else [str(ROOT), str(HERE.parent / "one_gpu")]
    given = os.environ["PYTHONPATH"].split(os.pathsep)
    others = [one for one in given if one != str(ROOT) and not one.startswith(str(ROOT / "tests"))]
    return lane.environment(None, recovery=False) | {"PYTHONPATH": os.pathsep.join([*ours, *others])}
