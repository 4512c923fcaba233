"""What a coordinator does: commands of the membership become messages to agents, events, and in the end the report."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.runtime.coordinator.durable_query import DurableQuestion
from hyperpod_ext.runtime.coordinator.final_save import newest_of_all
from hyperpod_ext.runtime.coordinator.hang_query import Inquest
from hyperpod_ext.runtime.coordinator.interval_tuner import Tuner
from hyperpod_ext.runtime.coordinator.last_stop import LastStop
from hyperpod_ext.runtime.coordinator.liveness_query import RollCall
from hyperpod_ext.runtime.coordinator.members import Roster
from hyperpod_ext.runtime.coordinator.resize_orders import tell_wanted
from hyperpod_ext.runtime.events.log import EventLog, write_report
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.clocks import Clocks
from hyperpod_ext.runtime.membership import membership as m
from hyperpod_ext.runtime.membership.elastic import ElasticMembership
from hyperpod_ext.runtime.metrics.exporter import Shown

_SCALING_TIMEOUT_S = 60.0
"""How long more nodes are waited for, unless the job says."""
_STOP_SHARE = 0.5
"""Of the grace of a job that is to end: how long ranks may take to come to the end of a step and save it."""
_ASK_LATER_S = 0.05
"""How soon ranks that have not begun their loop are asked again where they can stop."""


class Commander:
    """State of one job's coordinator, and what follows from the membership's commands.

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
        membership: ElasticMembership,
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
        self._coming_home = False
        """All ranks are done, and the last step is on its way to the durable tiers."""
        self._arrived: set[int] = set()
        """Nodes whose part of it has come as far as it will."""
        self.all_home = asyncio.Event()
        self._durable = DurableQuestion(self._ask_durable)
        self._inquest = Inquest(config.world_size)
        self._roll: RollCall | None = None
        self._clocks = Clocks()
        self._asked = -1
        self._started, self._drained_at = time.monotonic(), dict[str, float]()
        self._peer_step: int | None = None
        """The last step that was named for copies on peers. Nodes that come later must go by it, too."""
        self._same = False
        """Every rank holds the same state: none is copied to peers."""
        self._tuner = Tuner(config.checkpoint, config.nodes, self._started)
        self._policy = config.checkpoint
        """As all ranks have it in this generation."""
        self._exit_codes: dict[int, int] = {}
        self._joined_once = False
        self._waits: dict[int, asyncio.TimerHandle] = {}
        self._forming_since = time.monotonic()
        self._stood_down = False
        self._dismissing: set[int] = set()
        self._world: dict[str, Any] | None = None
        """What is known of the world that is being entered."""
        self._last_step_at = 0.0
        self._pids: dict[int, int] = {}
        self._pids_before: dict[int, int] = {}
        self._pids_after: dict[int, int] = {}
        self._growing: asyncio.TimerHandle | None = None
        self._settling: asyncio.TimerHandle | None = None
        self._log_file = EventLog(run_dir, fresh=term == 1)
        self._log = self._log_file.write
        self._shown: Shown | None = None
        if config.metrics is not None:
            self._shown = Shown(config.metrics, config.name, self._log_file.read(), self._log)
            self._log_file.heard = self._shown.tell
        self._stopping: LastStop | None = None
        """The job is to end once all ranks have saved a step."""
        self._error: dict[str, str] | None = None
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Final state: succeeded, failed or cancelled."""

    def _tune_memory(self) -> int | None:
        """Steps between two snapshots in memory, in the generation that begins; None: as the spec says."""
        every, before = self._tuner.begins(time.monotonic()), self._policy.memory()
        if every is not None and before is not None:
            if every != before.every_steps:
                self._log("tuned", tier="memory", every_steps=every)
            self._policy = self._policy.with_memory_every(every)
            self._membership.next_due = self._policy.next_due
        return every

    def _carry_out(self, commands: Sequence[m.Command]) -> None:
        for command in commands:
            if not self._do_elastic(command):
                self._do(command)
        if commands and not self.ended.done():
            self._tell_record()

    def _do(self, command: m.Command) -> None:
        match command:
            case m.Begin(generation, decision):
                self._log(
                    "generation", generation=generation, step=decision.step, world_size=len(self._membership.nodes)
                )
                nodes = self._membership.nodes
                addresses = [self._stores[rank] for rank in sorted(nodes)]
                self._steps, self._inquest = {}, Inquest(len(nodes))
                more = {"peers": self._roster.table("peer"), "run": self._run, "memory_every": self._tune_memory()}
                more["peer_step"] = self._peer_step
                self._to_workers("begin", decision=decision.to_json(), addresses=addresses, **more)
            case m.AskDurable(besides):
                self._durable.ask(besides)
            case m.Restore(_, decision):
                self._to_workers("restore", decision=decision.to_json(), run=self._run)
            case m.Go(step):
                self._log("go", step=step)
                self._tuner.went_on(self._membership)
                self._to_workers("go", step=step)
                if self._membership.settling:
                    self._settle_in_time()
            case m.Abort() if self._stopping is not None:
                self._end("cancelled")  # what has been saved has to do
            case m.Abort(_, fault):
                self._forming_since = time.monotonic()
                membership = self._membership
                numbers: dict[str, Any] = {}
                if membership.moved_in:  # whoever has missed it goes by the old numbers still
                    numbers = {"moved": membership.moves[membership.moved_in], "moved_in": membership.moved_in}
                if membership.moved_in == membership.generation:
                    self._stores = {}
                    self._tell_record()  # first: whoever has new numbers must be able to tell another coordinator
                self._to_workers("abort", rank=fault.rank, **numbers)
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

    def _do_elastic(self, command: m.Command) -> bool:
        """Whether it was one of those of another world."""
        match command:
            case m.Log(event, fields):
                self._log(event, **fields)
                if event == "world":
                    self._enter_world(fields)
            case m.Prepare(rank, node, world_size):
                self._send(node, {"type": "prepare", "rank": rank, "world_size": world_size})
            case m.Unprepare(node):
                self._send(node, {"type": "unprepare"})
            case m.AskStop(number, step, later):
                ask = functools.partial(self._to_workers, "ask_stop", number=number, step=step)
                asyncio.get_running_loop().call_later(_ASK_LATER_S if later else 0.0, ask)
            case m.StopAt(number):
                self._to_workers("stop_at", number=number)
            case m.GoOn(number):
                self._to_workers("go_on", number=number)
            case m.WantNodes(count):
                self._want_nodes(count)
            case m.Dismiss(nodes):
                self._dismiss(nodes)
            case m.Cancel():
                self.cancel()
            case _:
                return False
        return True

    def _enter_world(self, fields: Mapping[str, Any]) -> None:
        """From here on it is timed how long no step is made, and seen who keeps its process."""
        moved = self._membership.moves[self._membership.moved_in]
        if self._world is not None and self._world["order"]:  # it never came to a step
            why = f"nodes were lost meanwhile; the job goes on with {fields['nodes']}"
            self._log("resize_refused", order=self._world["order"], nodes=self._world["nodes"], why=why)
        self._world = {key: value for key, value in fields.items() if key != "moved"}
        self._pids_before = {now: self._pids[rank] for rank, now in moved.items() if rank in self._pids}
        self._pids, self._pids_after = {}, {}

    def _want_nodes(self, count: int) -> None:
        """Tell whoever starts nodes which ones the job would have; after a while, go on with those that are there."""
        membership, members = self._membership, self._roster.members
        here = {node for node in members if node not in membership.leavers | membership.settling}
        # a node that has yet to leave is asked for once it has
        free = set(range(self._config.most_nodes + self._config.spares)) - members.keys() - self._roster.agents.keys()
        wanted = sorted(here | set(sorted(free)[: max(0, count - len(here))]))
        tell_wanted(self._run_dir, wanted)
        self._log("nodes_wanted", nodes=wanted)
        if self._growing is not None:
            self._growing.cancel()
        elastic = self._config.elastic
        wait_s = (elastic.scaling_timeout_s if elastic else None) or _SCALING_TIMEOUT_S
        loop = asyncio.get_running_loop()
        self._growing = loop.call_later(wait_s, lambda: self._carry_out(membership.gave_up_waiting()))

    def _settle_in_time(self) -> None:
        """Nodes that leave are let go after their grace, though not every rank has saved anew."""
        elastic, membership = self._config.elastic, self._membership
        grace_s = (elastic.graceful_shutdown_s if elastic else None) or self._config.checkpoint.grace_s
        if self._settling is not None:
            self._settling.cancel()
        late = functools.partial(membership.settle, membership.committed, late=True)
        self._settling = asyncio.get_running_loop().call_later(grace_s, lambda: self._carry_out(late()))

    def _dismiss(self, nodes: Sequence[int]) -> None:
        """Let nodes go: first all others learn that they are no members any more, and do not count for a majority."""
        self._dismissing |= set(nodes) & self._roster.agents.keys()
        for node in nodes:
            self._log("node_left", node=node)
            self._roster.forget(node)
        if self._config.elastic is not None:
            tell_wanted(self._run_dir, sorted(self._roster.members))
        self._to_agents({"type": "settled", "world_size": len(self._membership.nodes)})
        self._tell_record()

    def _no_node_came(self, node: int) -> None:
        self._carry_out(self._membership.no_node_came(node, self._config.restart.node_wait_s))

    def _ask_durable(self, besides: Sequence[Sequence[str]]) -> None:
        if not self.ended.done() and self._roster.agents:
            self._asked = min(self._roster.agents)
            self._send(self._asked, {"type": "durable", "besides": besides})

    # --- the end --------------------------------------------------------------------------------

    def _check_exits(self) -> None:
        """What it means that some processes have ended by themselves: all, or only some."""
        codes, finished = self._exit_codes, self._membership.phase is m.Phase.ENDED
        if len(codes) == len(self._membership.nodes):
            bad = {rank: code for rank, code in codes.items() if code != 0}
            if not bad:
                self._come_home()
                return
            rank, code = min(bad.items())
            self._fail(m.Fail("JobFailedError", f"rank {rank} ended with exit code {code} after its training was done"))
        elif codes and self._joined_once and not finished:
            rank = min(codes)
            message = f"rank {rank} ended without calling its @resilient function, while others wait in theirs"
            self._fail(m.Fail("JobFailedError", message, "Every rank of a job must call it."))

    def cancel(self) -> None:
        """End the job because somebody asked for it; where not each step is saved, after one that all ranks save."""
        if self._stopping is not None:
            return  # each node's agent may have been told to end, and says so; time is running
        running = self._membership.phase is m.Phase.RUNNING and self._membership.change is None
        due_each = self._policy.due(1) or not self._policy.durable()
        if self.ended.done() or due_each or not running:
            self._end("cancelled")
            return
        self._stopping = LastStop(len(self._membership.nodes), time.monotonic())
        self._ask_to_stop()
        asyncio.get_running_loop().call_later(self._policy.grace_s * _STOP_SHARE, self._end, "cancelled")

    def _ask_to_stop(self, *, later: bool = False) -> None:
        assert self._stopping is not None
        newest = max(self._steps.values(), default=self._membership.committed)
        ask = functools.partial(self._to_workers, "ask_stop", ends=True, **self._stopping.ask(newest))
        asyncio.get_running_loop().call_later(_ASK_LATER_S if later else 0.0, ask)

    def _stop_answered(self, rank: int, message: wire.Message) -> None:
        """Of a rank of a job that is to end: whether it can stop where it was asked to; or it has."""
        assert self._stopping is not None
        match self._stopping.hear(rank, message):
            case "all can":
                self._to_workers("stop_at", number=self._stopping.number)
            case "ask again" | "ask later" as again:
                self._ask_to_stop(later=again == "ask later")
            case "all stand":
                self._end("cancelled")

    def broke(self, why: str) -> None:
        """An error of our own."""
        self._fail(m.Fail("HyperpodExtError", f"the coordinator met an error of its own: {why}"))

    def _fail(self, failure: m.Fail) -> None:
        self._end("failed", {"code": failure.code, "message": failure.message, "hint": failure.hint})

    def _come_home(self) -> None:
        """All are done. The last step goes to the durable tiers before that is said."""
        if not self._config.checkpoint.durable():
            self._end("succeeded")
        elif not self._coming_home:
            self._coming_home = True
            self._to_agents({"type": "come_home"})

    def _come_home_too(self, node: int) -> None:
        """To an agent that came, or came back, when the others were told."""
        if self._coming_home and not self.ended.done():
            self._send(node, {"type": "come_home"})

    def _see_home(self) -> None:
        """Once no node can do more for the last step."""
        if self._roster.agents.keys() <= self._arrived:
            self.all_home.set()
            if self._coming_home:
                self._end("succeeded")

    def _end(self, state: str, error: dict[str, str] | None = None) -> None:
        if self.ended.done():
            return
        self._log("job_ended", state=state)
        self._error = error
        self._report(state)
        self.ended.set_result(state)
        self._to_agents(self._end_order())

    def _end_order(self) -> wire.Message:
        spent_s = time.monotonic() - self._stopping.since if self._stopping is not None else 0.0
        return {"type": "end", "state": self.ended.result(), "grace_s": self._policy.grace_s - spent_s}

    def _report(self, state: str) -> None:
        """Write the job's report: what is known when it has ended, or what agents have told since."""
        world_size = len(self._membership.nodes)
        write_report(self._run_dir, self._log_file.report(state=state, error=self._error, world_size=world_size))

    def _bring_home(self) -> None:
        """Once every node has said what it holds: have the newest step of all ranks brought to the durable tiers."""
        agents = self._roster.agents
        ends = self.ended.result() != "succeeded" if self.ended.done() else self._coming_home
        if agents.keys() - self._left.keys() or not ends:
            return
        if self._home is None:
            self._home = newest_of_all(self._left, len(self._membership.nodes))
            held = [
                brief["step"] for briefs in self._left.values() for brief in briefs if brief["save_id"] == self._home
            ]
            step, made = max(held, default=None), max(self._steps.values(), default=self._membership.committed)
            self._log("homecoming", save_id=self._home, step=step, made=made, nodes=sorted(agents))
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
