"""Run a script under torchrun, record the end of each optimizer step, and kill one rank once.

    torchrun ... stamped.py SCRIPT

Environment variables: STAMPS, the folder for the files `rankR.attemptA.jsonl`; KILL, `RANK@STEP` of the first attempt.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
KILL_RANK, KILL_STEP = map(int, os.environ["KILL"].split("@"))


class Stamps:
    """Counts the optimizer steps of this process, and writes the time of each one."""

    def __init__(self, file: Path) -> None:
        self._out, self._made = file.open("a", buffering=1), 0

    def step(self, *_: Any) -> None:
        if _is_called_by("_init_optim_state"):  # DCP makes a step with a learning rate of 0 before it loads
            return
        self._made += 1
        self._write("step")
        if (ATTEMPT, RANK, self._made) == (0, KILL_RANK, KILL_STEP):
            self._write("kill")
            os.kill(os.getpid(), signal.SIGKILL)

    def _write(self, event: str) -> None:
        self._out.write(json.dumps({"event": event, "step": self._made, "t": time.monotonic()}) + "\n")


def _is_called_by(name: str) -> bool:
    """Return whether a function of this name is running. Not imported from hyperpod_ext, whose imports take time."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != name:
        frame = frame.f_back
    return frame is not None


if __name__ == "__main__":
    stamps = Stamps(Path(os.environ["STAMPS"]) / f"rank{RANK}.attempt{ATTEMPT}.jsonl")
    register_optimizer_step_post_hook(stamps.step)
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
