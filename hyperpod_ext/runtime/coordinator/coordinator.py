"""The job's membership over TCP, on one of the agents. Decides nothing itself: `Membership` does.

Keeps the event log, and writes the report when the job ends. What it knows goes to every agent at each change,
as a record, so that any of them can go on with it (`line.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.runtime.coordinator.members import Agent
from hyperpod_ext.runtime.coordinator.reports import Hearing
from hyperpod_ext.runtime.coordinator.resize_orders import orders_due, read_orders
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.membership import membership as m
from hyperpod_ext.runtime.membership.elastic import ElasticMembership
from hyperpod_ext.runtime.membership.quorum import newest
from hyperpod_ext.runtime.membership.rank_assignment import Scale
from hyperpod_ext.runtime.metrics import tracing

_ORDERS_S = 0.1
"""How often it is looked whether somebody wants the job on another number of nodes."""


def _scale(membership: ElasticMembership, config: RuntimeConfig) -> None:
    """Tell a membership what the job may grow and shrink to."""
    batch, each = config.global_batch_size, config.workers_per_node
    membership.scale = Scale.of(config.elastic, config.nodes, each, batch)
    membership.reserve, membership.next_due = config.spares, config.checkpoint.next_due


class Coordinator(Hearing):
    """One job's coordinator: who comes, who is lost, and whether those who are left may go on."""

    _watching: asyncio.Task[None]
    _looking: asyncio.Task[None]

    @classmethod
    def first(cls, config: RuntimeConfig, node: int, run_dir: Path, master_port: int) -> Self:
        """That of a job which begins."""
        nodes = {rank: rank // config.workers_per_node for rank in range(config.world_size)}
        durable, budgets = bool(config.checkpoint.durable()), m.Budgets.of(config.restart)
        membership = ElasticMembership(nodes, budgets.max_restarts, durable=durable, budgets=budgets)
        _scale(membership, config)
        run = secrets.token_hex(8)
        earlier = set(read_orders(run_dir))  # before there is an event log: who orders waits for that
        made = cls(config, node, run_dir, membership=membership, master_port=master_port, run=run)
        made._watching = asyncio.create_task(made._watch())
        made._looking = asyncio.create_task(made._look_for_orders(earlier))
        made._log("job_started", world_size=config.world_size, nodes=config.nodes, spares=config.spares)
        return made

    @classmethod
    def successor(
        cls, config: RuntimeConfig, node: int, run_dir: Path, own: wire.Message, votes: Sequence[wire.Message]
    ) -> Self:
        """That of a job whose coordinator is lost, from what this agent and those who voted for it know."""
        hellos = [own, *votes]
        record = newest([hello["record"] for hello in hellos])
        membership, commands = ElasticMembership.revived(
            record["membership"],
            m.Budgets.of(config.restart),
            durable=bool(config.checkpoint.durable()),
            generation=max(int(hello["generation"]) for hello in hellos),
            committed=max(int(hello["committed"]) for hello in hellos),
        )
        _scale(membership, config)
        made = cls(
            config,
            node,
            run_dir,
            membership=membership,
            master_port=int(record["master_port"]),
            run=str(record["run"]),
            term=max(int(hello["record"]["term"]) for hello in hellos) + 1,
        )
        lost = int(record["coordinator"])
        roster, until = made._roster, time.monotonic() + config.restart.lease_s / 2
        roster.members = {int(its): member for its, member in record["members"].items()}
        roster.standing = [set(roster.members)]
        # who voted is as good as there; the others get their time
        roster.expected = {its: until for its in roster.members if its not in (node, lost)}
        made._watching = asyncio.create_task(made._watch())
        made._looking = asyncio.create_task(made._look_for_orders(made._orders_taken()))
        made._log("coordinator", node=node, before=lost, term=made._term)
        made._carry_out(commands)
        made._resume_world()
        if lost in roster.members:
            made._lose(lost, "its agent, which coordinated the job, is gone")
        return made

    def show(self) -> None:
        """Let the job's numbers be read, if the job wants that."""
        if self._shown is not None:
            self._shown.open()

    async def close(self) -> None:
        """Let the agents have their last message, and say theirs."""
        self._watching.cancel()
        self._looking.cancel()
        for agent in self._roster.agents.values():
            with contextlib.suppress(ConnectionError):  # that agent left first
                await agent.writer.wait_closed()
        if self._left and self.ended.done() and self.ended.result() != "succeeded":
            self._report(self.ended.result())  # with what was brought home since
        if self._shown is not None:
            await self._shown.close()
        if self.ended.done() and tracing.is_asked_for():
            await asyncio.to_thread(self._send_trace)
        self._log_file.close()

    def _send_trace(self) -> None:
        """Where it does not work, the job has ended as it has."""
        root = tracing.trace(self._log_file.read(), self._config.name)
        try:
            if root is not None:
                tracing.send(root, time.time() - time.monotonic())
        except (ImportError, OSError) as error:
            hint = "; pip install 'hyperpod-ext[observability]'" if isinstance(error, ImportError) else ""
            sys.stderr.write(f"the job's spans were not sent: {error}{hint}\n")

    # --- one connection an agent ----------------------------------------------------------------

    async def serve(
        self,
        hello: wire.Message,
        reading: asyncio.Task[wire.Message | None],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """An agent has come, with `hello`; take what it says until it is gone."""
        node = int(hello["node"])
        if refusal := self._refuse(node, hello):
            writer.write(wire.encode({"type": "stop", "why": refusal, "hint": ""}))
            await writer.drain()
            return
        agent = Agent(writer, time.monotonic())
        try:
            self._hear_clock(node, hello)
            self._welcome(node, hello, agent)
            message = await reading
            while message is not None:
                agent.heard_at = time.monotonic()
                if self._roster.agents.get(node) is agent:
                    self._take(node, agent, message)
                message = await wire.read(reader)
        finally:
            if self._roster.agents.get(node) is agent:
                self._lose(node, "the connection to its agent closed")

    def _refuse(self, node: int, hello: wire.Message) -> str:
        """Why an agent is not let in; empty: it is."""
        if not 0 <= node < self._config.most_nodes + self._config.spares:
            spares = f" and {self._config.spares} spares" if self._config.spares else ""
            return f"it is none of this job's {self._config.most_nodes} nodes{spares}"
        if self._stood_down:
            return "the coordinator has stood down: it reaches too few of the job's nodes"
        if node in self._roster.agents:
            return "another agent says that it is this node, and is there"
        if hello["record"] is not None:
            known = self._roster.members.get(node)
            return "" if known and known["id"] == hello["id"] else "it was given up, and the others went on without it"
        if self._membership.is_shut_out(node):
            return f"it was lost {self._membership.losses[node]} times, and is not taken again"
        return ""

    def _welcome(self, node: int, hello: wire.Message, agent: Agent) -> None:
        if self.ended.done():  # somebody cancelled before the first node was there
            agent.writer.write(wire.encode(self._end_order()))
            self._roster.agents[node] = agent
            return
        self._roster.enter(node, hello, agent)
        self._come_home_too(node)
        if hello["record"] is not None:
            self._take_back(node, hello)
            return
        self._log("node_joined", node=node, pid=hello["pid"])
        if self._begun:
            commands = self._membership.node_came(node)
            self._tell_record()
            self._carry_out(commands)
        elif set(range(self._config.nodes)) <= self._roster.agents.keys():
            self._begun, self._forming_since = True, time.monotonic()
            self._roster.begin()
            self._membership.spares = {its for its in self._roster.agents if its >= self._config.nodes}
            self._tell_record()
            self._carry_out([m.Replace(rank) for rank in self._membership.nodes])

    def _take_back(self, node: int, hello: wire.Message) -> None:
        """A node that knows another coordinator, or has lost this one for a moment, goes on where it was."""
        membership = self._membership
        self._exit_codes |= {int(rank): int(code) for rank, code in hello["exited"].items()}
        membership.step_committed(int(hello["committed"]))
        self._tell_record()
        if membership.phase is m.Phase.ENDED:
            self._send(node, {"type": "finish", "generation": membership.generation})
            self._check_exits()
            return
        moved = membership.moved_since(int(hello.get("moved_in", 0)))
        if int(hello["generation"]) < membership.generation:
            numbers = {} if moved is None else {"moved": moved, "moved_in": membership.moved_in}
            abort = {"type": "abort", "generation": membership.generation, "rank": -1, "drop_coming": True}
            self._send(node, abort | numbers)
        here = {rank for rank, its in membership.nodes.items() if its == node and rank not in membership.vacant}
        staying = [int(rank) for rank, worker in hello["workers"].items() if not worker.get("coming")]
        there = {rank if moved is None else moved.get(rank) for rank in staying}
        for rank in sorted(here - there):
            self._send(node, {"type": "replace", "rank": rank})
        if hello.get("leaving") and node not in membership.leavers:
            self._carry_out(membership.leave(node))
        if not here and hello["workers"]:  # of a world that has come to nothing, or that it has left
            self._send(node, {"type": "retire" if node in membership.settling else "unprepare"})

    def _take(self, node: int, agent: Agent, message: wire.Message) -> None:
        """One message of an agent, most of them passed on from its workers."""
        match message["type"]:
            case "beat":
                self._hear_clock(node, message)
                self._send(node, {"type": "beat", "heard": agent.events})
                return
            case "noted":
                self._roster.noted(node, int(message["number"]))
                if self._dismissing and self._roster.is_agreed:
                    self._let_go()
                return
            case "event":
                agent.events += 1
            case "leaving":
                self._left[node] = message["held"]
                self._bring_home()
            case "home":
                self._arrived.add(node)
                self._see_home()
        if (self.ended.done() and message["type"] != "event") or self._stood_down:
            return  # what becomes of its processes now is no news
        rank, generation = int(message.get("rank", -1)), int(message.get("generation", 0))
        self._act(node, rank, generation, self._clocks.translated(node, message))

    def _hear_clock(self, node: int, message: wire.Message) -> None:
        if "clock" in message:
            self._clocks.heard(node, float(message["clock"]), time.monotonic())

    # --- another number of nodes ----------------------------------------------------------------

    async def _look_for_orders(self, taken: set[str]) -> None:
        """Take orders to resize, in the order in which they came; those of an earlier run are none."""
        if self._config.elastic is None:
            return
        while not self.ended.done() and not self._stood_down:
            await asyncio.sleep(_ORDERS_S)
            if self._membership.phase is not m.Phase.RUNNING:
                continue
            for name, order in orders_due(read_orders(self._run_dir), taken, self._roster.members):
                taken.add(name)
                self._carry_out(self._membership.resize(order.nodes, name))

    def _resume_world(self) -> None:
        """What the coordinator before this one was about to enter, if anything: this one tells how it goes."""
        worlds = [event for event in self._log_file.read() if event["event"] in ("world", "resized")]
        if worlds and worlds[-1]["event"] == "world":
            self._world = {key: value for key, value in worlds[-1].items() if key not in ("t", "event", "moved")}

    def _orders_taken(self) -> set[str]:
        """Orders that a coordinator before this one has taken."""
        return {str(event["order"]) for event in self._log_file.read() if event.get("order")}

    def _let_go(self) -> None:
        """All members know who they are now: those that are none any more may end."""
        nodes, self._dismissing = sorted(self._dismissing), set()
        for node in nodes:
            if node == self._node:
                continue
            if (agent := self._roster.agents.pop(node, None)) is not None:
                agent.writer.write(wire.encode({"type": "dismissed"}))
        if self._node in nodes:  # the others find another coordinator when this one's door closes
            self._stood_down = True
            self._log("stood_down", node=self._node, term=self._term, cause="it has left the job")
            self._send(self._node, {"type": "dismissed"})
            return
        self._carry_out(self._membership.reconcile())  # their numbers are free now

    # --- nodes that are lost --------------------------------------------------------------------

    def _lose(self, node: int, cause: str) -> None:
        """A node is gone, or cannot be told from one that is."""
        agent = self._roster.agents.get(node)
        if agent is not None:
            why = f"the others have given it up ({cause})"
            agent.writer.write(wire.encode({"type": "stop", "why": why, "hint": ""}))
            agent.writer.close()
        over = self.ended.done() or self._stood_down
        if over or self._coming_home:
            if not over:
                self._log("node_lost", node=node, cause=cause)
            self._roster.leave(node)
            self._left.setdefault(node, [])
            self._bring_home()
            self._see_home()
            return
        was = set(self._roster.members)
        enough = self._roster.leave(node)
        membership, seen = self._membership, time.monotonic()
        self._log("node_lost", t=seen, node=node, cause=cause)
        if not self._begun:
            if node < self._config.nodes:
                self._fail(m.Fail("JobFailedError", f"the agent of node {node} is gone before the job began: {cause}"))
            return
        if not enough:
            self._stand_down(was)
            return
        ranks = [rank for rank, its in membership.nodes.items() if its == node and rank not in membership.vacant]
        if membership.phase is m.Phase.ENDED:
            for rank in ranks:
                self._exit_codes.setdefault(rank, 0)  # its training was done
            self._check_exits()
            return
        commands = membership.node_lost(node, cause)
        step = membership.committed + 1
        for rank in ranks:
            fault = {"rank": rank, "node": node, "step": step, "cause": f"node {node} is lost: {cause}"}
            self._log("fault", t=seen, **fault, died=True, phase="", kind="lost", rung=m.Rung.NODE.value)
        self._carry_out(commands)
        self._tell_record()
        if node == self._asked and not self.ended.done():
            self._durable.repeat()

    def _stand_down(self, members: set[int]) -> None:
        """Too few nodes are left to speak for the job: others may go on, so these must not."""
        self._stood_down = True
        left = ", ".join(str(node) for node in sorted({*self._roster.agents, self._node}))
        why = f"of the job's {len(members)} nodes only {left} can be reached, which is no majority"
        self._log("stood_down", node=self._node, term=self._term, reached=sorted(self._roster.agents))
        hint = "Look at the network between the nodes; the others may have gone on."
        self._to_agents({"type": "stop", "why": why, "hint": hint})

    def _give_way(self, node: int, cause: str) -> None:
        """A node cannot go on, and says so itself; the coordinator's own leaves the job to another coordinator."""
        if node != self._node:
            self._lose(node, cause)
            return
        self._stood_down = True
        self._log("stood_down", node=node, term=self._term, cause=cause)
        self._send(node, {"type": "stop", "why": cause, "hint": ""})

    async def _watch(self) -> None:
        """Find nodes that are silent, and ranks that do not come."""
        lease_s = self._config.restart.lease_s
        every = lease_s / 6
        while not self.ended.done() and not self._stood_down:
            before = time.monotonic()
            await asyncio.sleep(every)
            now = time.monotonic()
            if now - before > 2 * every:  # this process stood still: what came meanwhile has not been read yet
                for agent in self._roster.agents.values():
                    agent.heard_at = max(agent.heard_at, now - lease_s / 4)
            for node, until in list(self._roster.expected.items()):
                if now > until:
                    self._lose(node, "it did not come to the new coordinator")
            for node, agent in list(self._roster.agents.items()):
                if now - agent.heard_at > lease_s / 2 and node != self._node:
                    self._lose(node, f"its agent was silent for {now - agent.heard_at:.1f} s")
            self._look_for_late_ranks(now)
