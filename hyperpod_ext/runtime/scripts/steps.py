"""Count the optimizer steps of an unchanged script, and report them as steps of the job."""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections.abc import Iterator
from types import FrameType

from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hyperpod_ext.runtime.scripts.saves import ScriptSaves
from hyperpod_ext.runtime.scripts.script_run import ScriptRun


class ScriptSteps:
    """Counts the steps of one optimizer: the optimizer that steps first, if the script has several.

    After a restart, counting continues from the step at which the loaded checkpoint was saved.
    """

    def __init__(self, run: ScriptRun, saves: ScriptSaves) -> None:
        self._run, self._saves = run, saves
        self._counted: weakref.ref[Optimizer] | None = None
        self._began = 0.0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count optimizer steps inside the context."""
        hooks = [
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._before(optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, *_: self._after(optimizer)),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, optimizer: Optimizer) -> None:
        if self._counted is not None and self._counted() is not None:
            return
        if self._counted is None:
            if _only_creates_state(sys._getframe(1)):
                return
            self._begin()
        self._counted = weakref.ref(optimizer)

    def _begin(self) -> None:
        self._saves.begin(self._first())
        self._began = time.monotonic()

    def _first(self) -> int:
        """Return the step after which the script begins, which is the step of the checkpoint that it has loaded.

        If this rank has loaded an unknown file, or receives the values of another rank by a broadcast, return
        `run.step`, the newest step that all ranks have saved.
        """
        if self._saves.loaded:
            return self._saves.loaded
        if self._run.step == 0 or self._run.rank != 0 or self._saves.loaded is not None:
            return self._run.step
        where = f" to {newest.path}" if (newest := self._saves.newest()) is not None else ""
        sys.stderr.write(
            f"hyperpod_ext: warning: the script has saved step {self._run.step}{where}, and has loaded nothing. "
            "So it starts again from its first step. Load the newest checkpoint before the loop.\n"
        )
        return 0

    def _after(self, optimizer: Optimizer) -> None:
        if self._counted is None or self._counted() is not optimizer:
            return
        self._run.end_step(self._began)
        self._began = time.monotonic()


def _only_creates_state(frame: FrameType | None) -> bool:
    """Return whether an optimizer step is DCP's own, which has a learning rate of 0 and only creates the state.

    DCP makes this step in `get_state_dict`, which scripts call before they load a checkpoint.

    Args:
        frame: stack frame of the hook that sees the step.
    """
    while frame is not None and frame.f_code.co_name != "_init_optim_state":
        frame = frame.f_back
    return frame is not None
