"""Scripts with the names of AWS's launch article, through `kill -9`: `hp-ext run --compat aws`."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from command import begin_hp_ext, call_hp_ext
from local_place import LocalPlace

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
STEPS = 24


@pytest.fixture(autouse=True)
def folder(place: LocalPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def losses(printed: str) -> set[str]:
    """Lines with the loss of each rank and step; those of a repeated step are the same, or there are two."""
    return set(re.findall(r"loss [01] \d+ \S+", printed))


def test_tier_3_starts_all_ranks_again_from_the_script_s_own_checkpoint(folder: Path) -> None:
    shutil.copy(HERE / "in_process.py", folder / "train.py")
    run = ("run", "--workers", "2", "--compat", "aws", "-o", "json")
    killed = begin_hp_ext(*run, "--kill", "rank=1@step=13", "train.py").wait()
    assert killed.code == 0, killed.stderr
    assert "mode run: the script saves and resumes by itself" in killed.stderr
    assert "hyperpod_ext: compat aws: imports of" in killed.stderr
    (recovery,) = killed.json["recoveries"]
    assert (recovery["fault"]["rank"], recovery["source"]) == (1, "script")
    assert recovery["resumed_step"] >= 10
    assert len(losses(killed.stderr)) == 2 * STEPS


def test_tiers_2_and_4_lose_no_step_and_keep_healthy_processes(folder: Path) -> None:
    shutil.copy(HERE / "checkpointless.py", folder / "train.py")
    run = ("run", "--workers", "2", "--compat", "aws", "-o", "json")
    killed = begin_hp_ext(*run, "--kill", "rank=1@step=13", "train.py").wait()
    assert killed.code == 0, killed.stderr
    assert "mode ours: the script has AWS's checkpoint manager" in killed.stderr
    assert killed.json["steps_lost"] == 0
    assert killed.json["weights_equal"] is True
    (recovery,) = killed.json["recoveries"]
    assert recovery["survivor_pids_kept"], "the healthy process stayed"
    assert set(re.findall(r"call (\d) (\d)", killed.stderr)) == {("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")}
    assert set(re.findall(r"finalize \d", killed.stderr)) == {"finalize 0"}
    assert len(losses(killed.stderr)) == 2 * STEPS, (
        "in both runs, the undisturbed one included, a step has the same loss"
    )


def test_a_checkpoint_manager_in_mode_run_is_refused(folder: Path) -> None:
    shutil.copy(HERE / "checkpointless.py", folder / "train.py")
    (folder / "job.yaml").write_text("name: a\nscript: train.py\nmode: run\ncompat: aws\n")
    done = call_hp_ext("create-job", "-f", "job.yaml", "--target", "local", "--wait")
    assert done.code == 7
    assert "Write `mode: ours`, or leave checkpoint_manager out" in done.stderr


def test_a_refused_name_ends_the_job_with_the_words_to_write_instead(folder: Path) -> None:
    script = "from hyperpod_checkpointless_training.nemo_plugins.fault_injection import HPFaultInjectionCallback\n"
    (folder / "train.py").write_text(script)
    done = call_hp_ext("run", "--compat", "aws", "train.py")
    assert done.code == 7
    assert "write `--kill rank=8@step=3`" in done.stderr


def test_without_compat_the_packages_are_not_replaced(folder: Path) -> None:
    (folder / "train.py").write_text("import hyperpod_checkpointless_training\n")
    done = call_hp_ext("run", "train.py")
    assert done.code == 7
    assert "No module named 'hyperpod_checkpointless_training'" in done.stderr
