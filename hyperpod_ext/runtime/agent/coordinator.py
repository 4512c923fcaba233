"""The job's membership over TCP, on one of the agents. Decides nothing itself: `Membership` does.

Keeps the event log, and writes the report when the job ends. What it knows goes to every agent at each change,
as a record, so that any of them can go on with it (`line.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from hyperpod_ext.config.runtime import RuntimeConfig
from hyperpod_ext.runtime import wire
from hyperpod_ext.runtime.agent.durable import DurableQuestion
from hyperpod_ext.runtime.agent.event_log import EventLog, write_report
from hyperpod_ext.runtime.agent.homecoming import newest_of_all
from hyperpod_ext.runtime.agent.inquest import Inquest
from hyperpod_ext.runtime.agent.roster import Agent, Roster
from hyperpod_ext.runtime.causes import FaultKind
from hyperpod_ext.runtime.checkpoint.choose import Offer
from hyperpod_ext.runtime.goodput import make_report
from hyperpod_ext.runtime.hangs import Hang
from hyperpod_ext.runtime.rendezvous import membership as m
from hyperpod_ext.runtime.rendezvous.quorum import newest


class Coordinator:
    """One job's coordinator.

    Args:
        config: the job's runtime settings.
        node: the node it is on.
        run_dir: where events.jsonl and report.json go.
        master_port: free port for scripts that open process groups on their own.
        run: names this run of the job.
        term: rises with each coordinator.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        node: int,
        run_dir: Path,
        *,
        membership: m.Membership,
        master_port: int,
        run: str,
        term: int = 1,
    ) -> None:
        self._config, self._node, self._run_dir = config, node, run_dir
        self._membership, self._master_port, self._run, self._term = membership, master_port, run, term
        self._roster = Roster(node, standing=[{node}])
        self._begun = term > 1
        self._steps: dict[int, int] = {}
        self._stores: dict[int, tuple[str, int]] = {}
        """Where each rank serves its keys, as it said when it joined."""
        self._left: dict[int, list[dict[str, Any]]] = {}
        self._home: str | None = None
        self._durable = DurableQuestion(self._ask_durable)
        self._inquest = Inquest(config.world_size)
        self._asked = -1
        self._started, self._drained_at = time.monotonic(), dict[str, float]()
        self._exit_codes: dict[int, int] = {}
        self._joined_once = False
        self._waits: dict[int, asyncio.TimerHandle] = {}
        self._forming_since = time.monotonic()
        self._stood_down = False
        self._log_file = EventLog(run_dir, fresh=term == 1)
        self._log = self._log_file.write
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Final state: succeeded, failed or cancelled."""
        self._watching = asyncio.create_task(self._watch())

    @classmethod
    def first(cls, config: RuntimeConfig, node: int, run_dir: Path, master_port: int) -> Self:
        """That of a job which begins."""
        nodes = {rank: rank // config.workers_per_node for rank in range(config.world_size)}
        durable, budgets = bool(config.checkpoint.durable()), m.Budgets.of(config.restart)
        membership = m.Membership(nodes, budgets.max_restarts, durable=durable, budgets=budgets)
        run = secrets.token_hex(8)
        made = cls(config, node, run_dir, membership=membership, master_port=master_port, run=run)
        made._log("job_started", world_size=config.world_size, nodes=config.nodes, spares=config.spares)
        return made

    @classmethod
    def successor(
        cls, config: RuntimeConfig, node: int, run_dir: Path, own: wire.Message, votes: Sequence[wire.Message]
    ) -> Self:
        """That of a job whose coordinator is lost, from what this agent and those who voted for it know."""
        hellos = [own, *votes]
        record = newest([hello["record"] for hello in hellos])
        membership, commands = m.Membership.revived(
            record["membership"],
            m.Budgets.of(config.restart),
            durable=bool(config.checkpoint.durable()),
            generation=max(int(hello["generation"]) for hello in hellos),
            committed=max(int(hello["committed"]) for hello in hellos),
        )
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
        made._log("coordinator", node=node, before=lost, term=made._term)
        made._carry_out(commands)
        made._lose(lost, "its agent, which coordinated the job, is gone")
        return made

    async def close(self) -> None:
        """Let the agents have their last message."""
        self._watching.cancel()
        for agent in self._roster.agents.values():
            with contextlib.suppress(ConnectionError):  # that agent left first
                await agent.writer.wait_closed()
        self._log_file.close()

    def cancel(self) -> None:
        """End the job because somebody asked for it."""
        self._end("cancelled")

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
        if not 0 <= node < self._config.nodes + self._config.spares:
            spares = f" and {self._config.spares} spares" if self._config.spares else ""
            return f"it is none of this job's {self._config.nodes} nodes{spares}"
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
            agent.writer.write(wire.encode({"type": "end", "state": self.ended.result()}))
            self._roster.agents[node] = agent
            return
        self._roster.enter(node, hello, agent)
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
        if int(hello["generation"]) < membership.generation:
            self._send(node, {"type": "abort", "generation": membership.generation, "rank": -1})
        here = {rank for rank, its in membership.nodes.items() if its == node and rank not in membership.vacant}
        for rank in sorted(here - {int(rank) for rank in hello["workers"]}):
            self._send(node, {"type": "replace", "rank": rank})

    def _lose(self, node: int, cause: str) -> None:
        """A node is gone, or cannot be told from one that is."""
        agent = self._roster.agents.get(node)
        if agent is not None:
            why = f"the others have given it up ({cause})"
            agent.writer.write(wire.encode({"type": "stop", "why": why, "hint": ""}))
            agent.writer.close()
        if self.ended.done() or self._stood_down:
            self._roster.leave(node)
            self._left.setdefault(node, [])
            self._bring_home()
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
            self._log("fault", t=seen, **fault, died=True, rung=m.Rung.NODE.value)
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

    def _look_for_late_ranks(self, now: float) -> None:
        """A generation that does not form is a fault of those that are missing."""
        limit = self._config.restart.form_timeout_s
        if not self._begun or self.ended.done() or now - self._forming_since < limit:
            return
        self._forming_since = now
        generation = self._membership.generation
        for rank in self._membership.missing():
            cause = f"was not ready for generation {generation} within {limit:g} s"
            self._meet(m.Fault(rank, cause, self._membership.committed + 1, died=True), generation, now)

    # --- what agents say ------------------------------------------------------------------------

    def _take(self, node: int, agent: Agent, message: wire.Message) -> None:
        """One message of an agent, most of them passed on from its workers."""
        match message["type"]:
            case "beat":
                self._send(node, {"type": "beat", "heard": agent.events})
                return
            case "noted":
                self._roster.noted(node, int(message["number"]))
                return
            case "event":
                agent.events += 1
            case "leaving":
                self._left[node] = message["held"]
                self._bring_home()
        if (self.ended.done() and message["type"] != "event") or self._stood_down:
            return  # what becomes of its processes now is no news
        rank, generation = int(message.get("rank", -1)), int(message.get("generation", 0))
        self._act(node, rank, generation, message)

    def _act(self, node: int, rank: int, generation: int, message: wire.Message) -> None:
        membership = self._membership
        match message["type"]:
            case "join" if membership.nodes[rank] == node:
                live = message["live"]
                self._log("joined", rank=rank, pid=message["pid"], live_step=live and live["step"])
                offer = Offer("live", rank=rank, node=node, **live) if live else None
                held = [Offer.of_memory(brief, node) for brief in message["held"]]
                if "store_port" in message:
                    self._stores[rank] = self._roster.table("peer")[node][0], int(message["store_port"])
                self._carry_out(membership.join(rank, offer, held))
                self._joined_once = True
                self._check_exits()
            case "retired":
                held = [Offer.of_memory(brief, node) for brief in message["held"]]
                self._carry_out(membership.retired(node, held))
            case "durable":
                self._durable_answered(message)
            case "restored":
                attempt, error = int(message["attempt"]), str(message["error"])
                if error:
                    self._log("restore_failed", rank=rank, attempt=attempt, error=error)
                self._carry_out(membership.restore_reported(rank, generation, attempt, error))
            case "finished":
                self._log("done", rank=rank, digest=message["digest"])
                self._carry_out(membership.finished(rank, generation, message["digest"]))
            case "failed" | "died" if membership.nodes[rank] == node:
                self._fault(message, rank, generation)
            case "event":
                if message["event"] in ("step", "begun"):
                    membership.step_committed(int(message["step"]))
                    self._steps[rank] = int(message["step"])
                    self._keep_time()
                fields = {key: value for key, value in message.items() if key not in ("type", "event", "t")}
                self._log(message["event"], t=float(message["t"]), **fields)
            case "stalled":
                if self._inquest.stalled(message):
                    self._to_agents({"type": "look"})
            case "signs":
                if (hang := self._inquest.heard(message)) is not None:
                    self._end_hung(hang, generation)
            case "exited":
                self._exit_codes[rank] = int(message["code"])
                self._check_exits()
            case "cancel":
                self.cancel()
            case "broken" if message["lost"] and membership.spares and self._begun:
                self._give_way(node, str(message["cause"]))
            case "broken":
                code = str(message.get("code", "JobFailedError"))
                self._fail(m.Fail(code, f"node {node}: {message['cause']}"))

    def _durable_answered(self, message: wire.Message) -> None:
        stored = [Offer.of_all(brief) for brief in message["checkpoints"]]
        self._log("durable", steps=[offer.step for offer in stored], problems=message["problems"])
        unreachable = tuple(str(problem) for problem in message["unreachable"])
        if unreachable and self._durable.again():
            return
        self._asked = -1
        problems = tuple(str(problem) for problem in message["problems"])
        newest_generation = int(message["newest_generation"])
        self._carry_out(self._membership.durable_answered(stored, newest_generation, problems, unreachable))

    def _keep_time(self) -> None:
        """Name the step that tiers which go by time write next. Ahead of it, so that every node hears in time."""
        for tier in self._config.checkpoint.durable():
            now, last = time.monotonic(), self._drained_at.get(tier.kind, self._started)
            if tier.every_seconds is not None and now - last >= tier.every_seconds:
                self._drained_at[tier.kind] = now
                step = self._config.checkpoint.next_due(max(self._steps.values()) + 2)
                self._to_agents({"type": "drain_at", "kind": tier.kind, "step": step})

    def _fault(self, message: wire.Message, rank: int, generation: int) -> None:
        died = message["type"] == "died"
        if died and self._membership.phase is m.Phase.ENDED:
            self._exit_codes[rank] = int(message["exit_code"]) or 1  # after its training was done, but not by itself
            self._check_exits()
            return
        fault = m.Fault(
            rank,
            str(message["cause"]),
            # what a process was making when it died, nobody knows better than its own last report
            int(message["step"]),
            died,
            final=bool(message["final"]),
            code=str(message.get("code", "JobFailedError")),
            hint=str(message.get("hint", "")),
        )
        self._meet(fault, generation, float(message["t"]), str(message.get("phase", "")), message.get("kind", "exit"))

    def _end_hung(self, hang: Hang, generation: int) -> None:
        """Have those that hang ended, or, where nobody is to blame, all leave the generation."""
        membership = self._membership
        for rank in hang.ranks:
            self._send(membership.nodes[rank], {"type": "end_hung", "rank": rank, "cause": hang.cause})
        if not hang.ranks and generation == membership.generation:
            fault = m.Fault(min(membership.nodes), hang.cause, membership.committed + 1, died=False)
            self._meet(fault, generation, time.monotonic(), kind="stalled")

    def _meet(self, fault: m.Fault, generation: int, seen: float, phase: str = "", kind: FaultKind = "lost") -> None:
        membership = self._membership
        node, before = membership.nodes[fault.rank], len(membership.faults)
        commands = membership.fault(fault, generation)
        met = membership.faults[-1].rung if len(membership.faults) > before else None
        fields = {"rank": fault.rank, "node": node, "step": fault.step, "cause": fault.cause, "died": fault.died}
        self._log("fault", t=seen, **fields, phase=phase, kind=kind, rung=met.value if met else "")
        self._carry_out(commands)

    # --- what follows from it -------------------------------------------------------------------

    def _carry_out(self, commands: Sequence[m.Command]) -> None:
        for command in commands:
            self._do(command)
        if commands and not self.ended.done():
            self._tell_record()

    def _do(self, command: m.Command) -> None:
        match command:
            case m.Begin(generation, decision):
                self._log("generation", generation=generation, step=decision.step)
                stores, nodes = self._roster.table("address"), self._membership.nodes
                addresses = [self._stores.get(rank, stores[nodes[rank]]) for rank in range(self._config.world_size)]
                self._steps = {}
                more = {"peers": self._roster.table("peer"), "run": self._run}
                self._to_workers("begin", decision=decision.to_json(), addresses=addresses, **more)
            case m.AskDurable(besides):
                self._durable.ask(besides)
            case m.Restore(_, decision):
                self._to_workers("restore", decision=decision.to_json(), run=self._run)
            case m.Go(step):
                self._log("go", step=step)
                self._to_workers("go", step=step)
            case m.Abort(_, fault):
                self._forming_since = time.monotonic()
                self._to_workers("abort", rank=fault.rank)
            case m.Replace(rank):
                self._send(self._membership.nodes[rank], {"type": "replace", "rank": rank})
            case m.TakeOver(node, ranks):
                self._log("node_replaced", node=node, ranks=list(ranks))
                for timer in self._waits.values():
                    timer.cancel()
                self._waits = {}
                vacant = {self._membership.nodes[rank] for rank in self._membership.vacant}
                for other in vacant:
                    self._do(m.AwaitNode(other))
            case m.Retire(node):
                self._log("node_retired", node=node)
                self._send(node, {"type": "retire"})
            case m.AwaitNode(node):
                wait_s = self._config.restart.node_wait_s
                self._log("awaiting_node", node=node, seconds=wait_s)
                self._waits[node] = asyncio.get_running_loop().call_later(wait_s, self._no_node_came, node)
            case m.Finish():
                self._to_workers("finish")
            case m.Fail():
                self._fail(command)

    def _no_node_came(self, node: int) -> None:
        self._carry_out(self._membership.no_node_came(node, self._config.restart.node_wait_s))

    def _ask_durable(self, besides: Sequence[Sequence[str]]) -> None:
        if not self.ended.done() and self._roster.agents:
            self._asked = min(self._roster.agents)
            self._send(self._asked, {"type": "durable", "besides": besides})

    def _check_exits(self) -> None:
        """What it means that some processes have ended by themselves: all, or only some."""
        codes, finished = self._exit_codes, self._membership.phase is m.Phase.ENDED
        if len(codes) == self._config.world_size:
            bad = {rank: code for rank, code in codes.items() if code != 0}
            if not bad:
                self._end("succeeded")
                return
            rank, code = min(bad.items())
            self._fail(m.Fail("JobFailedError", f"rank {rank} ended with exit code {code} after its training was done"))
        elif codes and self._joined_once and not finished:
            rank = min(codes)
            message = f"rank {rank} ended without calling its @resilient function, while others wait in theirs"
            self._fail(m.Fail("JobFailedError", message, "Every rank of a job must call it."))

    def broke(self, why: str) -> None:
        """An error of our own."""
        self._fail(m.Fail("HyperpodExtError", f"the coordinator met an error of its own: {why}"))

    def _fail(self, failure: m.Fail) -> None:
        self._end("failed", {"code": failure.code, "message": failure.message, "hint": failure.hint})

    def _end(self, state: str, error: dict[str, str] | None = None) -> None:
        if self.ended.done():
            return
        self._log("job_ended", state=state)
        report = make_report(self._log_file.read(), state=state, error=error, world_size=self._config.world_size)
        write_report(self._run_dir, report)
        self.ended.set_result(state)
        self._to_agents({"type": "end", "state": state})

    def _bring_home(self) -> None:
        """Once every node has said what it holds: have the newest step of all ranks brought to the durable tiers."""
        agents = self._roster.agents
        if agents.keys() - self._left.keys() or not self.ended.done() or self.ended.result() == "succeeded":
            return
        if self._home is None:
            self._home = newest_of_all(self._left, self._config.world_size)
        for node, agent in agents.items():
            if not agent.writer.is_closing():
                self._send(node, {"type": "bring_home", "save_id": self._home})

    # --- messages to agents ---------------------------------------------------------------------

    def _tell_record(self) -> None:
        """To every agent: all that another coordinator needs."""
        self._roster.number += 1
        record = {
            "term": self._term,
            "number": self._roster.number,
            "coordinator": self._node,
            "members": self._roster.members,
            "master_port": self._master_port,
            "run": self._run,
            "membership": self._membership.to_json(),
        }
        self._to_agents({"type": "record", "record": record})

    def _to_workers(self, kind: str, **fields: Any) -> None:
        self._to_agents({"type": kind, "generation": self._membership.generation, **fields})

    def _to_agents(self, message: wire.Message) -> None:
        for node in list(self._roster.agents):
            self._send(node, message)

    def _send(self, node: int, message: wire.Message) -> None:
        """To one agent; one that is not there yet hears what it must when it comes."""
        if (agent := self._roster.agents.get(node)) is not None:
            agent.writer.write(wire.encode(message))
