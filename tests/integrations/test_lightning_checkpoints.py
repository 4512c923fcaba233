"""Lightning's own Trainer with our checkpoints: killed in the middle of a save, it goes on as if it had not been."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from integrations_env import hp_ext

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(1800)]

SCENES = Path(__file__).with_name("lightning_scenes.py")


@pytest.fixture(autouse=True)
def secrets_of_this_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=240, check=False)


def losses(said: str) -> dict[int, str]:
    """Loss of each epoch, all digits."""
    return {int(epoch): loss for epoch, loss in re.findall(r"epoch (\d+), loss (\S+)", said)}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("save", [5, 6], ids=["best", "last"])
def test_a_kill_in_the_middle_of_a_save_changes_no_loss(root: Path, tmp_path: Path, save: int, ranks: int) -> None:
    """Each epoch saves twice: one of the two best, and `last`. The third of either is never finished."""
    python = hp_ext().with_name("python")
    start = [python] if ranks == 1 else [python, "-m", "torch.distributed.run", "--nproc-per-node", ranks]
    example = root / "examples" / "15-lightning" / "checkpoints.py"
    whole = run(*start, example, "--epochs", 5, "--folder", tmp_path / "undisturbed")
    assert whole.returncode == 0, whole.stderr
    folder = tmp_path / "disturbed"
    killed = run(*start, SCENES, save, example, "--epochs", 5, "--folder", folder)
    assert killed.returncode == (-signal.SIGKILL if ranks == 1 else 1), killed.stderr
    again = run(*start, example, "--epochs", 5, "--folder", folder)
    assert again.returncode == 0, again.stderr
    before, after = losses(killed.stdout), losses(again.stdout)
    assert sorted(after) == [2, 3, 4], "it went on after the last epoch whose save was whole"
    assert before | after == losses(whole.stdout)
    assert len(set(after.values())) == 3, "it learns"
    assert sorted(path.name for path in folder.iterdir())[-1] == "last.ckpt"
    assert not list(folder.rglob("*.partial"))


def test_what_else_lightning_does_with_checkpoints(tmp_path: Path) -> None:
    done = run(hp_ext().with_name("python"), SCENES, "scenes", tmp_path)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert len(found["kept"]) == 1, "the best alone; the one before was removed"
    assert found["as trained"], "the weights of the best epoch, which is the last"
    loaded, zeroed = found["test losses"]
    assert loaded > zeroed == 0, "ckpt_path='best' has brought the weights"
    assert found["weights"]
    assert found["hyperparameters"] == {"thing": 3}
    assert found["refused"][0].startswith("hyper_parameters.thing is a value of type object")
    assert found["refused"][1]
    assert "old.ckpt is a file, but a checkpoint of hyperpod_ext is a folder" in found["old"]
