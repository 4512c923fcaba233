"""The memory server of this node, if no agent of ours keeps one: the node's first rank starts and asks it.

It outlives the workers, and ends some time after the last of them has left for good.
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
"""Longer than the launchers take to start workers again."""
_QUIET_S = 15.0
"""Longest wait for the requests of workers that have died."""
_TELL_S = 10.0
"""How often it is told that the last step is still on its way."""


class NodeMemoryClient:
    """A node's requests to its memory server. Only the node's first rank makes them.

    Args:
        config: the job as a server that is started here has it.
        idle_exit_s: such a server ends when no process has been connected for this long.
    """

    def __init__(self, config: RuntimeConfig, secret_file: Path, idle_exit_s: float = _IDLE_EXIT_S) -> None:
        self._config, self._secret_file, self._idle_exit_s = config, secret_file, idle_exit_s
        self._client: MemoryClient | None = None
        self._place: ServerFiles | None = None
        self._pid = 0
        self._first: tuple[str, int] | None = None
        """Where the memory server of node 0 listens."""

    def connect(self, place: ServerFiles, node: int) -> None:
        """Start the server if there is none.

        Raises:
            ConflictError: the one that is there was started with another policy.
            UnreachableError: it does not come up.
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
                hint=f"Choose another name for the job, or end that server, and with it what only its memory holds: "
                f"kill {server.pid}",
            )
        self._client, self._place, self._pid = client, place, server.pid

    def held(self, pids: Collection[int]) -> r.Snapshots:
        """Return the whole snapshots in memory and on disks, after the requests of all earlier processes are done.

        `pids`: the job's processes now.

        Raises:
            ConflictError: another process saves under the job's name.
        """
        others = self._ask(r.WaitOthers(pids=tuple(pids), timeout_s=_QUIET_S)).others
        if others:
            raise ConflictError(
                f"process {others[0]} saves as job {self._config.name}, too",
                hint="End it, or choose another name for this job.",
            )
        return self._ask(r.Held())

    def listen(self, host: str) -> list[Any]:
        """Where other nodes reach the server, and what fails together with this one: host, port, domain."""
        return [host, self._ask(r.Listen(host=host)).port, os.environ.get(ENV_FAILURE_DOMAIN, "")]

    def durable(self, exclude: Sequence[tuple[str, str]]) -> Mapping[str, Any]:
        """Return the checkpoints in the durable tiers, as JSON."""
        return encode(self._ask(r.Durable(exclude=tuple(exclude))))

    def begin(self, generation: int, peers: Mapping[int, Sequence[Any]]) -> None:
        """Refuse writers of older generations; tell who the other nodes are."""
        self._ask(r.Fence(generation=generation))
        self._first = (str(peers[0][0]), int(peers[0][1])) if 0 in peers and peers[0][1] else None
        if self._config.checkpoint.peer() is not None and len(peers) > 1:
            self.meet(peers)

    def meet(self, peers: Mapping[int, Sequence[Any]]) -> None:
        """Send the server what `listen` has returned on each node."""
        addresses = {node: (host, port) for node, (host, port, _) in peers.items()}
        self._ask(r.Peers(peers=addresses, domains={node: domain for node, (_, _, domain) in peers.items()}))

    def go(self, generation: int, decision: Decision, run: str, node: int, nodes: int, owners: int) -> None:
        """All have the decided step: what older generations made after it is given up."""
        step = decision.step
        begins = r.Enter(generation=generation, base=step, drop=step, run=run, node=node, nodes=nodes, owners=owners)
        self._ask(begins.model_copy(update={"first": self._first}))
        self._ask(r.Fence(generation=generation, step=step, run=run, stored=tuple(decision.stored)))

    def schedule_copy(self, kind: str, step: int) -> None:
        """Have `step` copied to the tier of this kind, once it is saved."""
        self._ask(r.ScheduleCopy(kind=kind, step=step))

    def newest_durable(self) -> tuple[int, str] | None:
        """Step and URL of the newest checkpoint that this node has brought to a durable tier."""
        found = [
            (int(each["durable_step"]), str(each.get("url", each["tier"])))
            for each in self._ask(r.Status()).copying
            if each.get("durable_step")
        ]
        return max(found, default=None)

    def hand_over(self) -> None:
        """What this node alone has goes to peers, and to durable tiers what is due there: the node may go."""
        self._ask(r.ReplicateNow())
        self.wait_uploaded()

    def wait_uploaded(self) -> None:
        """Until what is due has been brought to the durable tiers."""
        self._ask(r.WaitIdle(timeout_s=self._config.checkpoint.finish_s))

    def bring(self, save_id: str) -> Iterator[r.UploadProgress]:
        """Have this node's part of a commit brought to each durable tier, due or not: how far it is, now and then, and
        in the end."""
        until = time.monotonic() + self._config.checkpoint.finish_s
        while True:
            left_s = max(0.0, until - time.monotonic())
            progress = self._ask(r.UploadNow(save_id=save_id, timeout_s=min(left_s, _TELL_S)))
            yield progress
            if progress.idle or not left_s:
                return

    def close(self) -> None:
        """Leave the server to others; it ends when it is idle."""
        if self._client is not None:
            self._client.close()

    def end(self) -> None:
        """The job has succeeded: give the memory back."""
        self.close()
        with contextlib.suppress(ProcessLookupError):  # it ended by itself
            os.kill(self._pid, signal.SIGTERM)

    def _ask(self, request: Request[A]) -> A:
        assert self._client is not None, "not connected yet"
        return self._client.ask(request)
