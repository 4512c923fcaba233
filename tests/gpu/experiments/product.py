"""P1, P2: jobs of the product with DDP and FSDP2, several workers on one GPU, through an exception and a `kill -9`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lane import Lane
from machine import how_to_bring, missing_wheels
from results import Figure, Figures, NotRunError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
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
FAULTS = {
    "exception": f'chaos.inject=[{{"kind": "exception", "rank": {RANK}, "step": {STEP_OF["exception"]}, '
    '"phase": "backward"}]',
    "kill -9": f'chaos.faults=[{{"kind": "kill", "rank": {RANK}, "step": {STEP_OF["kill -9"]}}}]',
}


def late_step(lane: Lane) -> int:
    """Where a warm spare should be ready; on CPU there is none to wait for."""
    return 30 if lane.fake else 150


def ddp(lane: Lane) -> Figures:
    return _through_faults(lane, "01-local")


def fsdp2(lane: Lane) -> Figures:
    return _through_faults(lane, "03-sharded")


def _through_faults(lane: Lane, example: str) -> Figures:
    require_wheels()
    with tempfile.TemporaryDirectory() as home:
        return _checked(lane, run_job(lane, example, list(STEP_OF), Path(home)))


def require_wheels() -> None:
    if wheels := missing_wheels():
        raise NotRunError(f"no {', '.join(wheels)}; bring wheels: {how_to_bring(wheels)}")


def _checked(lane: Lane, found: Mapping[str, Any]) -> Figures:
    assert found["steps_lost"] == 0, f"{found['steps_lost']} steps were lost"
    # some of torch's kernels for GPUs add up in any order, so there bits may differ with no fault at all
    equal = bool(found["loss_equal"] and found["weights_equal"])
    assert equal or not lane.fake, "losses or weights differ from those of the undisturbed run"
    figures: Figures = {"losses and weights equal those of the undisturbed run": Figure(equal)}
    for fault, recovery in zip(STEP_OF, found["recoveries"], strict=True):
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
    command = [sys.executable, "-c", _HP_EXT, str(ROOT), "create-job", "-f", f"examples/{example}/job.yaml"]
    command += ["--target", "local", "--wait", "-o", "json", "--set", f"args={arguments}"]
    changes = [FAULTS[fault] for fault in faults]
    if warm:
        killed = f'chaos.faults=[{{"kind": "kill", "rank": {RANK}, "step": {late}}}]'
        changes = [killed, "restart.warm_spares=true"]
    for change in ("chaos.faults=[]", *changes, f"chaos.compare={str(compare).lower()}"):
        command += ["--set", change]
    environment = job_environment(lane) | {"HPX_HOME": str(home)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        logs = "".join(map(_end_of, sorted(home.glob("local/*/*/main/logs/rank*.log"))))
        raise RuntimeError(
            f"{example}, {' and '.join(changes)}: exit code {done.returncode}\n{done.stderr[-3000:]}{logs}"
        )
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
