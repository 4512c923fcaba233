"""Control plane under `hyperpodrun --inprocess-restart`, where the operator starts generations and assigns ranks.

hyperpodrun's agents provide no store to their workers. Each rank's own key-value server listens on port HPX_PORT_BASE +
local rank at its node's address; the operator sends the nodes' addresses to all ranks. No single process serves all
ranks, so the job survives the death of rank 0.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hyperpod_ext.errors import HyperpodExtError, JobFailedError
from hyperpod_ext.runtime.agent.fork_server import load
from hyperpod_ext.runtime.control_plane.agent import Generation
from hyperpod_ext.runtime.control_plane.hyperpod_socket import HyperpodAgentClient
from hyperpod_ext.runtime.control_plane.launcher import ENV_HYPERPOD_SOCKET
from hyperpod_ext.runtime.control_plane.own_store import OwnStore
from hyperpod_ext.runtime.control_plane.settings import Settings, port_base
from hyperpod_ext.runtime.control_plane.standalone import Members, RendezvousRound
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.process_group.groups import ProcessGroups
from hyperpod_ext.runtime.process_group.store import Address
from hyperpod_ext.runtime.state.training_state import ConsistentStep

_ADDRESSES = Path("/opt/ml/input/config/pod_resourceconfig.json")
"""The agent's file with the addresses of all nodes; later messages to workers may contain only changed addresses."""
_ESCALATION = ("in_process_restart", "process_level_restart", "job_level_restart")


class HyperpodMembers(Members):
    """One worker process of a job that the HyperPod operator runs."""

    def __init__(self, groups: ProcessGroups) -> None:
        super().__init__(groups)
        self._started = 0
        self._addresses: dict[int, str] = {}
        self._same = ("", 0, 0)
        self._faults = 0
        self._reported: tuple[int, str] | None = None
        self._base = port_base()
        self._local_rank, self._local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        self._settings = Settings.of(int(os.environ.get("NNODES", "1")), self._local_size, os.environ)
        self._keys = OwnStore(self._settings.secret)
        self._warm_up()
        self._agent = HyperpodAgentClient(
            os.environ[ENV_HYPERPOD_SOCKET],
            self._local_rank,
            on_start=self._on_start,
            on_fault=self._on_fault,
            on_gone=lambda: os._exit(1),  # without hyperpodrun's agent, no generation would ever begin
        )

    def _warm_up(self) -> None:
        """Import slow modules before the operator's barrier, at which a spare waits anyway. If a spare imported modules
        only when it gets a rank, all other ranks would wait for the spare."""
        for module in self.settings.config.restart.preload:
            if find_spec(module.partition(".")[0]) is not None:
                load(module)

    def join(self, live: ConsistentStep | None) -> Generation:
        try:
            return super().join(live)
        except HyperpodExtError as error:  # end the job: its other processes would fail in the same way
            self._agent.fault(self.rank, _ESCALATION[-1], type(error).__name__, error.message)
            raise

    def _next_round(self) -> RendezvousRound:
        message = self._agent.barrier()
        envs: dict[str, str] = message["worker_envs"]
        os.environ.update(envs)  # set torchrun's variables for this generation
        for one in message["aggregate_worker_data"]["rank_ips"] or []:
            self._addresses[int(one["rank"])] = str(one["ip"])
        nodes = int(envs["WORLD_SIZE"]) // self._local_size
        hosts = self._hosts(nodes)
        node, rank = int(envs["GROUP_RANK"]), int(envs["RANK"])
        assert self._keys is not None
        self._keys.start(hosts[node], self._base + self._local_rank)
        addresses: list[Address] = [(host, self._base + local) for host in hosts for local in range(self._local_size)]
        number = _number(message)
        if self._round is not None and number <= self._round.number:
            raise JobFailedError(
                f"the operator started restart {number - 1} of the job twice, so ranks could mix up the two generations"
            )
        return RendezvousRound(number, rank, len(addresses), self._local_rank, self._local_size, node, tuple(addresses))

    def _hosts(self, nodes: int) -> list[str]:
        """Return the address of each of the `nodes` nodes.

        Raises:
            JobFailedError: the operator has not sent the addresses of all nodes.
        """
        kept = json.loads(_ADDRESSES.read_text())["ips"] if _ADDRESSES.exists() else []
        known = {node: ip for node, ip in enumerate(kept) if ip} | self._addresses
        if missing := [node for node in range(nodes) if node not in known]:
            raise JobFailedError(f"the operator has not sent the addresses of nodes {missing}")
        return [known[node] for node in range(nodes)]

    # --- messages from the agent, in the receiving thread ----------------------------------------------

    def _on_start(self, message: wire.Message) -> None:
        self._started = max(self._started, _number(message))

    def _on_fault(self) -> None:
        self._abort(self._started)

    # --- messages to the agent ----------------------------------------------------------------------

    def failed(self, failure: c.Failed) -> bool:
        """Request a restart from the operator, at a higher level if the last restart did not help."""
        what = f"rank {self.rank}, step {failure.step}: {failure.cause}"
        self._report_fault(failure.step, failure.cause)
        if failure.final:
            self._agent.fault(self.rank, _ESCALATION[-1], failure.code, what)
            return False
        self._faults += 1
        known, at, times = self._same
        same = failure.place or failure.cause
        self._same = (same, failure.step, times + 1 if (known, at) == (same, failure.step) else 0)
        over_budget = self._faults > self.settings.config.restart.max_restarts
        level = max(self._same[2], _ESCALATION.index("process_level_restart") if failure.process_unusable else 0)
        mode = _ESCALATION[-1] if over_budget else _ESCALATION[min(level, len(_ESCALATION) - 1)]
        self._log(f"{what}; requests a {mode.replace('_', ' ')}")
        self._agent.fault(self.rank, mode, failure.code, what)
        return True

    def _going(self, step: int) -> None:
        self._agent.passed()
        if self._node is not None:
            self._agent.labels({"hyperpod-ext/generation": str(self._generation)})

    def event(self, event: str, **fields: Any) -> None:
        super().event(event, **fields)
        if event == "step":
            self._report_durable()

    def _uploads_done(self) -> None:
        self._report_durable()

    def _report_durable(self) -> None:
        """Report this node's newest durable checkpoint to the operator, if it is new."""
        if self._node is None or not self.settings.config.checkpoint.durable():
            return
        newest = self._node.newest_durable()
        if newest is None or newest == self._reported:
            return
        if self._reported is None:
            self._agent.announce_checkpoints(self.settings.config.name)
        self._reported = newest
        self._agent.checkpoint(*newest)


def _number(message: wire.Message) -> int:
    """Return the number of the attempt that a `job_start` begins, from 1; the operator counts restarts from 0."""
    return int(message["worker_envs"]["JOB_RESTART_COUNT"]) + 1
