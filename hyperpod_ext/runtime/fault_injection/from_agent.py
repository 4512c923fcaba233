"""Faults that the agent injects from outside the worker, as real faults would come."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection

from hyperpod_ext.config.fault_injection import KillFault, NodeFault
from hyperpod_ext.processes import descendants, send_signal


class KillOnce:
    """Determines when to kill a worker. Each fault is injected once, in the first process that reaches its step."""

    def __init__(self, faults: Collection[KillFault]) -> None:
        self._left = set(faults)

    def due(self, rank: int, step: int) -> bool:
        """Return whether to kill `rank`, which now makes `step`. A fault that is due is not due again."""
        return self._spend({fault for fault in self._left if fault.rank == rank and fault.step == step})

    def due_node(self, node: int, step: int) -> bool:
        """Return whether to lose `node`, where `step` is now made. A fault that is due is not due again."""
        return self._spend({fault for fault in self._left if fault.node == node and fault.step == step})

    def forget(self, rank: int, step: int) -> None:
        """Remove a fault that has already happened, perhaps on another node."""
        self._left = {fault for fault in self._left if (fault.rank, fault.step) != (rank, step)}

    def _spend(self, due: set[KillFault]) -> bool:
        self._left -= due
        return bool(due)


def inject_node_fault(fault: NodeFault, hang_up: Callable[[], None]) -> None:
    """Inject `fault` into the node of this agent. `hang_up`: closes the agent's connection to the coordinator."""
    match fault.kind:
        case "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)  # the kernel then kills the children of the dead agent
        case "hang":
            for pid in (*descendants(os.getpid()), os.getpid()):
                send_signal(pid, signal.SIGSTOP)
        case "cut-network":
            hang_up()
