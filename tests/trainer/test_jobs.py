"""examples/20-trainer through kills: losses and weights are, bit for bit, those of a run without a fault."""

from __future__ import annotations

import json
from pathlib import Path

import fsdp2
import pytest
from command import hp_ext
from local_place import LocalPlace

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "20-trainer"
RANKS_OF_TP = ("--set", "workers_per_node=2", "--set", "parallelism.tensor=2")
CASES: dict[str, tuple[list[str], tuple[str, ...], list[str]]] = {
    "llama, FSDP2": (["--shape", "llama-tiny"], (), ["rank=1@step=4", "rank=0@step=9"]),
    "llama, TP over 2 of 4 ranks": (["--tensor", "2"], RANKS_OF_TP, ["rank=2@step=5"]),
    "moe": (["--shape", "moe-tiny"], (), ["rank=1@step=5"]),
    "moe, TP, bfloat16, recomputed": (
        ["--shape", "moe-tiny", "--tensor", "2", "--bf16", "--recompute"],
        RANKS_OF_TP,
        ["rank=1@step=5", "rank=2@step=9"],
    ),
    "llama, compiled, bfloat16, recomputed": (["--compile", "--bf16", "--recompute"], (), ["rank=1@step=5"]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_kill_changes_no_bit(tmp_path: Path, place: LocalPlace, case: str) -> None:
    fsdp2.skip_without_cpus()
    arguments, settings, kills = CASES[case]
    arguments = [*arguments, "--steps", "12", "--evaluate-every", "6", "--folder", str(tmp_path)]
    done = hp_ext(
        *("create-job", "-f", EXAMPLE / "job.yaml", "--target", "local", "--wait", "-o", "json"),
        *("--set", f"args={json.dumps(arguments)}", *settings),
        *(word for kill in kills for word in ("--kill", kill)),
        timeout_s=800.0,
    )
    assert done.code == 0, done.stderr
    report = done.json
    assert (report["state"], report["loss_equal"], report["weights_equal"]) == ("succeeded", True, True)
    assert [f"rank={each['fault']['rank']}@step={each['fault']['step']}" for each in report["recoveries"]] == kills
    assert all(each["survivor_pids_kept"] for each in report["recoveries"]), "the model is kept"
    assert len(set(report["losses"].values())) == 12
    assert report["losses"]["12"] < report["losses"]["1"] - 0.3, "it learns"
    assert report["metrics"]["held_out_loss"] is not None
