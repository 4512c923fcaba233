"""This node's agent, in the process that serves the operator. The agent runs one `Node` after another, as ordered by
the operator."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import queue
import signal
import sys
import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.files import make_private_folder
from hyperpod_ext.processes import take_signals_from
from hyperpod_ext.runtime.agent import last_word
from hyperpod_ext.runtime.agent.children import Prepared
from hyperpod_ext.runtime.agent.coordinator_client import ExcludedError
from hyperpod_ext.runtime.agent.election import ElectionListener
from hyperpod_ext.runtime.agent.node import Node
from hyperpod_ext.runtime.agent.settings import NodeSettings, parse, read_settings
from hyperpod_ext.runtime.events.log import REPORT
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.log_rules import rules
from hyperpod_ext.runtime.log_rules.rules import LogRule
from hyperpod_ext.runtime.operator_api.place_in_job import JobSucceededError, find_place
from hyperpod_ext.runtime.operator_api.states import JOB_LEVEL, PROCESS_LEVEL, NodeStart

_CANCELLED = 130
_NEVER = 1 << 30
_MARGIN_S = 5.0
"""Time in seconds by which a node may exceed its time limit."""
_SIGNALS_S = 0.5
"""Time limit of each wait in `AgentHere.run`, in seconds. Python handles a signal that arrives just before a wait only
after the wait."""


class JobListener(Protocol):
    """Receives events of the job that the operator should see."""

    def fault_seen(self, cause: str, rank: int = -1) -> None: ...

    def goes_on_without(self, step: int, ranks: int, of: int) -> None: ...

    def fault_mended(self, step: int) -> None: ...

    def stepped(self, name: str, rank: int, local_rank: int, step: int) -> None: ...

    def job_ended(self, *, succeeded: bool, message: str, restart_mode: str) -> None: ...


class AgentHere:
    """Runs a `Node` with the rank that the operator assigns.

    Each `Node` runs in the main thread, because only that thread receives signals, and in an event loop of its own,
    which ends with the `Node`. The operator's requests come from another thread.

    Args:
        arguments: arguments of the pod: number of nodes and workers, port of the rendezvous, script.
        prepared: helper processes for the first `Node`, which import modules while the pod waits, as on a spare.
    """

    def __init__(
        self, arguments: argparse.Namespace, run_dir: Path, private: Path, prepared: Prepared | None = None
    ) -> None:
        self._arguments, self._run_dir, self._private = arguments, run_dir, private
        self._prepared = prepared
        self._orders: queue.SimpleQueue[tuple[int, NodeStart] | int] = queue.SimpleQueue()
        self._wanted = 0
        """Number of the newest order to start or end a `Node`, from HyperPod's training operator or a signal. If an
        older order has started the running `Node`, this `Node` ends."""
        self._idle = threading.Event()
        self._idle.set()
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any], Node] | None = None
        self._is_held = False
        """Whether training is on hold. An agent that starts during a hold must also hold."""
        self._settings_of_job: NodeSettings | None = None
        self._serving_end: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        """Event loop and task that report the end of the job to pods that start late."""
        self._asked_to_end = False
        self._rank = -1
        """Number of this node in the job; -1 before it is known."""
        self._looks_for = ""
        """Event that the agent waits for before its start, as a phrase; empty if it does not wait."""
        self._name = ""
        self._ranks, self._ranks_now = 0, 0
        """Number of all ranks (0 unless the job continues without lost ranks), and number of ranks that train now."""
        self._has_time = False
        """Whether the node must finish work before the pod ends, such as leaving its job or an upload."""

    # --- in the thread that serves the operator -----------------------------------------------------

    @property
    def runs(self) -> bool:
        return not self._idle.is_set()

    @property
    def waits_for(self) -> str:
        return running[2].operator.waits_for if (running := self._running) is not None else self._looks_for

    def begin(self, at: NodeStart) -> None:
        """Start a `Node` as soon as the running `Node` has ended."""
        self._drop()
        self._is_held = False
        self._idle.clear()
        self._orders.put((self._wanted, at))

    def resume(self, nodes: int, gone: Collection[str] = ()) -> None:
        self._is_held = False
        self._to_node(lambda node: node.operator.resume(nodes, gone))

    def pause(self) -> None:
        self._is_held = True
        self._to_node(lambda node: node.operator.hold())

    async def rest(self, limit_s: float) -> None:
        """Hold training. Returns when the ranks of this node have left their step and due uploads are done."""
        self._is_held = True
        self._to_node(lambda node: node.operator.hold(limit_s))
        if (running := self._running) is not None:
            loop, _, node = running
            # suppress errors: if the node has ended meanwhile, its event loop drops this call
            with contextlib.suppress(RuntimeError, asyncio.CancelledError, HyperpodExtError, TimeoutError):
                async with asyncio.timeout(limit_s + _MARGIN_S):
                    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(node.operator.held(limit_s), loop))

    async def end(self) -> None:
        """End the running `Node`, and wait until all its processes have ended."""
        self._drop()
        await asyncio.to_thread(self._idle.wait)

    def leave(self, code: int = 0) -> None:
        """End the running `Node`, and make `run` return `code`."""
        self._drop()
        self._orders.put(code)

    def note(self, **fields: Any) -> None:
        """Write an event to the job's log, if this node has one open."""
        self._to_node(lambda node: node.operator.log_call(**fields))

    def _drop(self) -> None:
        self._wanted += 1
        for ends in (self._running, self._serving_end):
            if ends is not None:
                loop, task, *_ = ends
                with contextlib.suppress(RuntimeError):  # the event loop may have ended meanwhile
                    loop.call_soon_threadsafe(task.cancel)

    def _to_node(self, call: Callable[[Node], None]) -> None:
        if (running := self._running) is not None:
            loop, _, node = running
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(call, node)

    # --- in the main thread -------------------------------------------------------------------------

    def run(self, listener: JobListener) -> int:
        """Carry out the operator's orders until the order to leave. Returns the exit code of this process."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._hear_signal)
        while True:
            try:
                order = self._orders.get(timeout=_SIGNALS_S)
            except queue.Empty:
                continue
            if isinstance(order, int):
                self._idle.set()  # the node has ended: wake the threads that wait in `end`
                return order
            number, at = order
            if number == self._wanted:
                asyncio.run(self._run(listener, number, at))
            if self._orders.empty():
                self._idle.set()

    def _hear_signal(self, _signum: int, _frame: FrameType | None) -> None:
        self._is_asked_to_end()

    def _is_asked_to_end(self) -> None:
        """Handle SIGTERM: the pod will be deleted. If the pod still has work, do the work first.

        An elastic job continues without the pod, and snapshots that only this pod's memory holds are uploaded to a
        durable tier, if there is one."""
        self._asked_to_end = True
        if self._running is not None and self._has_time:
            self._running[2].ask_to_end()
        else:
            self.leave(_CANCELLED)

    async def _run(self, listener: JobListener, number: int, at: NodeStart) -> None:
        message, mode, state = "", JOB_LEVEL, "failed"
        self._settings_of_job = None
        last_word.keep("")
        try:
            state, why, hint = await self._job(listener, number, at)
            message = last_word.of_failed_job(why, hint)
        except asyncio.CancelledError:
            state = "cancelled"
        except ExcludedError as error:
            # the job may continue without this node, and a new process of the node may join the job again
            message, mode = str(error), PROCESS_LEVEL
            last_word.keep(error.message, error.hint, self._rank)
        except HyperpodExtError as error:
            last_word.keep(error.message, error.hint, self._rank)
            message = "\n".join(filter(None, (str(error), error.hint)))
        except Exception as error:
            message = f"an internal error of hyperpod_ext: {error!r}"
        finally:
            self._running = None
            take_signals_from(asyncio.get_running_loop(), self._hear_signal)
        if self._asked_to_end:  # end this process, because the pod will be deleted, even if the job goes on
            self.leave(_CANCELLED)
        if state in ("cancelled", "left"):
            message, mode = "a pod of the job was ordered to end", PROCESS_LEVEL
        if number == self._wanted:
            listener.job_ended(succeeded=state == "succeeded", message=message, restart_mode=mode)
            if state == "succeeded" and self._settings_of_job is not None:
                await self._serve_end(self._settings_of_job, number)

    async def _serve_end(self, settings: NodeSettings, number: int) -> None:
        """Report the end of the job to pods that start late, until the next order.

        A pod may start late because another pod was lost after all ranks were done. Without this report, the late pod
        would wait for the job, and then start the job again."""
        address = settings.listen or ((settings.host, settings.port) if settings.node == 0 else None)
        if address is None:
            return
        election = ElectionListener(settings.secret, _say, encrypted=settings.config.encrypted, succeeded=True)
        self._serving_end = asyncio.get_running_loop(), asyncio.ensure_future(asyncio.Event().wait())
        self._idle.set()
        with contextlib.suppress(OSError, asyncio.CancelledError):  # ignore errors: another process may use the port
            await election.open(*address)
            if number == self._wanted:
                await self._serving_end[1]
        self._serving_end = None
        await election.close()

    async def _job(self, listener: JobListener, number: int, at: NodeStart) -> tuple[str, str, str]:
        """Run a `Node`. Returns the job's final state, and if the job has failed, the cause and a hint."""
        try:
            settings = await self._settings(number, at)
        except JobSucceededError:
            return "succeeded", "", ""
        self._settings_of_job = settings
        make_private_folder(self._run_dir / "logs")
        if settings.node == 0:
            (self._run_dir / REPORT).unlink(missing_ok=True)  # delete the report of an earlier run
        self._rank, self._name = settings.node, settings.config.name
        self._ranks = settings.config.world_size if settings.config.restart.policy == "continue" else 0
        self._has_time = bool(settings.config.checkpoint.durable() or settings.config.elastic or self._ranks)
        prepared, self._prepared = self._prepared, None
        node = Node(settings, lambda message: self._hear(listener, message), self._rules_of(at), prepared)
        task = asyncio.ensure_future(node.run())
        self._running = (asyncio.get_running_loop(), task, node)
        if number != self._wanted:
            task.cancel()
        if self._is_held:
            node.operator.hold()
        await asyncio.sleep(0)
        for signum in (signal.SIGTERM, signal.SIGINT):  # replace the signal handlers that the `Node` has set
            asyncio.get_running_loop().add_signal_handler(signum, self._is_asked_to_end)
        return await task, *node.why_failed

    async def _settings(self, number: int, at: NodeStart) -> NodeSettings:
        """Return the settings for a `Node`, which either joins the running job or starts a new job."""
        host = f"[{at.first_node}]" if ":" in at.first_node else at.first_node
        flags = {
            "--nnodes": at.nodes,
            "--nproc-per-node": self._arguments.nproc_per_node,
            "--node-rank": at.rank,
            "--rdzv-endpoint": f"{host}:{self._arguments.rdzv_port}",
        }
        argv = [str(word) for flag in flags.items() for word in flag]
        arguments = parse([*argv, "--keep-events", self._arguments.script, *self._arguments.script_args])
        port = int(self._arguments.rdzv_port)
        own = read_settings(arguments, self._run_dir, self._private)
        # do not exclude node numbers for their faults, because the operator itself moves pods to other machines
        restart = own.config.restart.model_copy(update={"quarantine_after": _NEVER})
        config = own.config.model_copy(update={"restart": restart})
        settings = replace(own, config=config, listen=(at.address, port) if at.address else None)
        others, limit_s = tuple((address, port) for address in at.others), restart.node_wait_s
        self._looks_for = "the agent is looking for a running job"
        try:
            place = await find_place(settings, others, limit_s, lambda: number == self._wanted, faults=at.faults)
        finally:
            self._looks_for = ""
        if place is None:
            return settings
        node, coordinator = place
        return replace(settings, node=node, rejoin=True, join_timeout_s=limit_s, others=(coordinator, *others))

    def _rules_of(self, at: NodeStart) -> list[LogRule]:
        try:
            return rules.read(at.log_rules)
        except ValueError as error:
            _say(f"the operator's log rules are ignored: {error}")
            return []

    def _hear(self, listener: JobListener, message: c.ToAgent | c.FromAgent) -> None:
        """Inform the listener of a message between this agent and the coordinator."""
        match message:
            case c.Died(rank=rank, step=step, cause=cause) | c.Failed(rank=rank, step=step, cause=cause):
                listener.fault_seen(f"rank {rank}, step {step}: {cause}", rank)
            case c.AbortGeneration(rank=rank) if rank >= 0 and rank // self._arguments.nproc_per_node != self._rank:
                listener.fault_seen(f"a fault of rank {rank}, on node {rank // self._arguments.nproc_per_node}")
            case c.JobNews(world_size=world_size):
                self._ranks_now = world_size
            case c.GoOn(step=step) if self._ranks_now < self._ranks:
                listener.goes_on_without(step, self._ranks_now, self._ranks)
            case c.GoOn(step=step):
                listener.fault_mended(step)
            case c.Event(event="step", rank=rank, fields=fields) if isinstance(fields.get("step"), int):
                listener.stepped(self._name, rank, rank % self._arguments.nproc_per_node, fields["step"])


def _say(words: str) -> None:
    sys.stderr.write(f"hyperpod_ext: {words}\n")
