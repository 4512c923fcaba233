"""This node's agent in the process that serves its operator: a `Node` after another, as `/start` and `/stop` have it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.runtime.agent.arguments import parse, read_settings
from hyperpod_ext.runtime.agent.coordinator_client import ExcludedError
from hyperpod_ext.runtime.agent.node import Node
from hyperpod_ext.runtime.events.log import REPORT
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.operator_api.states import JOB_LEVEL, PROCESS_LEVEL


class Told(Protocol):
    """Who hears of the job."""

    def fault_seen(self, cause: str) -> None: ...

    def fault_mended(self, step: int) -> None: ...

    def stepped(self, name: str, step: int) -> None: ...

    def job_ended(self, *, succeeded: bool, message: str, restart_mode: str) -> None: ...


class AgentHere:
    """Runs a `Node` for the rank that the operator gives.

    Args:
        arguments: of the pod: nodes, workers, port of the rendezvous, script.
        told: hears of the job.
        took_over: called when a node has installed handlers of signals, which are to be others.
        cancelled: called when the job has ended because some pod was told to end.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        run_dir: Path,
        private: Path,
        *,
        took_over: Callable[[], None],
        cancelled: Callable[[], None],
    ) -> None:
        self._arguments, self._run_dir, self._private = arguments, run_dir, private
        self._took_over, self._cancelled = took_over, cancelled
        self.told: Told | None = None
        self._node: Node | None = None
        self._running: asyncio.Task[None] | None = None
        self._rank = -1
        self._name = ""
        self._durable = False

    @property
    def runs(self) -> bool:
        return self._running is not None and not self._running.done()

    def begin(self, rank: int, first_node: str) -> None:
        """Start it, once one that runs has ended."""
        self._running = asyncio.create_task(self._run(rank, first_node, self._running), name=f"node {rank}")

    def resume(self) -> None:
        if self._node is not None:
            self._node.resume()

    def pause(self, why: str) -> None:
        if self._node is not None:
            self._node.pause(why)

    def save_and_end(self) -> bool:
        """Have the job save its last step and end, if that outlives the pods; else nothing is done."""
        if self._node is None or not self._durable:
            return False
        self._node.ask_to_end()
        return True

    async def end(self) -> None:
        """Returns when nothing of it is left."""
        await _ended(self._running)

    def note(self, **fields: Any) -> None:
        """For the job's event log, if there is one."""
        if self._node is not None:
            self._node.note("operator_asked", **fields)

    async def _run(self, rank: int, first_node: str, before: asyncio.Task[None] | None) -> None:
        await _ended(before)
        assert self.told is not None
        message, mode, state = "", JOB_LEVEL, "failed"
        try:
            state = await self._job(rank, first_node)
            message = self._why_failed()
        except ExcludedError as error:  # the others may go on without it: a new process may come back to them
            message, mode = str(error), PROCESS_LEVEL
        except HyperpodExtError as error:
            message = "\n".join(filter(None, (str(error), error.hint)))
        finally:
            self._node = None
        if state in ("cancelled", "left"):
            message, mode = "a pod of the job was told to end", PROCESS_LEVEL
            self._cancelled()
        self.told.job_ended(succeeded=state == "succeeded", message=message, restart_mode=mode)

    async def _job(self, rank: int, first_node: str) -> str:
        host = f"[{first_node}]" if ":" in first_node else first_node
        flags = {
            "--nnodes": self._arguments.nnodes,
            "--nproc-per-node": self._arguments.nproc_per_node,
            "--node-rank": rank,
            "--rdzv-endpoint": f"{host}:{self._arguments.rdzv_port}",
        }
        argv = [str(word) for flag in flags.items() for word in flag]
        arguments = parse([*argv, self._arguments.script, *self._arguments.script_args])
        (self._run_dir / "logs").mkdir(parents=True, exist_ok=True)
        if rank == 0:
            (self._run_dir / REPORT).unlink(missing_ok=True)  # of an earlier run
        settings = read_settings(arguments, self._run_dir, self._private)
        self._rank, self._name = rank, settings.config.name
        self._durable = bool(settings.config.checkpoint.durable())
        self._node = Node(settings, self._hear)
        running = asyncio.ensure_future(self._node.run())
        try:
            await asyncio.sleep(0)
            self._took_over()
            return await running
        finally:
            if not running.done():
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    def _hear(self, message: c.ToAgent | c.FromAgent) -> None:
        """What is said between this agent and the coordinator."""
        assert self.told is not None
        match message:
            case c.Died(rank=rank, step=step, cause=cause) | c.Failed(rank=rank, step=step, cause=cause):
                self.told.fault_seen(f"rank {rank}, step {step}: {cause}")
            case c.AbortGeneration(rank=rank) if rank >= 0 and rank // self._arguments.nproc_per_node != self._rank:
                self.told.fault_seen(f"a fault of rank {rank}, on node {rank // self._arguments.nproc_per_node}")
            case c.GoOn(step=step):
                self.told.fault_mended(step)
            case c.Event(event="step", fields=fields) if isinstance(fields.get("step"), int):
                self.told.stepped(self._name, fields["step"])

    def _why_failed(self) -> str:
        try:
            error = json.loads((self._run_dir / REPORT).read_text()).get("error") or {}
        except (OSError, ValueError):
            error = {}
        why = "\n".join(str(error[key]) for key in ("message", "hint") if error.get(key))
        return why or f"the job failed; {REPORT} of the node that led it says why"


async def _ended(task: asyncio.Task[None] | None) -> None:
    if task is not None and not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
