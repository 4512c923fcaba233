"""An environment with Lightning, Transformers and Accelerate, over ours: torch is not installed twice.

`python tests/support/integrations_env.py` makes it, below .venv/sdk.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

PINS = Path(__file__).with_name("integrations-pins.txt")
VENV = PINS.parents[2] / ".venv" / "sdk" / "integrations"
HP_EXT = "import sys\nfrom hyperpod_ext.cli import main\nsys.exit(main())\n"


def install() -> Path:
    """`hp-ext` of the environment, which is made unless it is as the pins want it."""
    ours = sysconfig.get_paths()["purelib"]
    wanted = f"{PINS.read_text()}{ours}\n"
    ready, command = VENV / ".ready", VENV / "bin" / "hp-ext"
    if not ready.exists() or ready.read_text() != wanted:
        shutil.rmtree(VENV, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True, capture_output=True, timeout=120)
        places = {"base": str(VENV), "platbase": str(VENV)}
        theirs = Path(sysconfig.get_path("purelib", vars=places))
        (theirs / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
        pip = [str(VENV / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", "-r", str(PINS)]
        subprocess.run(pip, check=True, capture_output=True, text=True, timeout=900)
        command.write_text(f"#!{VENV / 'bin' / 'python'}\n{HP_EXT}")
        command.chmod(0o755)
        ready.write_text(wanted)
    return command


def hp_ext() -> Path:
    """`install` for tests: skips where it cannot be, and fails under CI."""
    try:
        return install()
    except (OSError, subprocess.SubprocessError) as error:
        said = f"no environment for integrations: {(getattr(error, 'stderr', '') or str(error)).strip()[-300:]}"
        if os.environ.get("CI"):
            pytest.fail(said)
        pytest.skip(said)


if __name__ == "__main__":
    print(install())
