"""Make the screenshots in docs/: `make screenshots` runs a job, and photographs the page of its report in Chromium."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import browser

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "report.png"
WIDTH, HEIGHT = 1000, 1370
"""Down to the end of "What it cost", in pixels."""


def main() -> None:
    browser.require()
    hp_ext = Path(sys.executable).with_name("hp-ext")
    with tempfile.TemporaryDirectory(prefix="hpx-screenshots-") as folder:
        page, env = Path(folder) / "report.html", {**os.environ, "HPX_HOME": folder}
        job = ROOT / "examples" / "01-local" / "job.yaml"
        for command in (
            ["create-job", "-f", job, "--target", "local", "--wait"],
            ["report", "tiny-gpt", "--page", page],
        ):
            subprocess.run([hp_ext, *command], env=env, check=True, stdout=subprocess.DEVNULL)
        browser.photograph(page, PICTURE, dark=False, width=WIDTH, height=HEIGHT)


if __name__ == "__main__":
    main()
