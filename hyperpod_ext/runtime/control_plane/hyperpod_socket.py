"""A worker's connection to the socket of `hyperpodrun` 1.1.3. A message is a 4-byte length, then JSON with a `type`.

Messages to hyperpodrun's agent: first `init`, then `at_rcb_barrier`, `past_rcb_barrier`, `job_fault`, `rank_labels`,
`ckpt_init`, `ckpt_info_update`. Messages to the worker: `job_start` (ranks, addresses), `job_fault` (abort the
generation), `job_rank_info` (the operator's plan). A separate thread receives, so that a fault reaches a rank even
while its main thread hangs in a collective.
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
"""Value of `checkpoint_type` for our checkpoints, in messages to hyperpodrun's agent."""


class HyperpodAgentClient:
    """Connection of one worker process to hyperpodrun's agent.

    Args:
        path: path of the agent's socket.
        on_start, on_fault: called for `job_start` and `job_fault`, in the order of messages, in the receiving thread.
        on_gone: called in the receiving thread when the agent has closed the connection.
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
        """Report that this rank is ready, and wait until the operator starts the job. Returns message `job_start`."""
        while not self._inbox.empty():
            self._inbox.get()  # drop messages of the previous generation
        self.send("at_rcb_barrier")
        while (message := self._inbox.get())["type"] != "job_start":
            self.send("at_rcb_barrier")  # report again after a fault, because the agent restarts its count of workers
        return message

    def passed(self) -> None:
        """Report that this rank has begun the generation."""
        self.send("past_rcb_barrier")

    def fault(self, rank: int, restart_mode: str, reason: str, message: str) -> None:
        """Request a restart by the operator. `restart_mode`: `in_process_restart`, `process_level_restart` or
        `job_level_restart`."""
        self.send("job_fault", rank=rank, restart_mode=restart_mode, reason=reason, message=message)

    def labels(self, labels: dict[str, str]) -> None:
        """Send labels for this node to the operator."""
        self.send("rank_labels", labels=labels)

    def announce_checkpoints(self, prefix: str) -> None:
        """Announce that a rank of this node will report checkpoints."""
        self.send("ckpt_init", prefix=prefix, checkpoint_types={_CHECKPOINTS: 1})

    def checkpoint(self, step: int, path: str) -> None:
        """Report step and path of a durable checkpoint."""
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
                continue  # skip `job_rank_info`: `job_start` follows it
            self._inbox.put(message)
        self._on_gone()

    def _receive(self) -> wire.Message | None:
        try:
            return wire.receive(self._socket)
        except ConnectionError:
            return None
