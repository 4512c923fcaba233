"""Run an unchanged script as the training function of a job of mode `run`.

After a fault, the agent forks a new process for every rank, and each process starts the script again. The script loads
its own checkpoint, as after any restart. The script uses the default process group of the runtime, so that the loss of
a rank ends the collectives of the other ranks at once.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import threading
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from hyperpod_ext.runtime.scripts.replaced import replaced
from hyperpod_ext.runtime.scripts.saves import ScriptSaves
from hyperpod_ext.runtime.scripts.script_run import ScriptRun
from hyperpod_ext.runtime.scripts.steps import ScriptSteps
from hyperpod_ext.runtime.training.loop import resilient
from hyperpod_ext.runtime.training.run import Run


def run_script(path: str) -> None:
    """Run the script at `path` as `__main__`.

    Raises:
        SystemExit: the script has ended with an exit code other than 0.
    """
    begun = False
    recorded: list[ScriptSaves] = []

    def script(run: Run) -> None:
        nonlocal begun
        if begun:
            threading.Event().wait()  # wait for a new process, because each process runs the script once
        begun = True
        run.restore()
        os.environ.update(_torchrun_variables(run))
        script_run = ScriptRun(run)
        saves = ScriptSaves(script_run)
        recorded.append(saves)
        saves.go_back()
        with saves.recorded(), ScriptSteps(script_run, saves).counted(), own_groups():
            _run(path)

    script.__name__ = path
    resilient(script)()
    for saves in recorded:
        saves.end()


def _torchrun_variables(run: Run) -> dict[str, str]:
    """Return torchrun's environment variables, from which scripts recognize torchrun and read the restart count."""
    rank, world_size = str(run.rank), str(run.world_size)
    return {
        "TORCHELASTIC_RUN_ID": run.config.name,
        "TORCHELASTIC_RESTART_COUNT": str(run.generation - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(run.config.restart.max_restarts),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
    }


def _run(path: str) -> None:
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            raise


def own_groups() -> contextlib.AbstractContextManager[None]:
    """Inside the context, make `init_process_group` and `destroy_process_group` of the default group do nothing.

    The runtime opens the default group before the script, and closes it after the script.
    """
    destroy = dist.destroy_process_group

    def opened(*_: Any, **__: Any) -> None:
        return

    def destroyed(group: dist.ProcessGroup | None = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            destroy(group)

    calls = {"init_process_group": opened, "destroy_process_group": destroyed}
    return replaced([(module, name, call) for module in (dist, distributed_c10d) for name, call in calls.items()])
