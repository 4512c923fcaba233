"""The worker's end of the socket that `hyperpodrun` 1.1.3 gives it: 4-byte length, then JSON; `type` says what.

Up: `init` first, then `at_rcb_barrier`, `past_rcb_barrier`, `job_fault`, `rank_labels`, `ckpt_init`,
`ckpt_info_update`. Down: `job_start` (ranks, addresses), `job_fault` (leave what you do), `job_rank_info` (what the
operator plans). A thread listens, so that a fault reaches a rank whose main thread hangs in a collective.
"""

from __future__ import annotations

import queue
import socket
import threading
import uuid
from collections.abc import Callable
from typing import Any

from hyperpod_ext.errors import UnreachableError
from hyperpod_ext.runtime.ipc import messages as wire

_CHECKPOINTS = "model_checkpoint"
"""The agent's name for what a checkpoint is of."""


class HyperpodAgentClient:
    """One a process.

    Args:
        path: the agent's socket.
        on_start, on_fault: called by the listening thread, in the order of the messages.
        on_gone: called by it when the agent is gone, or has given this worker up.
    """

    def __init__(
        self,
        path: str,
        local_rank: int,
        *,
        on_start: Callable[[wire.Message], None],
        on_fault: Callable[[], None],
        on_gone: Callable[[], None],
    ) -> None:
        self._me = {"local_rank": local_rank, "client_id": str(uuid.uuid4())}
        self._on_start, self._on_fault, self._on_gone = on_start, on_fault, on_gone
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(path)
        except OSError as error:
            raise UnreachableError(f"hyperpodrun does not answer at {path}: {error}") from error
        self._sending = threading.Lock()
        self._inbox: queue.SimpleQueue[wire.Message] = queue.SimpleQueue()
        self.send("init")
        threading.Thread(target=self._listen, name="hpx-hyperpod", daemon=True).start()

    def barrier(self) -> wire.Message:
        """Say that this rank is ready, and wait until the operator starts the job: the `job_start` message."""
        while not self._inbox.empty():
            self._inbox.get()  # of the generation that is over
        self.send("at_rcb_barrier")
        while (message := self._inbox.get())["type"] != "job_start":
            self.send("at_rcb_barrier")  # it was stopped while it waited: the agent counts its workers anew
        return message

    def passed(self) -> None:
        """The generation has begun."""
        self.send("past_rcb_barrier")

    def fault(self, rank: int, restart_mode: str, reason: str, message: str) -> None:
        """Ask for a restart: `in_process_restart`, `process_level_restart` or `job_level_restart`."""
        self.send("job_fault", rank=rank, restart_mode=restart_mode, reason=reason, message=message)

    def labels(self, labels: dict[str, str]) -> None:
        """Labels of this node, for the operator."""
        self.send("rank_labels", labels=labels)

    def announce_checkpoints(self, prefix: str) -> None:
        """Checkpoints will be told of, each by one rank of this node."""
        self.send("ckpt_init", prefix=prefix, checkpoint_types={_CHECKPOINTS: 1})

    def checkpoint(self, step: int, path: str) -> None:
        """A checkpoint that survives every node exists."""
        self.send("ckpt_info_update", step=step, path=path, checkpoint_type=_CHECKPOINTS)

    def send(self, kind: str, **fields: Any) -> None:
        with self._sending:
            wire.send(self._socket, {**fields, **self._me, "type": kind})

    def _listen(self) -> None:
        while (message := self._receive()) is not None:
            if message["type"] == "job_start":
                self._on_start(message)
            elif message["type"] == "job_fault":
                self._on_fault()
            else:
                continue  # `job_rank_info` is what is planned; `job_start` says what is
            self._inbox.put(message)
        self._on_gone()

    def _receive(self) -> wire.Message | None:
        try:
            return wire.receive(self._socket)
        except ConnectionError:
            return None
