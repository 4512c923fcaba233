"""Scripts as people write them, struck by faults: what they end with is bit for bit what PyTorch alone makes of them,
undisturbed; or the job ends at once, and names what the script has left out of `run.restore`.

`HPX_SCRIPT_SEED=17 pytest tests/faults/test_random_scripts.py -k asked` runs one alone, 1000:1400 all of those with the
kinds of state in `random_kinds`, in about half an hour with `-n 2` on two cores that do nothing else, and
`python tests/support/random_scripts.py 17` prints its script, whose first line says what it has, and which faults
strike it.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import plain_run
import pytest
from event_log import events_in
from random_scripts import Script, drawn

pytestmark = pytest.mark.slow

PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "torch.utils.data"]
BUDGETS = dict.fromkeys(("max_restarts", "max_in_process", "max_on_node"), 50)


def described(script: Script, file: Path, *faults: str) -> dict[str, Any]:
    file.write_text(script.text())
    tiers = [{"kind": "memory", "every_steps": script.every_steps}]
    settings: dict[str, Any] = {"restart": {"preload": PRELOAD, **BUDGETS}}
    if script.lost_node is not None:  # shards of a lost node are in another's memory
        # at a low priority, a copy may take longer than all steps before the loss if no core is idle
        tiers.append({"kind": "peer", "every_steps": script.every_steps, "max_slowdown": 1.0})
    if script.lost_node is not None and faults:
        node, step = script.lost_node
        settings["chaos"] = {"faults": [{"node": node, "step": step}]}
    return {
        "script": file,
        "nodes": script.nodes,
        "spares": int(script.lost_node is not None),
        "workers_per_node": script.ranks // script.nodes,
        "settings": settings | {"checkpoint": {"tiers": tiers, "overlap": script.overlap}},
        "env": {"HPX_CHAOS": ";".join(faults)} if faults else {},
    }


def ends(folder: Path, ranks: int) -> list[dict[str, str]]:
    return [json.loads((folder / f"end-{rank}.json").read_text()) for rank in range(ranks)]


def check(seed: int, job: Any, folder: Path) -> None:
    script = drawn(seed)
    file = folder / "train.py"
    if script.forgotten:
        report = job("forgets", **described(script, file)).start().wait()
        assert report["state"] == "failed", script.traits
        named = rf"\b{script.forgotten}[.\w]* \(.*in no snapshot"
        assert re.search(named, report["error"]["message"]), (script.traits, report["error"])
        return
    if script.warned:
        report = job("carries on", **described(script, file)).start().wait()
        assert any(re.search(script.warned, each) for each in report["in_no_snapshot"]), (
            script.traits,
            report["error"],
        )
        return
    disturbed = job("disturbed", **described(script, file, *script.faults)).start()
    report = disturbed.wait()
    told = f"seed {seed}: {script.kinds or script.traits}: {report['error']}"
    if script.refused or refuses(script, report, disturbed):
        assert report["state"] == "failed", told
        named = "|".join(filter(None, [script.refused, *script.refusable]))
        assert re.search(named, report["error"]["message"]), told
        return
    warned = [*report["in_no_snapshot"], *report["unseeded_loaders"]]
    if script.may_warn and any(re.search(script.may_warn, each) for each in warned):
        return
    assert report["state"] == "succeeded", told
    # one that is due in a phase that its step does not come to strikes nobody
    assert len(report["recoveries"]) >= 1, script.traits
    losses = plain_run.run(file, script.ranks, folder / "plain")
    pairs = zip(ends(disturbed.folder, script.ranks), ends(folder / "plain", script.ranks), strict=True)
    differ = [name for one, other in pairs for name in one | other if one.get(name) != other.get(name)]
    assert not differ, f"{told} {sorted(set(differ))} differ"
    assert report["losses"] == losses, told
    assert report["in_no_snapshot"] == [], f"{told}: all that changes was handed over"


def refuses(script: Script, report: dict[str, Any], job: Any) -> bool:
    """Whether the job has ended before its third step, because of a kind that it may refuse. Two steps of one process
    are compared, and one that is replaced in them begins again."""
    faults = [int(each) for each in re.findall(r"step=(\d+)", ";".join(script.faults))]
    faults += [] if script.lost_node is None else [script.lost_node[1]]
    first_kept = 3
    for step in sorted(faults):
        first_kept = step + 2 if step <= first_kept else first_kept
    if "an optimizer's step every other step" in script.traits:  # only its steps are committed
        first_kept *= 2
    made = [each["step"] for each in events_in(job.folder / "events.jsonl") if each["event"] == "step"]
    return bool(script.refusable) and report["state"] == "failed" and max(made, default=0) < first_kept


def asked() -> range:
    """Seeds that `HPX_SCRIPT_SEED` names: 17, or 300:400."""
    first, _, end = os.environ.get("HPX_SCRIPT_SEED", "0:0").partition(":")
    return range(int(first), int(end or int(first) + 1))


SEEDS = [1, 2, 3, 4, 6, 7, 307, 340, 1004, 1007, 1015, 1018]
"""Between them they have nine of ten traits of the first 16 and of those below. Two are a stranger's: a loader that
reads on, a mean carried on. Four are of `random_kinds`: epochs and types of values, a growing buffer and experts,
sparse gradients, unfrozen parameters."""
THOROUGH = {*range(16), *range(16, 200, 4), *range(300, 316), 321, *range(1000, 1038)}
SOAK = {*range(16, 200), *range(1000, 1400)} - THOROUGH


@pytest.mark.parametrize("seed", asked())
def test_the_scripts_that_were_asked_for(seed, job, tmp_path):
    check(seed, job, tmp_path)


@pytest.mark.parametrize("seed", SEEDS)
def test_scripts_of_all_kinds_end_as_if_nothing_had_happened(seed, job, tmp_path):
    check(seed, job, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "seed", [*sorted(THOROUGH - {*SEEDS}), *(pytest.param(seed, marks=pytest.mark.soak) for seed in sorted(SOAK))]
)
def test_more_of_them(seed, job, tmp_path):
    check(seed, job, tmp_path)


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [214, 223, 240])
def test_compiled_scripts_and_lost_nodes(seed, job, tmp_path):
    """A compiled model, and a lost node under DDP and under FSDP2."""
    script = drawn(seed)
    assert "torch.compile" in script.traits or script.lost_node is not None
    check(seed, job, tmp_path)
