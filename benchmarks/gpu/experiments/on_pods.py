"""P6, P7: a job on pods of HyperPod EKS, several ranks on one GPU, under our agent and under AWS's `hyperpodrun`.

The operator is the stand-in that the tests on CPU have. Seconds are as in docs/benchmarks/operator.md: from the last
step before a fault to the first new one, less an ordinary step.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lane import Lane
from product import RANK, job_environment, require_wheels
from results import FailedError, Figure, Figures, NotRunError

STEP = 12
FAULTS: Mapping[str, Mapping[str, Any]] = {
    "exception": {"fault": {"what": "exception", "rank": RANK, "step": STEP}},
    "kill -9": {"kill": "rank"},
    "an index that is too large": {"fault": {"what": "illegal access", "rank": RANK, "step": STEP}},
    "lost pod": {"kill": "pod"},
}
_PARTS = ("losses", "weights", "metrics")


def ours(lane: Lane) -> Figures:
    return _through(lane, "ours", FAULTS)


def hyperpodrun(lane: Lane) -> Figures:
    return _through(lane, "hyperpodrun", ("exception", "kill -9"))


def _through(lane: Lane, launcher: str, faults: Iterable[str]) -> Figures:
    require_wheels()
    os.environ.update(job_environment(lane))
    os.environ |= {"HPX_TEST_COLD": "1", "HPX_TEST_DEVICE": lane.device}
    with tempfile.TemporaryDirectory() as scratch:
        if launcher == "hyperpodrun":
            _have_hyperpodrun(lane, Path(scratch))
        _, undisturbed = _job(launcher, {})
        figures: Figures = {}
        failed = []
        for fault in faults:
            try:
                seconds, found = _job(launcher, FAULTS[fault])
            except Exception as error:  # what the others take is worth knowing all the same
                failed.append(f"{fault}: {type(error).__name__}: {error}")
                continue
            figures[f"{fault}: fault to the first new step"] = Figure(seconds, "s")
            equal = [part for part in _PARTS if found[part] == undisturbed[part]]
            figures[f"{fault}: equal those of the undisturbed run"] = Figure(", ".join(equal) or "nothing")
            print(f"{fault}: {seconds}, {equal}", flush=True)
        if failed:
            raise FailedError("\n".join(failed), figures)
        assert not lane.fake or all(str(of.value) == ", ".join(_PARTS) for of in figures.values() if not of.unit)
        return figures


def _job(launcher: str, its: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
    """Seconds of its fault, and what it came to."""
    from operator_page import gaps_of
    from random_pods import Kill, pods

    kill = its.get("kill")
    which = {"rank": RANK, "pod": 1}
    kills = [Kill(kill, which[kill], STEP, 0.0, beside=False, comes_back=False)] if kill else []
    with pods(launcher, hang={"enabled": False}, replenished=False, fault=its.get("fault", {})) as running:
        running.run(kills, spares=int(kill == "pod"))
        steps = [event for event in running.events() if event["event"] == "step"]
        gaps = gaps_of(steps, "generation")
        assert len(gaps) == bool(its), f"the job had {len(gaps) + 1} generations"
        return max(gaps, default=0.0), running.report()


def _have_hyperpodrun(lane: Lane, folder: Path) -> None:
    """Where there is no package index its wheels are brought, as others are."""
    if importlib.util.find_spec("hyperpod_elastic_agent") is None:
        if not lane.fake:
            raise NotRunError("hyperpod-elastic-agent is not installed")
        return
    import random_pods
    from hyperpodrun_env import START

    program = folder / "hyperpodrun"
    program.write_text(f"#!{sys.executable}\n{START}")
    program.chmod(0o755)
    random_pods.hyperpodrun = lambda: program
