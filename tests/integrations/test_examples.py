"""The examples of other people's training loops, with their real libraries: a kill -9 changes no bit of any loss."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from integrations_env import hp_ext
from killed_twice import AT_ONCE, run_killed, written
from local_place import LocalPlace

from hyperpod_ext.runtime.events.of_training import UNPROTECTED

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(1200)]

EXAMPLES = ("15-lightning", "16-hugging-face", "17-accelerate", "18-titan")
LIBRARIES = ("accelerate", "lightning", "transformers")


def run_example(root: Path, name: str, kill: str) -> dict[str, Any]:
    spec = root / "examples" / name / "job.yaml"
    command = [hp_ext(), "create-job", "-f", spec, "--target", "local", "--wait", "--kill", kill, "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize("kill", ["rank=1@step=7", "rank=0@step=9"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_killed_worker_changes_no_loss(root: Path, name: str, kill: str) -> None:
    report = run_example(root, name, kill)
    assert report["loss_equal"]
    assert report["weights_equal"]
    assert sorted(map(int, report["losses"])) == list(range(1, 21)), "every step tells its loss"
    assert len(set(report["losses"].values())) == 20, "it learns"
    (recovery,) = report["recoveries"]
    assert kill == f"rank={recovery['fault']['rank']}@step={recovery['fault']['step']}"
    assert recovery["survivor_pids_kept"], "the healthy process stayed"
    assert report["steps_lost"] <= 1, "a shard that was still being copied when its rank died is one step older"


def test_a_shuffled_data_loader_of_accelerate_goes_on_after_a_kill(tmp_path: Path) -> None:
    report = run_killed(tmp_path, "accelerate_epochs.py", batch=6, checkpoint=AT_ONCE)
    assert sorted(map(int, report["losses"])) == list(range(1, 17))
    read = {tuple(key): tuple(ids) for *key, ids in written(tmp_path)}
    assert len(read) == 4 * 4 * 2, "a repeated step reads the same samples"
    orders = [[one for key, ids in sorted(read.items()) if key[0] == epoch for one in ids] for epoch in range(4)]
    assert all(sorted(order) == list(range(24)) for order in orders), "each sample once in each epoch"
    assert len(set(map(tuple, orders))) == 4


def test_nothing_else_loads_the_libraries() -> None:
    code = (
        "import sys, hyperpod_ext.cli, hyperpod_ext.runtime.training.loop, hyperpod_ext.runtime.data.loader\n"
        "import hyperpod_ext.integrations.titan\n"
        f"print(sorted(set(sys.modules) & set({LIBRARIES!r})))"
    )
    python = hp_ext().with_name("python")
    assert subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_each_object_that_accelerate_is_given_has_a_name_of_its_own() -> None:
    code = (
        "from hyperpod_ext.integrations.accelerate import _name\n"
        "Ema, Ema2 = type('Ema', (), {}), type('Ema2', (), {})\n"
        "state = {}\n"
        "for thing in (Ema(), Ema(), Ema(), Ema2(), Ema2()):\n"
        "    state[_name(thing, state)] = thing\n"
        "print(*state)"
    )
    python = hp_ext().with_name("python")
    said = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "Ema Ema1 Ema2 Ema21 Ema22\n"


def test_what_cannot_be_done_is_refused_with_a_hint() -> None:
    """None of these is a fault: each is told before a step is made."""
    command = [hp_ext().with_name("python"), Path(__file__).with_name("refused.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    said: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    words = {
        "lightning: a DataLoader": "fit(train_dataloaders=DataLoader)",
        "lightning: devices": "the job sets devices",
        "lightning: no optimizer": "configure_optimizers returned 0 optimizers",
        "lightning: by hand": "Module uses manual optimization",
        "lightning: accumulation": "a step of 4 samples is 2 micro-batches; accumulate_grad_batches is 1",
        "lightning: a broken step": "an epoch of 10 samples is not a multiple of the 4 samples of a step",
        "hugging face: another batch": "the job's global_batch_size is 1",
        "hugging face: a stream": "the dataset has no access to a sample by its number",
        "hugging face: bases": "Sampling.get_train_dataloader hides ResilientTrainer.get_train_dataloader",
        "hugging face: FSDP1": "args.fsdp_config enables FSDP1",
        "hugging face: checkpoints of shards": "transformers cannot save the optimizer of a sharded model",
        "lightning: changing accumulation": "changes accumulate_grad_batches from epoch to epoch",
        "lightning: a checkpoint": "Lightning would load it again after each fault",
        "lightning: no adapter": "SGD.step() was called before the first step of run.steps",
        "accelerate: a DataLoader by itself": "prepare_data_loader(): the loader's position would not be restored",
        "accelerate: registered late": "StepLR was registered after prepare()",
        "accelerate: steps with a DataLoader": "steps() was called before restore()",
        "accelerate: epochs without a DataLoader": "epochs() was called, but prepare() got no DataLoader",
        "accelerate: twice": "prepare() was called twice",
    }
    assert said.keys() == words.keys()
    for case, part in words.items():
        assert part in said[case][0], case
        assert said[case][1], case


@pytest.mark.parametrize("library", ["lightning", "hugging-face", "accelerate"])
def test_a_trainer_without_an_adapter_is_warned_of_before_its_first_step(
    place: LocalPlace, tmp_path: Path, library: str
) -> None:
    shutil.copy(Path(__file__).with_name("unprotected.py"), tmp_path)
    spec = tmp_path / "job.json"
    spec.write_text(json.dumps({"name": "a", "script": "unprotected.py", "args": [library]}))
    command = [hp_ext(), "create-job", "-f", spec, "--wait"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "trains without a @resilient function" in done.stderr
    assert done.stderr.count(UNPROTECTED) == 2, "when it happens, and with the result"
    lines = (place.home / "local" / "a" / "0001" / "main" / "logs" / "rank0.log").read_text().splitlines()
    (at,) = (index for index, line in enumerate(lines) if UNPROTECTED in line)
    assert at < next(index for index, line in enumerate(lines) if "step 1 is made" in line)
