"""Environments over ours, so that torch is not installed twice: `integrations`, with Lightning, Transformers and
Accelerate, and `trainers`, with TorchTitan and Megatron-core, which want other versions of what they share.

`deepspeed` has DeepSpeed. `titan3`, with TorchTitan 0.3, is over an environment of torch_env.py, because TorchTitan 0.3
needs a newer torch.

`python tests/support/integrations_env.py` makes the first three, below .venv/sdk.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch_env

HERE = Path(__file__).parent
NAMES = ("integrations", "trainers", "deepspeed")
TORCH = {"titan3": "2.15.0"}
"""Version of torch of each environment that has another torch than ours."""
HP_EXT = "import sys\nfrom hyperpod_ext.cli import main\nsys.exit(main())\n"


def install(name: str) -> Path:
    """`hp-ext` of the environment, which is made unless it is as the pins want it."""
    pins, venv = HERE / f"{name}-pins.txt", HERE.parents[1] / ".venv" / "sdk" / name
    python = torch_env.install(TORCH[name]) if name in TORCH else Path(sys.executable)
    ours = sysconfig.get_path("purelib", vars={"base": str(python.parents[1])})
    wanted = f"{pins.read_text()}{ours}\n"
    ready, command = venv / ".ready", venv / "bin" / "hp-ext"
    if not ready.exists() or ready.read_text() != wanted:
        shutil.rmtree(venv, ignore_errors=True)
        subprocess.run([python, "-m", "venv", str(venv)], check=True, capture_output=True, timeout=120)
        places = {"base": str(venv), "platbase": str(venv)}
        theirs = Path(sysconfig.get_path("purelib", vars=places))
        (theirs / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
        pip = [
            str(venv / "bin" / "pip"),
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-compile",
            "-r",
            str(pins),
        ]
        subprocess.run(pip, check=True, capture_output=True, text=True, timeout=900)
        command.write_text(f"#!{venv / 'bin' / 'python'}\n{HP_EXT}")
        command.chmod(0o755)
        ready.write_text(wanted)
    return command


def hp_ext(name: str = NAMES[0]) -> Path:
    """`install` for tests: skips where it cannot be, and fails under CI."""
    try:
        return install(name)
    except (OSError, subprocess.SubprocessError) as error:
        said = f"no environment for {name}: {(getattr(error, 'stderr', '') or str(error)).strip()[-300:]}"
        if os.environ.get("CI"):
            pytest.fail(said)
        pytest.skip(said)


if __name__ == "__main__":
    for each in NAMES:
        print(install(each))
