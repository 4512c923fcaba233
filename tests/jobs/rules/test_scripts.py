"""HPX176 and HPX177: scripts that mode `ours` does not protect, or that have another recovery, found by their code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import unprotected_scripts as scripts

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.jobs.plan import find_warnings, make_plan

TRAINS = "loss.backward()\n"


def found(folder: Path, files: dict[str, str], rule: str = "HPX176", **fields: Any) -> list[str]:
    """Return the messages of `rule` for a job of `train.py`."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    job = JobConfig.model_validate_json(json.dumps({"name": "a", "script": "train.py"} | fields))
    return [one.message for one in find_warnings(job, None, "local", folder=folder) if one.rule == rule]


@pytest.mark.parametrize("kind", scripts.OURS_IS_ABSENT)
def test_scripts_that_train_without_ours_are_found(tmp_path: Path, kind: str) -> None:
    files = scripts.OURS_IS_ABSENT[kind]
    (message,) = found(tmp_path, files)
    assert message.startswith("`train.py` trains without a @resilient function")
    assert found(tmp_path, {"train.py": files["train.py"]}), "with the library itself, too"


def test_libraries_outside_of_the_folder_count(tmp_path: Path) -> None:
    for kind in scripts.OURS_IS_ABSENT:
        folder = tmp_path / kind
        assert found(folder, {"train.py": scripts.OURS_IS_ABSENT[kind]["train.py"]}), kind


@pytest.mark.parametrize("files", [*scripts.OURS_IS_UNUSED.values(), scripts.OUTSIDE_STEPS, scripts.PROTECTED])
def test_scripts_that_import_ours_are_not_judged(tmp_path: Path, files: dict[str, str]) -> None:
    assert found(tmp_path, files) == []


def test_packages_that_ours_replace_count_as_ours(tmp_path: Path) -> None:
    files = {"train.py": f"from hyperpod_checkpointless_training.inprocess.wrap import HPWrapper\n{TRAINS}"}
    assert found(tmp_path, files, compat="aws") == []
    assert found(tmp_path, files)


LOOP = f"def fit():\n    {TRAINS}"
CHAIN = {f"m{n}.py": f"import m{n + 1}\n" for n in range(1, 4)}


@pytest.mark.parametrize(
    "files",
    [
        {"train.py": f"import mine\n{TRAINS}", "mine.py": "from hyperpod_ext.runtime import resilient\n"},
        {"train.py": f"from mine import loops\n{TRAINS}", "mine/loops.py": "import hyperpod_ext.runtime\n"},
        {
            "train.py": f"import mine.a\n{TRAINS}",
            "mine/__init__.py": "",
            "mine/a.py": "from . import b\n",
            "mine/b.py": "from hyperpod_ext.integrations.lightning import ResilientTrainer\n",
        },
        {
            "train.py": f"import mine.a.b\n{TRAINS}",
            "mine/a/b.py": "from ..c import x\n",
            "mine/c.py": "import hyperpod_ext\n",
        },
        {"train.py": f"def main():\n    if x:\n        from hyperpod_ext.runtime import resilient\n{TRAINS}"},
        {"train.py": f"try:\n    import hyperpod_ext.runtime as r\nexcept ImportError:\n    r = None\n{TRAINS}"},
    ],
)
def test_ours_may_come_through_modules_of_the_folder(tmp_path: Path, files: dict[str, str]) -> None:
    assert found(tmp_path, files) == []


@pytest.mark.parametrize(
    "files",
    [
        {"train.py": f"import mine\n{TRAINS}", "mine.py": "import train\n"},
        {"train.py": "import mine\nmine.fit()\n", "mine.py": LOOP},
        {"train.py": "from mine.loops import fit\nfit()\n", "mine/loops.py": LOOP},
        {"train.py": f"import m1\n{TRAINS}", **CHAIN},
        {"train.py": f"import os\n{TRAINS}", "unused.py": "import hyperpod_ext\n"},
        {"train.py": f'"from hyperpod_ext.runtime import resilient" # \\d\n{TRAINS}'},
    ],
)
def test_training_in_modules_of_the_folder_is_found(tmp_path: Path, files: dict[str, str]) -> None:
    assert found(tmp_path, files)


