"""TorchTitan's own Trainer and a model of Megatron-core, the real packages: two kills change no bit, lose no step."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from integrations_env import hp_ext

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(1200)]

# copied at once, not beside the next step: else a rank that dies while it copies loses that step
POLICY = {"overlap": False, "tiers": [{"kind": "memory", "every_steps": 1}]}
JOB = {"nodes": 2, "workers_per_node": 1, "global_batch_size": 4, "chaos": {"compare": True}}


def run_twice_killed(folder: Path, script: str, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The report of a job of this script, in which each of its ranks has been killed once."""
    shutil.copy(Path(__file__).with_name(script), folder)
    spec = folder / "job.json"
    spec.write_text(
        json.dumps({"name": Path(script).stem.replace("_", "-"), "script": script, "checkpoint": checkpoint, **JOB})
    )
    command = [hp_ext("trainers"), "create-job", "-f", spec, "--target", "local", "--wait", "-o", "json"]
    command += ["--kill", "rank=1@step=5", "--kill", "rank=0@step=11"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert [(each["fault"]["rank"], each["fault"]["step"]) for each in report["recoveries"]] == [(1, 5), (0, 11)]
    assert report["steps_lost"] == 0
    assert report["loss_equal"]
    assert report["weights_equal"]
    assert sorted(map(int, report["losses"])) == list(range(1, 17)), "every step tells its loss"
    assert len(set(report["losses"].values())) == 16, "it learns"
    return report


def test_titans_own_trainer(tmp_path: Path) -> None:
    inputs = shutil.copy(Path(__file__).with_name("titan_inputs.py"), tmp_path)
    subprocess.run([hp_ext("trainers").with_name("python"), inputs], check=True, timeout=200)
    report = run_twice_killed(tmp_path, "titan_trainer.py", POLICY)
    assert all(each["survivor_pids_kept"] for each in report["recoveries"]), "the healthy process stayed"


def test_a_model_of_megatron_in_two_parts(tmp_path: Path) -> None:
    """Ranks of different parts are not compared, and PyTorch reads no part for the whole."""
    durable = {"kind": "file", "path": str(tmp_path / "durable"), "every_steps": 16}
    run_twice_killed(tmp_path, "megatron_trainer.py", {**POLICY, "tiers": [*POLICY["tiers"], durable]})
    (metadata,) = (tmp_path / "durable").rglob("step-000000016-*/.metadata")
    code = (
        "import sys, torch.distributed.checkpoint as dcp\n"
        "names = dcp.FileSystemReader(sys.argv[1]).read_metadata().state_dict_metadata\n"
        "print(*sorted(n for n in names if n.startswith('model.') and 'word_embeddings.weight' in n), sep=';')\n"
    )
    command = [hp_ext("trainers").with_name("python"), "-c", code, metadata.parent]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().split(";")
    assert [name.partition(" ")[2] for name in names] == ["(tensor 1 of 2)", "(tensor 2 of 2)"], names
