"""Requests to this node's memory server in jobs without our agent. The node's first rank starts the server.

The server outlives the workers, and ends some time after the last worker has ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.errors import ConflictError
from hyperpod_ext.runtime.ipc.declared import encode
from hyperpod_ext.runtime.ipc.environment import ENV_FAILURE_DOMAIN
from hyperpod_ext.runtime.memory_server.client.client import MemoryClient
from hyperpod_ext.runtime.memory_server.client.start import ServerFiles, start_server
from hyperpod_ext.runtime.memory_server.protocol import requests as r
from hyperpod_ext.runtime.memory_server.protocol.request import A, Request
from hyperpod_ext.runtime.snapshot.select import Decision

_IDLE_EXIT_S = 600.0
"""Time in seconds without a connection after which the server ends; launchers restart workers in less time."""
_QUIET_S = 15.0
"""Maximum time in seconds to wait until the server has finished the requests of dead workers."""
_PROGRESS_S = 10.0
"""Time in seconds between two progress messages about the upload of the last step."""


class NodeMemoryClient:
    """A node's requests to its memory server. Only the node's first rank has this object.

    Args:
        config: configuration of the server, if this process starts it.
        idle_exit_s: time in seconds without a connection after which that server ends.
    """

    def __init__(self, config: RuntimeConfig, secret_file: Path, idle_exit_s: float = _IDLE_EXIT_S) -> None:
        self._config, self._secret_file, self._idle_exit_s = config, secret_file, idle_exit_s
        self._client: MemoryClient | None = None
        self._place: ServerFiles | None = None
        self._pid = 0
        self._first: tuple[str, int] | None = None
        """Address of the memory server on node 0."""

    def connect(self, place: ServerFiles, node: int) -> None:
        """Connect to the node's memory server. Start the server if it is not running.

        Raises:
            ConflictError: the running server was started with a different checkpoint policy.
            UnreachableError: the server does not start.
        """
        if self._place == place:
            return
        config = self._config
        client = start_server(place, config, node, self._secret_file, self._idle_exit_s)
        server = client.ask(r.Handshake())
        if server.config["checkpoint"] != config.checkpoint.model_dump(mode="json"):
            client.close()
            raise ConflictError(
                f"the memory server of job {config.name} on this node runs with another checkpoint policy",
                hint=f"Choose another name for the job, or end that server, which deletes the snapshots in its memory: "
                f"kill {server.pid}",
            )
        self._client, self._place, self._pid = client, place, server.pid

    def held(self, pids: Collection[int]) -> r.Snapshots:
        """Return the complete snapshots in memory and on disks, once all requests of earlier processes are finished.

        `pids`: the job's present processes on this node.

        Raises:
            ConflictError: a process that is not in `pids` saves snapshots under the job's name.
        """
        others = self._ask(r.WaitOthers(pids=tuple(pids), timeout_s=_QUIET_S)).others
        if others:
            raise ConflictError(
                f"process {others[0]} also saves snapshots as job {self._config.name}",
                hint="End that process, or choose another name for this job.",
            )
        return self._ask(r.Held())

    def listen(self, host: str) -> list[Any]:
        """Make the server listen for other nodes at `host`. Returns [host, port, failure domain]."""
        return [host, self._ask(r.Listen(host=host)).port, os.environ.get(ENV_FAILURE_DOMAIN, "")]

    def durable(self, exclude: Sequence[tuple[str, str]]) -> Mapping[str, Any]:
        """Return the checkpoints in the durable tiers, except `exclude`, as JSON."""
        return encode(self._ask(r.Durable(exclude=tuple(exclude))))

    def begin(self, generation: int, peers: Mapping[int, Sequence[Any]]) -> None:
        """Begin a generation: make the server refuse older generations, and send it the other nodes' addresses."""
        self._ask(r.Fence(generation=generation))
        self._first = (str(peers[0][0]), int(peers[0][1])) if 0 in peers and peers[0][1] else None
        if self._config.checkpoint.peer() is not None and len(peers) > 1:
            self.meet(peers)

    def meet(self, peers: Mapping[int, Sequence[Any]]) -> None:
        """Send the server the addresses and failure domains of all nodes, which `listen` has returned on each node."""
        addresses = {node: (host, port) for node, (host, port, _) in peers.items()}
        self._ask(r.Peers(peers=addresses, domains={node: domain for node, (_, _, domain) in peers.items()}))

    def go(self, generation: int, decision: Decision, run: str, node: int, nodes: int, owners: int) -> None:
        """Report that training starts after the decided step, which all ranks have. At the start, the memory server
        drops snapshots of later steps that older generations made."""
        step = decision.step
        begins = r.Enter(generation=generation, base=step, drop=step, run=run, node=node, nodes=nodes, owners=owners)
        self._ask(begins.model_copy(update={"first": self._first}))
        self._ask(r.Fence(generation=generation, step=step, run=run, stored=tuple(decision.stored)))

    def schedule_copy(self, kind: str, step: int) -> None:
        """Request that the snapshots of `step` are copied to the tier of kind `kind` once they are saved."""
        self._ask(r.ScheduleCopy(kind=kind, step=step))

    def newest_durable(self) -> tuple[int, str] | None:
        """Return step and URL of this node's newest checkpoint in a durable tier; None if there is none."""
        found = [
            (int(each["durable_step"]), str(each.get("url", each["tier"])))
            for each in self._ask(r.Status()).copying
            if each.get("durable_step")
        ]
        return max(found, default=None)

    def hand_over(self) -> None:
        """Copy this node's newest snapshots to peers, and due snapshots to durable tiers: the node may leave the
        job."""
        self._ask(r.ReplicateNow())
        self.wait_uploaded()

    def wait_uploaded(self) -> None:
        """Wait until all due copies are in the durable tiers, but at most the policy's `finish_s`."""
        self._ask(r.WaitIdle(timeout_s=self._config.checkpoint.finish_s))

    def upload(self, save_id: str) -> Iterator[r.UploadProgress]:
        """Upload this node's part of a step to each durable tier, even if no copy is due. Yields the progress every 10
        s and at the end."""
        until = time.monotonic() + self._config.checkpoint.finish_s
        while True:
            left_s = max(0.0, until - time.monotonic())
            progress = self._ask(r.UploadNow(save_id=save_id, timeout_s=min(left_s, _PROGRESS_S)))
            yield progress
            if progress.idle or not left_s:
                return

    def close(self) -> None:
        """Disconnect from the server. The server ends when it has been idle for some time."""
        if self._client is not None:
            self._client.close()

    def end(self) -> None:
        """End the server, because the job has succeeded."""
        self.close()
        with contextlib.suppress(ProcessLookupError):  # the memory server has ended already
            os.kill(self._pid, signal.SIGTERM)

    def _ask(self, request: Request[A]) -> A:
        assert self._client is not None, "not connected yet"
        return self._client.ask(request)
