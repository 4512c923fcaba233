"""What goes wrong in a simulated cluster, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyperpod_ext.runtime.membership.candidates import CANDIDATES

if TYPE_CHECKING:
    from .cluster import Cluster
    from .machine import Machine

_BEGIN_S, _SPREAD_S = 1.0, 25.0
_KINDS = (
    ("kill a worker", 3),
    ("raise", 2),
    ("lose a node", 3),
    ("a node falls silent", 2),
    ("cut a connection", 2),
    ("pause an agent", 2),
    ("partition", 3),
    ("copies cannot be read", 2),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a schedule takes place in."""

    nodes: int
    spares: int
    workers_per_node: int
    sharing: str
    steps: int
    step_s: float
    continues: bool = False
    """Whether healthy ranks go on while lost ones are replaced."""
    candidates: int = CANDIDATES
    """Nodes that have what another coordinator needs."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    at: float
    kind: str
    where: float
    """Picks the machine, of those there are then: 0 to 1."""
    lasts: float
    returns: bool
    """Whether a lost node's agent is started again."""

    @property
    def until(self) -> float:
        return self.at + self.lasts

    def happen(self, cluster: Cluster) -> None:
        if not (agents := cluster.agents):
            return
        machine = agents[int(self.where * len(agents))]
        if self.kind not in ("kill a worker", "raise", "partition", "copies cannot be read", "cut a connection"):
            cluster.judge.disturbed.add(machine.node)
        if self.kind == "cut a connection" and cluster.judge.silent:
            # it looks for another coordinator before the rest, and may hold to a vote for a node that falls silent, too
            cluster.judge.disturbed.add(machine.node)
        _HAPPEN[self.kind](self, cluster, machine)


def _kill(fault: Fault, cluster: Cluster, machine: Machine) -> None:
    if machine.workers:
        worker = machine.workers[min(machine.workers)]
        cluster.tell(f"{worker} on node {machine.node} is killed")
        _strike(cluster, worker.rank)
        worker.kill()


def _raise(fault: Fault, cluster: Cluster, machine: Machine) -> None:
    if machine.workers:
        worker = machine.workers[min(machine.workers)]
        cluster.tell(f"{worker} on node {machine.node} will raise")
        worker.raises = True
        _strike(cluster, worker.rank)


def _strike(cluster: Cluster, rank: int) -> None:
    cluster.judge.struck[rank] = cluster.judge.struck.get(rank, 0) + 1


def _lose(fault: Fault, cluster: Cluster, machine: Machine) -> None:
    silent = fault.kind == "a node falls silent"
    cluster.tell(f"node {machine.node} is lost{', silently' if silent else ''}")
    machine.lose(silent=silent)
    cluster.judge.silent |= silent
    if fault.returns:

        def boot() -> None:
            if machine.agent is None and cluster.agents:
                cluster.tell(f"node {machine.node} is started again")
                cluster.network.come_back(machine.host)
                machine.boot(rejoin=True)

        cluster.loop.call_later(fault.lasts, boot)


def _cut(fault: Fault, cluster: Cluster, machine: Machine) -> None:
    assert machine.agent is not None
    cluster.tell(f"connections of node {machine.node} are cut: {cluster.network.cut(machine.agent)}")


def _pause(fault: Fault, cluster: Cluster, machine: Machine) -> None:
    agent = machine.agent
    assert agent is not None
    cluster.tell(f"the agent of node {machine.node} stands still for {fault.lasts:.1f} s")
    agent.pause()

    def resume() -> None:
        cluster.tell(f"the agent of node {machine.node} goes on")
        agent.resume()

    cluster.loop.call_later(fault.lasts, resume)


def _partition(fault: Fault, cluster: Cluster, machine: Machine) -> None:
    rng = random.Random(fault.where)
    share = rng.choice([0.2, 0.5])
    groups = {one.host: int(rng.random() < share) for one in cluster.machines}
    cut = [one.node for one in cluster.machines if groups[one.host]]
    cluster.judge.disturbed.update(cut)
    cluster.tell(f"nodes {cut} are cut off from the others for {fault.lasts:.1f} s")
    cluster.network.partition(groups)

    def heal() -> None:
        cluster.tell("the network is whole again")
        cluster.network.partition({})

    cluster.loop.call_later(fault.lasts, heal)


def _cut_off(fault: Fault, cluster: Cluster, machine: Machine) -> None:
    """Not drawn: tests name the node."""
    cluster.tell(f"node {machine.node} reaches no other, and stays so")
    cluster.network.partition({machine.host: 1})


def _unreadable(fault: Fault, cluster: Cluster, machine: Machine) -> None:
    assert machine.memory is not None
    cluster.tell(f"the copies on node {machine.node} cannot be read for {fault.lasts:.1f} s")
    cluster.judge.unreadable = True
    machine.memory.unreadable_until = cluster.loop.time() + fault.lasts


_HAPPEN: dict[str, Any] = {
    "kill a worker": _kill,
    "raise": _raise,
    "lose a node": _lose,
    "a node falls silent": _lose,
    "cut a connection": _cut,
    "pause an agent": _pause,
    "partition": _partition,
    "cut off": _cut_off,
    "copies cannot be read": _unreadable,
}


def setting_of(rng: random.Random) -> Setting:
    """Of a seed."""
    nodes = rng.choice([2, 3, 3, 4, 5, 6, 8])
    return Setting(
        nodes=nodes,
        spares=rng.choice([0, 1, 1, 2]),
        workers_per_node=rng.choice([1, 1, 2]) if nodes < 5 else 1,
        sharing=rng.choice(["same", "shard"]),
        steps=rng.choice([8, 15, 25]),
        step_s=rng.choice([0.3, 0.7, 1.2]),
    )


def draw(rng: random.Random, setting: Setting, count: int) -> list[Fault]:
    """So many faults, some of them close together."""
    kinds, weights = zip(*_KINDS, strict=True)
    at = _BEGIN_S + rng.choice([0.0, rng.uniform(0, 4.0), rng.uniform(1.0, 4.0)])
    faults = []
    for _ in range(count):
        at += rng.choice([rng.uniform(0, 0.1), rng.uniform(0, 1.0), rng.uniform(0, 2 * _SPREAD_S / count)])
        lasts = rng.choice([rng.uniform(0, 1.0), rng.uniform(0, 12.0)])
        faults.append(Fault(at, rng.choices(kinds, weights)[0], rng.random(), lasts, rng.random() < 0.6))
    return faults
