"""Connect the ranks of a script to each other, to their node's memory server, and to other nodes' memory servers."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hyperpod_ext.config.checkpoint import CheckpointPolicy
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.errors import HyperpodExtError, JobFailedError
from hyperpod_ext.runtime.control_plane.node_memory_client import NodeMemoryClient
from hyperpod_ext.runtime.dcp.collectives import Ranks
from hyperpod_ext.runtime.ipc.environment import ENV_MEMORY_SOCKET, ENV_SECRET_FILE, read_secret
from hyperpod_ext.runtime.ipc.interface import address_towards
from hyperpod_ext.runtime.membership.node_map import Nodes
from hyperpod_ext.runtime.memory_server.client.client import MemoryClient
from hyperpod_ext.runtime.memory_server.client.start import ServerFiles, place_of, runtime_dir, secret_file_of
from hyperpod_ext.runtime.memory_server.protocol import requests as r

T = TypeVar("T")


class MemoryConnection:
    """One rank's connection to its node's memory server.

    Every method is a collective call, which all ranks make together, unless its docstring says otherwise.
    """

    def __init__(self, job: str, policy: CheckpointPolicy, secret_file: Path | None, idle_exit_s: float) -> None:
        self._job, self._policy = job, policy
        self.ranks = Ranks()
        if self.ranks.world_size == 1 < int(os.environ.get("WORLD_SIZE", "1")):
            raise JobFailedError(
                f"Tiers(...) was called before the job's {os.environ['WORLD_SIZE']} processes had a process group",
                hint="Call torch.distributed.init_process_group first.",
            )
        directory = self.together("directory", runtime_dir)
        me = {"place": place_of(directory), "node": os.environ.get("GROUP_RANK"), "pid": os.getpid()}
        ranks = self.ranks.all_gather("who is where", me)
        self.nodes = Nodes.of(ranks)
        self._pids = [int(each["pid"]) for each in ranks]
        self.node = self.nodes.node_of[self.ranks.rank]
        self.leads = self.nodes.leader(self.node) == self.ranks.rank
        """Whether this rank sends its node's requests to the memory server."""
        agent = os.environ.get(ENV_MEMORY_SOCKET)
        self.ours = agent is None
        """Whether the ranks start the memory server themselves, because the node has no agent."""
        self._secret_file = self.together("secret file", lambda: self._find_secret(secret_file))
        self.secret = self.together("secret", lambda: read_secret(self._secret_file))
        self._check_secrets()
        config = RuntimeConfig(
            name=job,
            nodes=self.nodes.count,
            workers_per_node=len(self.nodes.ranks(self.node)),
            checkpoint=policy,
        )
        self._memory = NodeMemoryClient(config, self._secret_file, idle_exit_s)
        place = ServerFiles(directory, job, self.nodes.index(self.node))
        if self.ours:
            self.for_node("memory server", lambda: self._memory.connect(place, self.node))
        self.client = self.together("connect", lambda: MemoryClient(agent or str(place.socket)))
        if self.ours:  # without an agent, nothing has checked the tiers yet
            self.for_node("durable tiers", lambda: self.client.ask(r.CheckTiers()))
        self.addresses = self._meet_peers()
        """Host and port of each node's memory server, by node; empty if nodes exchange no snapshots."""

    def together(self, what: str, act: Callable[[], T]) -> T:
        """Return this rank's result of `act()`. If `act()` raises on any rank, raise that error on all ranks."""
        result, error = None, None
        try:
            result = act()
        except Exception as problem:
            error = problem
        self.ranks.vote(what, error)
        return result  # type: ignore[return-value]  # there was no error

    def for_node(self, what: str, act: Callable[[], T]) -> T | None:
        """Call `act()` on the first rank of each node and return its result there; return None on other ranks.

        If `act()` raises on any rank, raise that error on all ranks.
        """
        return self.together(what, lambda: act() if self.leads else None)

    def held(self) -> r.Snapshots:
        """Return the snapshots on this node, once the memory server has handled all requests of earlier processes.

        This call is not collective.

        Raises:
            ConflictError: another process saves under the job's name.
        """
        if self.ours:
            return self._memory.held(self._pids)
        return self.client.ask(r.Held(owner=self.ranks.rank, pid=os.getpid()))

    def close(self) -> None:
        self.client.close()
        self._memory.close()

    # --- the secret -----------------------------------------------------------------------------

    def _find_secret(self, given: Path | None) -> Path:
        if given is not None or ENV_SECRET_FILE in os.environ:
            return given or Path(os.environ[ENV_SECRET_FILE])
        if self.nodes.machines > 1:
            raise HyperpodExtError(
                f"the {self.nodes.machines} machines of job {self._job} have no common secret",
                hint="Write the same 16 or more random bytes into a file of mode 600 on each machine, and set "
                f"{ENV_SECRET_FILE} or secret_file to its path.",
            )
        return secret_file_of(self._job, durable=bool(self._policy.durable()))

    def _check_secrets(self) -> None:
        proof = hmac.new(self.secret, b"hyperpod_ext: one secret", hashlib.sha256).hexdigest()
        if len(set(self.ranks.all_gather("proof", proof))) > 1:
            raise HyperpodExtError(
                f"the ranks of job {self._job} have different secrets",
                hint="Set HPX_SECRET_FILE on each machine to a file with the same bytes.",
            )

    # --- memory servers -------------------------------------------------------------------------

    def _meet_peers(self) -> dict[int, tuple[str, int]]:
        if not self.ours or self.nodes.count == 1 or self._policy.peer() is None:
            return {}
        mine = self.for_node("listen", self._listen)
        listening = [each for each in self.ranks.all_gather("peers", mine) if each is not None]
        peers = {int(node): there for node, *there in listening}
        self.for_node("meet", lambda: self._memory.meet(peers))
        return {node: (str(host), int(port)) for node, (host, port, _) in peers.items()}

    def _listen(self) -> list[Any]:
        host = address_towards(os.environ["MASTER_ADDR"]) if self.nodes.machines > 1 else "127.0.0.1"
        return [self.node, *self._memory.listen(host)]
