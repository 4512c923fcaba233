"""Rehearsed faults, inflicted from outside the worker, as a real one would be."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection

from hyperpod_ext.config.fault_injection import KillFault, NodeFault
from hyperpod_ext.processes import descendants, send_signal


class KillOnce:
    """Says when a worker is to be killed: each fault once, in the first process to reach its step."""

    def __init__(self, faults: Collection[KillFault]) -> None:
        self._left = set(faults)

    def due(self, rank: int, step: int) -> bool:
        """Whether `rank`, which now makes `step`, is to die; a fault that is due is spent."""
        return self._spend({fault for fault in self._left if fault.rank == rank and fault.step == step})

    def due_node(self, node: int, step: int) -> bool:
        """Whether `node`, where `step` is now made, is to be lost; a fault that is due is spent."""
        return self._spend({fault for fault in self._left if fault.node == node and fault.step == step})

    def forget(self, rank: int, step: int) -> None:
        """That fault has happened, maybe on another node."""
        self._left = {fault for fault in self._left if (fault.rank, fault.step) != (rank, step)}

    def _spend(self, due: set[KillFault]) -> bool:
        self._left -= due
        return bool(due)


def inject_node_fault(fault: NodeFault, hang_up: Callable[[], None]) -> None:
    """Inflict `fault` on the node that this process is the agent of; `hang_up` ends its line to the coordinator."""
    match fault.kind:
        case "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)  # the kernel ends the children of a dead agent
        case "hang":
            for pid in (*descendants(os.getpid()), os.getpid()):
                send_signal(pid, signal.SIGSTOP)
        case "cut-network":
            hang_up()