@pytest.mark.parametrize(
    "files",
    [
        {"train.py": "from acme.training import main\nmain()\n"},
        {"train.py": "import acme\nacme.Trainer().fit()\n"},
        {"train.py": "from transformers import AutoModel\nimport acme\nAutoModel().train()\nacme.main()\n"},
        {"train.py": f"import importlib\nimportlib.import_module('acme').main({TRAINS.strip()})\n"},
        {"train.py": f"import runpy\nrunpy.run_path('other.py')\n{TRAINS}"},
        {"train.py": f"this is no python\n{TRAINS}"},
        {"train.py": f"\0{TRAINS}"},
        {"train.py": TRAINS + "#" * (1 << 20)},
        {"train.py": f"import m1\n{TRAINS}", **CHAIN, "m4.py": ""},
        {},
    ],
)
def test_what_cannot_be_known_is_not_warned_of(tmp_path: Path, files: dict[str, str]) -> None:
    assert found(tmp_path, files) == []


def test_at_most_fifty_files_are_read(tmp_path: Path) -> None:
    names = [f"m{number}" for number in range(50)]
    modules = {f"{name}.py": "" for name in names}
    assert found(tmp_path, {"train.py": f"import {', '.join(names[:49])}\n{TRAINS}", **modules})
    assert found(tmp_path, {"train.py": f"import {', '.join(names)}\n{TRAINS}"}) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"mode": "plain"},
        {"mode": "aws-managed-tier"},
        {"working_dir": "/app", "image": "a/b:1"},
        {"script": "/app/train.py", "image": "a/b:1"},
        {"script": "", "command": "python train.py", "mode": "plain"},
    ],
)
def test_other_modes_and_scripts_of_images_are_not_judged(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert found(tmp_path, scripts.PLAIN, **fields) == []


def test_a_plan_warns_unless_the_rule_is_ignored(tmp_path: Path) -> None:
    assert found(tmp_path, scripts.PLAIN)
    job = JobConfig(name="a", script="train.py")
    assert ["HPX176" in warning for warning in make_plan(job, source_dir=tmp_path).warnings] == [True]
    assert make_plan(job, source_dir=tmp_path, ignore=["HPX176"]).warnings == ()


def test_the_script_is_not_executed(tmp_path: Path) -> None:
    assert found(tmp_path, {"train.py": f"open({str(tmp_path / 'run')!r}, 'w')\n{TRAINS}"})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("mode", ["ours", "run"])
@pytest.mark.parametrize(
    ("line", "module"),
    [
        ("from torchft import Manager", "torchft"),
        ("import torchft.manager as manager", "torchft"),
        ("from nvidia_resiliency_ext import inprocess", "nvidia_resiliency_ext.inprocess"),
        ("from nvidia_resiliency_ext.inprocess.wrap import Wrapper", "nvidia_resiliency_ext.inprocess"),
        ("import nvidia_resiliency_ext.fault_tolerance as ft", "nvidia_resiliency_ext.fault_tolerance"),
        ("from deepspeed.elasticity import compute_elastic_config", "deepspeed.elasticity"),
        ("from torch.distributed.launcher.api import elastic_launch", "torch.distributed.launcher"),
    ],
)
def test_another_recovery_is_warned_of(tmp_path: Path, mode: str, line: str, module: str) -> None:
    files = {"train.py": f"import loops\n{TRAINS}", "loops.py": f"{line}\n"}
    (message,) = found(tmp_path, files, "HPX177", mode=mode)
    assert message == f"`train.py` imports {module}, whose recovery conflicts with mode `{mode}`"
    assert found(tmp_path, files, "HPX177", mode="plain") == []


@pytest.mark.parametrize(
    "line",
    [
        "import torchftp",
        "import deepspeed",
        "import nvidia_resiliency_ext.checkpointing.async_ckpt",
        "from torch.distributed.elastic.multiprocessing.errors import record",
        "from .torchft import x",
    ],
)
def test_other_parts_of_these_packages_are_no_recovery(tmp_path: Path, line: str) -> None:
    assert found(tmp_path, {"train.py": f"{line}\n{TRAINS}"}, "HPX177") == []
