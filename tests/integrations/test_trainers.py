"""TorchTitan's own Trainer and a model of Megatron-core, the real packages: two kills change no bit, lose no step."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from integrations_env import hp_ext
from killed_twice import AT_ONCE, MEMORY, run_killed

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(1200)]


def run_on_two_nodes(folder: Path, script: str, **options: Any) -> dict[str, Any]:
    options |= {"nodes": 2, "workers_per_node": 1}
    report = run_killed(folder, script, batch=4, environment="trainers", **options)
    assert sorted(map(int, report["losses"])) == list(range(1, 17)), "every step has a loss"
    assert len(set(report["losses"].values())) == 16, "it learns"
    return report


def test_titans_own_trainer(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("titan_on_cpu.py"), tmp_path)
    inputs = shutil.copy(Path(__file__).with_name("titan_inputs.py"), tmp_path)
    subprocess.run([hp_ext("trainers").with_name("python"), inputs], check=True, timeout=200)
    report = run_on_two_nodes(tmp_path, "titan_trainer.py", checkpoint=AT_ONCE)
    assert all(each["survivor_pids_kept"] for each in report["recoveries"]), "the healthy process stayed"


def test_a_model_of_megatron_in_two_parts(tmp_path: Path) -> None:
    """Ranks of different parts are not compared, and PyTorch reads no part for the whole."""
    durable = {"kind": "file", "path": str(tmp_path / "durable"), "every_steps": 16}
    run_on_two_nodes(tmp_path, "megatron_trainer.py", checkpoint=AT_ONCE | {"tiers": [MEMORY, durable]})
    (metadata,) = (tmp_path / "durable").rglob("step-000000016-*/.metadata")
    code = (
        "import sys, torch.distributed.checkpoint as dcp\n"
        "names = dcp.FileSystemReader(sys.argv[1]).read_metadata().state_dict_metadata\n"
        "print(*sorted(n for n in names if n.startswith('model.') and 'word_embeddings.weight' in n), sep=';')\n"
    )
    command = [hp_ext("trainers").with_name("python"), "-c", code, metadata.parent]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().split(";")
    assert [name.partition(" ")[2] for name in names] == ["(tensor 1 of 2)", "(tensor 2 of 2)"], names
