from __future__ import annotations

from pathlib import Path

import pytest

from hyperpod_ext.jobs.script_imports import first_imports


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"""Doc."""\nfrom __future__ import annotations\nimport os\nimport torch\n', ["torch"]),
        (
            "import torch.nn.functional as F\nfrom torch import nn, optim\n",
            ["torch.nn.functional", "torch.nn", "torch.optim"],
        ),
        ("from pydantic import *\n", ["pydantic"]),
        ("import no_such_package\nimport yaml\n", ["yaml"]),
        ("import os\nos.environ['A'] = '1'\nimport torch\n", []),
        ("import yaml\nimport mine\nimport torch\n", ["yaml"]),
        ("import yaml\ntry:\n    import torch\nexcept ImportError:\n    torch = None\n", ["yaml"]),
        ("from . import other\nimport torch\n", []),
        ("import torch\nthis is no Python\n", []),
    ],
    ids=["docs", "names", "star", "missing", "after-code", "after-own", "after-try", "relative", "broken"],
)
def test_only_installed_modules_before_any_other_code_count(tmp_path: Path, text: str, expected: list[str]) -> None:
    (tmp_path / "mine.py").write_text("import os\nos.environ['A'] = '1'\n")
    (tmp_path / "train.py").write_text(text)
    assert first_imports(tmp_path / "train.py") == expected


def test_calls_that_change_nothing_are_passed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import yaml\nwait_rank()\nimport torch\nwait_rank(1)\nimport pydantic\n")
    assert first_imports(tmp_path / "train.py") == ["yaml"]
    assert first_imports(tmp_path / "train.py", {"wait_rank"}) == ["yaml", "torch"]
