"""Faults that the agent injects from outside the worker, as a real fault would happen."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection

from hyperpod_ext.config.fault_injection import KillFault, NodeFault
from hyperpod_ext.processes import descendants, send_signal


class KillOnce:
    """Decides when to kill a worker. Each fault is injected once, in the first process that reaches the fault's
    step."""

    def __init__(self, faults: Collection[KillFault]) -> None:
        self._left = set(faults)

    def due(self, rank: int, step: int) -> bool:
        """Return whether to kill `rank`, which is making `step` now. Each fault is due only once."""
        return self._spend({fault for fault in self._left if fault.rank == rank and fault.step == step})

    def due_node(self, node: int, step: int) -> bool:
        """Return whether to lose `node`, which is making `step` now. Each fault is due only once."""
        return self._spend({fault for fault in self._left if fault.node == node and fault.step == step})

    def forget(self, rank: int, step: int) -> None:
        """Remove a fault that has already been injected, perhaps by the agent of another node."""
        self._left = {fault for fault in self._left if (fault.rank, fault.step) != (rank, step)}

    def _spend(self, due: set[KillFault]) -> bool:
        self._left -= due
        return bool(due)


def inject_node_fault(fault: NodeFault, hang_up: Callable[[], None]) -> None:
    """Inject `fault` into this agent's node. `hang_up`: closes the agent's connection to the coordinator."""
    match fault.kind:
        case "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)  # the kernel then kills the agent's children, too
        case "hang":
            for pid in (*descendants(os.getpid()), os.getpid()):
                send_signal(pid, signal.SIGSTOP)
        case "cut-network":
            hang_up()
