"""The job's membership over TCP, on the first node's agent. Decides nothing itself: `Membership` does.

Keeps the event log, and writes the report when the job ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hyperpod_ext.config.runtime import RuntimeConfig
from hyperpod_ext.errors import ConflictError
from hyperpod_ext.runtime import wire
from hyperpod_ext.runtime.checkpoint.choose import Offer
from hyperpod_ext.runtime.goodput import make_report
from hyperpod_ext.runtime.listener import Listener
from hyperpod_ext.runtime.rendezvous import membership as m

_ASK_AGAIN_S = 1.0
"""How soon a durable tier that cannot be reached is asked again; twice as long after each time."""
_UNREACHABLE_S = 60.0
"""How long it is asked again; the job fails then, as it must not go on from an older step."""


class Coordinator:
    """One job's coordinator.

    Args:
        config: the job's runtime settings.
        run_dir: where events.jsonl and report.json go.
        secret: agents prove with it that they belong to the job.
        master_port: free port for scripts that open process groups on their own.
    """

    def __init__(self, config: RuntimeConfig, run_dir: Path, secret: bytes, master_port: int) -> None:
        self._config, self._secret, self._master_port = config, secret, master_port
        self._run_dir = run_dir
        nodes = {rank: rank // config.workers_per_node for rank in range(config.world_size)}
        self._membership = m.Membership(nodes, config.restart.max_restarts, durable=bool(config.checkpoint.durable()))
        self._run = secrets.token_hex(8)
        self._peers: dict[int, tuple[str, int]] = {}
        self._domains: dict[int, str] = {}
        self._steps: dict[int, int] = {}
        self._left: dict[int, list[dict[str, Any]]] = {}
        self._home: str | None = None
        self._asked_at, self._wait_s = 0.0, _ASK_AGAIN_S
        self._started, self._drained_at = time.monotonic(), dict[str, float]()
        self._agents: dict[int, asyncio.StreamWriter] = {}
        self._addresses: dict[int, tuple[str, int]] = {}
        self._exit_codes: dict[int, int] = {}
        self._joined_once = False
        self._listener = Listener(self._serve, self._broke)
        self._log_path = run_dir / "events.jsonl"
        self._log_file = self._log_path.open("w", encoding="utf-8", buffering=1)
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Final state: succeeded, failed or cancelled."""
        self._log("job_started", world_size=config.world_size, nodes=config.nodes)

    async def start(self, host: str, port: int) -> None:
        """Listen for agents.

        Raises:
            ConflictError: the port is taken.
        """
        try:
            await self._listener.listen_tcp(host, port)
        except OSError as error:
            raise ConflictError(
                f"cannot listen on {host}:{port}: {error.strerror}",
                hint="Set rendezvous.port to a free port, or to 0 where the target can choose one.",
            ) from error

    async def close(self) -> None:
        """Let the agents have their last message, then stop listening."""
        await self._listener.close()
        for writer in self._agents.values():
            with contextlib.suppress(ConnectionError):  # that agent left first
                await writer.wait_closed()
        self._log_file.close()

    def cancel(self) -> None:
        """End the job because somebody asked for it."""
        self._end("cancelled")

    # --- one connection an agent ----------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node: int | None = None
        try:
            await wire.accept_peer(reader, writer, self._secret)
            while (message := await wire.read(reader)) is not None:
                if message["type"] == "hello":
                    self._welcome(int(message["node"]), message, writer)
                    node = int(message["node"])
                else:
                    self._take(message)
        finally:
            if node is not None:
                self._left.setdefault(node, [])
                if not self.ended.done():
                    self._fail(m.Fail("JobFailedError", f"the agent of node {node} is gone"))
                self._bring_home()

    def _welcome(self, node: int, hello: wire.Message, writer: asyncio.StreamWriter) -> None:
        if node in self._agents or not 0 <= node < self._config.nodes:
            raise wire.WireError(f"node {node} is there already, or is none of this job's {self._config.nodes}")
        self._agents[node] = writer
        if self.ended.done():  # somebody cancelled before the first node was there
            self._send(node, {"type": "end", "state": self.ended.result()})
            return
        self._addresses[node] = (str(hello["address"][0]), int(hello["address"][1]))
        self._peers[node] = (str(hello["peer"][0]), int(hello["peer"][1]))
        self._domains[node] = str(hello["domain"])
        self._log("node_joined", node=node, pid=hello["pid"])
        if len(self._agents) == self._config.nodes:
            peers = {"peers": self._peers, "domains": self._domains}
            self._to_agents({"type": "welcome", "master_port": self._master_port, **peers})

    def _take(self, message: wire.Message) -> None:
        """One message of an agent, most of them passed on from its workers."""
        rank, generation = int(message.get("rank", -1)), int(message.get("generation", 0))
        membership = self._membership
        if message["type"] == "leaving":
            self._left[int(message["node"])] = message["held"]
            self._bring_home()
        if self.ended.done() and message["type"] != "event":
            return  # what becomes of its processes now is no news
        match message["type"]:
            case "join":
                node, live = membership.nodes[rank], message["live"]
                self._log("joined", rank=rank, pid=message["pid"], live_step=live and live["step"])
                offer = Offer("live", rank=rank, node=node, **live) if live else None
                held = [Offer.of_memory(brief, node) for brief in message["held"]]
                self._carry_out(membership.join(rank, offer, held))
                self._joined_once = True
                self._check_exits()
            case "durable":
                stored = [Offer.of_all(brief) for brief in message["checkpoints"]]
                self._log("durable", steps=[offer.step for offer in stored], problems=message["problems"])
                unreachable = tuple(str(problem) for problem in message["unreachable"])
                if unreachable and self._ask_again(message["besides"]):
                    return
                problems = tuple(str(problem) for problem in message["problems"])
                newest = int(message["newest_generation"])
                self._carry_out(membership.durable_answered(stored, newest, problems, unreachable))
            case "restored":
                attempt, error = int(message["attempt"]), str(message["error"])
                if error:
                    self._log("restore_failed", rank=rank, attempt=attempt, error=error)
                self._carry_out(membership.restore_reported(rank, generation, attempt, error))
            case "finished":
                self._log("done", rank=rank, digest=message["digest"])
                self._carry_out(membership.finished(rank, generation, message["digest"]))
            case "failed" | "died":
                self._fault(message, rank, generation)
            case "event":
                if message["event"] in ("step", "begun"):
                    membership.step_committed(int(message["step"]))
                    self._steps[rank] = int(message["step"])
                    self._keep_time()
                fields = {key: value for key, value in message.items() if key not in ("type", "event", "t")}
                self._log(message["event"], t=float(message["t"]), **fields)
            case "exited":
                self._exit_codes[rank] = int(message["code"])
                self._check_exits()
            case "cancel":
                self.cancel()
            case "broken":
                code = str(message.get("code", "JobFailedError"))
                self._fail(m.Fail(code, f"node {message['node']}: {message['cause']}"))

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
        # what a process was making when it died, nobody knows better than its own last report
        step = int(message["step"])
        fault = m.Fault(
            rank,
            str(message["cause"]),
            step,
            died,
            final=bool(message["final"]),
            code=str(message.get("code", "JobFailedError")),
            hint=str(message.get("hint", "")),
        )
        node = self._membership.nodes[rank]
        if died and self._membership.phase is m.Phase.ENDED:
            self._exit_codes[rank] = int(message["exit_code"]) or 1  # after its training was done, but not by itself
            self._check_exits()
            return
        self._log("fault", t=float(message["t"]), rank=rank, node=node, step=step, cause=fault.cause, died=died)
        self._carry_out(self._membership.fault(fault, generation))

    # --- what follows from it -------------------------------------------------------------------

    def _carry_out(self, commands: list[m.Command]) -> None:
        for command in commands:
            match command:
                case m.Begin(generation, decision):
                    self._log("generation", generation=generation, step=decision.step)
                    addresses = [
                        self._addresses[self._membership.nodes[rank]] for rank in range(self._config.world_size)
                    ]
                    self._steps = {}
                    more = {"peers": self._peers, "run": self._run}
                    self._to_workers("begin", decision=decision.to_json(), addresses=addresses, **more)
                case m.AskDurable(besides):
                    self._asked_at, self._wait_s = time.monotonic(), _ASK_AGAIN_S
                    self._ask_durable(besides)
                case m.Restore(_, decision):
                    self._to_workers("restore", decision=decision.to_json(), run=self._run)
                case m.Go(step):
                    self._log("go", step=step)
                    self._to_workers("go", step=step)
                case m.Abort(_, fault):
                    self._to_workers("abort", rank=fault.rank)
                case m.Replace(rank):
                    self._send(self._membership.nodes[rank], {"type": "replace", "rank": rank})
                case m.Finish():
                    self._to_workers("finish")
                case m.Fail():
                    self._fail(command)

    def _ask_durable(self, besides: Sequence[Sequence[str]]) -> None:
        if not self.ended.done():
            self._send(0, {"type": "durable", "besides": besides})

    def _ask_again(self, besides: Sequence[Sequence[str]]) -> bool:
        """Ask the durable tiers once more, in a while; False when they have had their time."""
        if time.monotonic() + self._wait_s > self._asked_at + _UNREACHABLE_S:
            return False
        asyncio.get_running_loop().call_later(self._wait_s, self._ask_durable, besides)
        self._wait_s *= 2
        return True

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

    def _broke(self, why: str) -> None:
        self._fail(m.Fail("HyperpodExtError", f"the coordinator met an error of its own: {why}"))

    def _fail(self, failure: m.Fail) -> None:
        self._end("failed", {"code": failure.code, "message": failure.message, "hint": failure.hint})

    def _end(self, state: str, error: dict[str, str] | None = None) -> None:
        if self.ended.done():
            return
        self._log("job_ended", state=state)
        # read once, now: a process should not keep a month's events while the job runs
        with self._log_path.open(encoding="utf-8") as lines:
            events = [json.loads(line) for line in lines]
        report = make_report(events, state=state, error=error, world_size=self._config.world_size)
        write_report(self._run_dir, report)
        self.ended.set_result(state)
        self._to_agents({"type": "end", "state": state})

    def _bring_home(self) -> None:
        """Once every node has said what it holds: have the newest step of all ranks brought to the durable tiers."""
        if self._agents.keys() - self._left.keys() or not self.ended.done() or self.ended.result() == "succeeded":
            return
        if self._home is None:
            self._home = newest_of_all(self._left, self._config.world_size)
        for node, writer in self._agents.items():
            if not writer.is_closing():
                self._send(node, {"type": "bring_home", "save_id": self._home})

    def _to_workers(self, kind: str, **fields: Any) -> None:
        self._to_agents({"type": kind, "generation": self._membership.generation, **fields})

    def _to_agents(self, message: wire.Message) -> None:
        for node in self._agents:
            self._send(node, message)

    def _send(self, node: int, message: wire.Message) -> None:
        self._agents[node].write(wire.encode(message))

    def _log(self, event: str, *, t: float | None = None, **fields: Any) -> None:
        entry = {"t": time.monotonic() if t is None else t, "event": event, **fields}
        self._log_file.write(json.dumps(entry) + "\n")


def newest_of_all(held: Mapping[int, Collection[Mapping[str, Any]]], world_size: int) -> str:
    """Save id of the newest snapshot that every rank has on its own node; empty: there is none."""
    ranks: dict[tuple[int, int, str], set[int]] = {}
    for brief in (brief for briefs in held.values() for brief in briefs):
        if not brief["replica"] and brief["world_size"] == world_size:
            ranks.setdefault((brief["step"], brief["generation"], brief["save_id"]), set()).add(brief["rank"])
    return max((commit for commit, having in ranks.items() if len(having) == world_size), default=(0, 0, ""))[2]


def write_report(run_dir: Path, report: dict[str, Any]) -> None:
    """Write report.json so that readers see all of it or none of it."""
    partial = run_dir / "report.json.partial"
    partial.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    partial.rename(run_dir / "report.json")
