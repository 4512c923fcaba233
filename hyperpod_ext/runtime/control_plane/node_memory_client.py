"""The memory server of this node, where no agent of ours keeps one: the node's first rank starts it and speaks for it.

It outlives the workers, and ends by itself some time after the last of them has left for good.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hyperpod_ext.errors import ConflictError
from hyperpod_ext.runtime.control_plane.settings import Settings
from hyperpod_ext.runtime.ipc.declared import encode
from hyperpod_ext.runtime.ipc.environment import ENV_FAILURE_DOMAIN
from hyperpod_ext.runtime.memory_server.client.client import MemoryClient
from hyperpod_ext.runtime.memory_server.client.start import ServerFiles, runtime_dir, start_server
from hyperpod_ext.runtime.memory_server.protocol import requests as r
from hyperpod_ext.runtime.memory_server.protocol.request import A, Request
from hyperpod_ext.runtime.snapshot.select import Decision

_IDLE_EXIT_S = 600.0
"""Longer than the launchers take to start workers again."""
_QUIET_S = 15.0
"""How long what a dead worker had asked for may take to be done."""
_TELL_S = 10.0
"""How often it is told that the last step is still on its way."""


class NodeMemoryClient:
    """This rank's word to the memory server, for its whole node. Only a node's first rank uses it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client: MemoryClient | None = None
        self._place: ServerFiles | None = None
        self._pid = 0
        self._first: tuple[str, int] | None = None
        """Where the memory server of node 0 listens."""

    def place(self, index: int) -> ServerFiles:
        """Where the server of the `index`-th node on this machine is reached."""
        return ServerFiles(runtime_dir(), self._settings.config.name, index)

    def connect(self, place: ServerFiles, node: int) -> None:
        """Start the server if there is none.

        Raises:
            ConflictError: the one that is there was started with another policy.
            UnreachableError: it does not come up.
        """
        if self._place == place:
            return
        config = self._settings.config
        client = start_server(place, config, node, self._settings.secret_file, _IDLE_EXIT_S)
        server = client.ask(r.Handshake())
        if server.config["checkpoint"] != config.checkpoint.model_dump(mode="json"):
            client.close()
            raise ConflictError(
                f"the memory server of job {config.name} on this node runs with another checkpoint policy",
                hint=f"Choose another name for the job, or end that server, and with it what only its memory holds: "
                f"kill {server.pid}",
            )
        self._client, self._place, self._pid = client, place, server.pid

    def held(self, pids: Sequence[int]) -> r.Snapshots:
        """Whole snapshots in memory and on disks, once all that earlier processes had asked for is done. `pids`: the
        workers of now.

        Raises:
            ConflictError: somebody else trains under the job's name.
        """
        others = self._ask(r.WaitOthers(pids=tuple(pids), timeout_s=_QUIET_S)).others
        if others:
            raise ConflictError(
                f"process {others[0]} saves as job {self._settings.config.name}, too",
                hint="End it, or choose another name for this job.",
            )
        return self._ask(r.Held())

    def listen(self, host: str) -> list[Any]:
        """Where other nodes reach the server, and what fails together with this one: host, port, domain."""
        return [host, self._ask(r.Listen(host=host)).port, os.environ.get(ENV_FAILURE_DOMAIN, "")]

    def durable(self, exclude: Sequence[tuple[str, str]]) -> Mapping[str, Any]:
        """What the durable tiers hold, as JSON says it."""
        return encode(self._ask(r.Durable(exclude=tuple(exclude))))

    def begin(self, generation: int, peers: Mapping[int, Sequence[Any]]) -> None:
        """Refuse writers of older generations; tell who the other nodes are."""
        self._ask(r.Fence(generation=generation))
        self._first = (str(peers[0][0]), int(peers[0][1])) if 0 in peers and peers[0][1] else None
        if self._settings.config.checkpoint.peer() is not None and len(peers) > 1:
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
        self._ask(r.WaitIdle(timeout_s=self._settings.config.checkpoint.finish_s))

    def bring(self, save_id: str) -> Iterator[r.UploadProgress]:
        """Have this node's part of a commit brought to each durable tier, due or not: how far it is, now and then, and
        in the end."""
        until = time.monotonic() + self._settings.config.checkpoint.finish_s
        while True:
            left_s = max(0.0, until - time.monotonic())
            progress = self._ask(r.UploadNow(save_id=save_id, timeout_s=min(left_s, _TELL_S)))
            yield progress
            if progress.idle or not left_s:
                return

    def end(self) -> None:
        """The job has succeeded: give the memory back."""
        assert self._client is not None
        self._client.close()
        with contextlib.suppress(ProcessLookupError):  # it ended by itself
            os.kill(self._pid, signal.SIGTERM)

    def _ask(self, request: Request[A]) -> A:
        assert self._client is not None, "not connected yet"
        return self._client.ask(request)
