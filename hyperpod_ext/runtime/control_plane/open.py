"""Opens the control plane for this process's launcher. The launcher begins and ends generations.

| started by | an exception in a rank | a process that dies | a lost node |
|---|---|---|---|
| our agent | in process | that process is replaced | a spare takes its ranks |
| `hyperpodrun --inprocess-restart` | in process | its node's processes are replaced | a spare takes its ranks |
| `hyperpodrun` | in process | all processes are started again | all are started again, a spare among them |
| `torchrun` | in process | all processes are started again (`--max-restarts`) | torchrun's rendezvous decides |

If all processes are started again, they restore from the memory servers of their nodes, which outlive the processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyperpod_ext.runtime.control_plane.launcher import Launcher
from hyperpod_ext.runtime.ipc.environment import WorkerEnvironment

if TYPE_CHECKING:
    from hyperpod_ext.runtime.control_plane.agent import ControlPlane
    from hyperpod_ext.runtime.process_group.groups import ProcessGroups


def open_control_plane(launcher: Launcher, groups: ProcessGroups) -> ControlPlane:
    """Return the connected control plane of this process. The control plane aborts the process groups `groups` when a
    generation ends."""
    match launcher:
        case Launcher.AGENT:
            from hyperpod_ext.runtime.control_plane.agent import Session

            environment = WorkerEnvironment.of()
            assert environment is not None
            return Session(environment, groups)
        case Launcher.HYPERPODRUN_IN_PROCESS:
            from hyperpod_ext.runtime.control_plane.hyperpodrun import HyperpodMembers

            return HyperpodMembers(groups)
        case _:
            from hyperpod_ext.runtime.control_plane.torchrun import TorchrunMembers

            return TorchrunMembers(groups, launcher)
