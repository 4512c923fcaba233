"""How the job ends: done, failed, or asked to. Whichever it is, the last step goes to the durable tiers first."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from hyperpod_ext.files import release_room
from hyperpod_ext.runtime.coordinator.final_save import FinalSave
from hyperpod_ext.runtime.coordinator.job_context import JobContext
from hyperpod_ext.runtime.events.log import REPORT, write_report
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.membership.actions import Fail, JobPhase
from hyperpod_ext.runtime.membership.stop_agreement import Answer, StopAgreement

FinalState = Literal["succeeded", "failed", "cancelled"]
"""How a job has ended."""
_STOP_SHARE = 0.5
"""Of the grace of a job that is to end: how long ranks may take to come to the end of a step and save it."""
ASK_LATER_S = 0.05
"""How soon ranks that have not begun their loop are asked again where they can stop."""
_FARTHEST = 1024
"""Steps ahead of the newest; quick ones are made faster than ranks can be asked."""


class JobEnd:
    """Watches how processes end, and says when the job has."""

    def __init__(self, job: JobContext) -> None:
        self._run, self._members, self._membership, self._outbox = job.run, job.members, job.membership, job.outbox
        self._ranks, self._schedule, self._events = job.ranks, job.schedule, job.events
        self.final_save = FinalSave()
        self.all_uploaded = asyncio.Event()
        self.anybody_joined = False
        self._exit_codes: dict[int, int] = {}
        self._last_lines: dict[int, str] = {}
        self._last_stop: StopAgreement | None = None
        """On the step after which the ranks of a job that is to end stop."""
        self._cancelled_at: float | None = None
        self._error: dict[str, str] | None = None
        self._waits: tuple[FinalState, dict[str, str] | None] | None = None
        """How the job ends, if others have no other coordinator."""
        self._reporting: asyncio.Task[None] | None = None
        self.ended: asyncio.Future[FinalState] = asyncio.get_running_loop().create_future()
        """Final state: succeeded, failed or cancelled."""

    @property
    def is_stopping(self) -> bool:
        """Whether the job is to end once all ranks have saved a step."""
        return self._last_stop is not None

    @property
    def is_ending(self) -> bool:
        """Whether it has ended, or somebody has asked for that."""
        return self._cancelled_at is not None or self.ended.done()

    # --- processes end --------------------------------------------------------------------------

    def exited(self, rank: int, code: int, last_line: str = "") -> None:
        """The process of `rank` has ended by itself, or after its training was done. `last_line`: of what it wrote."""
        self._exit_codes[rank] = code
        self._last_lines[rank] = last_line
        self.check_exits()

    def know_exits(self, codes: dict[int, int]) -> None:
        """Exit codes that another coordinator was told of."""
        self._exit_codes |= codes

    def lost_when_done(self, node: int) -> None:
        """A node is gone after the training of its ranks was done."""
        for rank in self._membership.ranks_on(node):
            self._exit_codes.setdefault(rank, 0)
        self.check_exits()

    def check_exits(self) -> None:
        """What it means that some processes have ended by themselves: all, or only some."""
        codes, finished = self._exit_codes, self._membership.phase is JobPhase.ENDED
        if len(codes) == len(self._membership.nodes):
            bad = {rank: code for rank, code in codes.items() if code != 0}
            if not bad:
                self._save_last()
                return
            rank, code = min(bad.items())
            how = (
                f"ended with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name} ({-code})"
            )
            why = f": {self._last_lines[rank]}" if self._last_lines.get(rank) else ""
            self.fail(Fail("JobFailedError", f"rank {rank} {how} after its training was done{why}"))
        elif codes and self.anybody_joined and not finished:
            rank = min(codes)
            message = f"rank {rank} ended without calling its @resilient function, while others wait in theirs"
            self.fail(Fail("JobFailedError", message, "Every rank of a job must call it."))

    # --- somebody asks for the end ----------------------------------------------------------------

    def cancel(self) -> None:
        """End the job because somebody asked for it; where not each step is saved, after one that all ranks save."""
        if self._cancelled_at is not None:
            return  # each node's agent may have been told to end, and says so; time is running
        membership, policy = self._membership, self._schedule.policy
        # of a world that ranks have just come to, nobody may have saved a step yet
        moved = membership.renumbering.newest == membership.generation
        needless = not policy.durable() or (policy.due(1) and not moved)
        if self.ended.done() or needless or not (self._is_running or moved):
            self.end("cancelled")
            return
        self._cancelled_at = time.monotonic()
        asyncio.get_running_loop().call_later(policy.grace_s * _STOP_SHARE, self.end, "cancelled")
        self._stop_once_running()

    @property
    def _is_running(self) -> bool:
        return self._membership.phase is JobPhase.RUNNING and self._membership.rescaling.change is None

    def _stop_once_running(self) -> None:
        if self.ended.done():
            return
        if not self._is_running:
            asyncio.get_running_loop().call_later(ASK_LATER_S, self._stop_once_running)
            return
        self._last_stop = StopAgreement(len(self._membership.nodes), ahead=1, farthest=_FARTHEST)
        self._ask_to_stop(self._last_stop)

    def _ask_to_stop(self, agreement: StopAgreement, *, later: bool = False) -> None:
        number = agreement.number - 1  # those of a resize count from 1
        step = agreement.ask(number, self._ranks.newest(self._membership.committed))
        ask = c.AskStop(generation=self._membership.generation, number=number, step=step, ends=True)
        asyncio.get_running_loop().call_later(ASK_LATER_S if later else 0.0, self._outbox.to_all, ask)

    def stop_answered(self, rank: int, number: int, can: bool, making: int, over: bool) -> None:
        """Whether `rank` can stop where it was asked to; one that makes no more steps saves the last one by itself."""
        assert self._last_stop is not None
        match self._last_stop.answered(rank, number, can, making, over):
            case Answer.AGREED:
                self._outbox.to_all(c.StopAtStep(generation=self._membership.generation, number=number))
            case Answer.ASK_AGAIN | Answer.ASK_LATER as answer:
                self._ask_to_stop(self._last_stop, later=answer is Answer.ASK_LATER)

    def stopped(self, rank: int, number: int) -> None:
        """`rank` has stopped there, and has saved."""
        assert self._last_stop is not None
        if self._last_stop.stopped(rank, number):
            self.end("cancelled")

    # --- the last step --------------------------------------------------------------------------

    def _save_last(self) -> None:
        """All are done. The last step goes to the durable tiers before that is said."""
        if not self._run.config.checkpoint.durable():
            self.end("succeeded")
        elif not self.final_save.begun:
            self.final_save.begun = True
            self._outbox.to_all(c.SaveLast())

    def agent_came(self, node: int) -> None:
        """An agent came, or came back, when the others had been told to upload the last step."""
        if self.final_save.begun and not self.ended.done():
            self._outbox.send(node, c.SaveLast())

    def holds(self, node: int, held: tuple[c.HeldSnapshot, ...]) -> None:
        """What the memory of `node` holds, now that nobody trains any more."""
        self.final_save.held[node] = held
        self._name_last()

    def uploaded(self, node: int) -> None:
        """What `node` can upload is uploaded."""
        self.final_save.done(node)
        self._check_uploads()

    def agent_lost(self, node: int) -> None:
        """A node is gone that had yet to upload its part."""
        self.final_save.lost(node)
        self._name_last()
        self._check_uploads()

    def _name_last(self) -> None:
        """Once every node has said what it holds: have the newest step of all ranks uploaded."""
        ends = self.ended.result() != "succeeded" if self.ended.done() else self.final_save.begun
        nodes = set(self._members.agents)
        if not ends or self._run.config.restarts_script:  # the script has saved what it wants to keep
            return
        if self.final_save.choose(nodes):
            step, made = self.final_save.step, self._ranks.newest(self._membership.committed)
            save_id = self.final_save.save_id
            self._events.write("final_save", save_id=save_id, step=step, made=made, nodes=sorted(nodes))
        if self.final_save.save_id is None or nodes - self.final_save.held.keys():
            return
        for node, agent in self._members.agents.items():
            if not agent.writer.is_closing():
                self._outbox.send(node, c.UploadSnapshot(save_id=self.final_save.save_id))

    def _check_uploads(self) -> None:
        if self.final_save.is_complete(self._members.agents.keys()):
            self.all_uploaded.set()
            if self.final_save.begun:
                self.end("succeeded")

    # --- the end --------------------------------------------------------------------------------

    def broke(self, why: str) -> None:
        """An error of our own."""
        self.fail(Fail("HyperpodExtError", f"the coordinator met an error of its own: {why}"))

    def fail(self, failure: Fail) -> None:
        self.end("failed", {"code": failure.code, "message": failure.message, "hint": failure.hint})

    def end(self, state: FinalState, error: dict[str, str] | None = None) -> None:
        if self.ended.done():
            return
        if self._waits is None and state == "failed" and self._lacks_nodes():
            self._members.doubt_all(time.monotonic())
        if self._members.unsure_since is not None:
            self._waits = self._waits or (state, error)
            return
        self._events.write("job_ended", state=state)
        self._error = error
        self.ended.set_result(state)
        self._outbox.to_all(self.order())
        self._report(state)

    def _lacks_nodes(self) -> bool:
        """Whether the last that happened is that a node was lost, and others would be enough to go on. Then it may be
        this node that is cut off, or was: some connections have ended, and others are about to."""
        faults = self._membership.faults
        counts = bool(faults) and faults[-1].node_lost and not self._membership.held
        return counts and self._members.others_may_go_on

    def is_sure(self) -> None:
        """The others have no other coordinator."""
        if self._waits is not None:
            self.end(*self._waits)

    def order(self) -> c.EndJob:
        """What agents are told: to end, within what is left of the grace."""
        spent_s = time.monotonic() - self._cancelled_at if self._cancelled_at is not None else 0.0
        grace_s = self._schedule.policy.grace_s - spent_s
        error = self._error or {}
        why, hint = error.get("message", ""), error.get("hint", "")
        return c.EndJob(state=self.ended.result(), grace_s=grace_s, why=why, hint=hint)

    async def reported(self) -> None:
        """The report is written; once more, with what was uploaded after the job had ended."""
        if self._reporting is None:
            return
        await self._reporting
        if self.final_save.held and self.ended.result() != "succeeded":
            self._report(self.ended.result())
            await self._reporting

    def _report(self, state: FinalState) -> None:
        """Have the report written in a thread: for a long job that takes longer than agents wait for a sign of life."""
        make = self._events.reporter(state=state, error=self._error, world_size=len(self._membership.nodes))
        self._reporting = asyncio.get_running_loop().create_task(self._write_aside(make))

    async def _write_aside(self, make: Callable[[], dict[str, Any]]) -> None:
        await asyncio.to_thread(_write, self._run.run_dir, make)


def _write(run_dir: Path, make: Callable[[], dict[str, Any]]) -> None:
    """The job has ended as it has, whether that can be written or not."""
    try:
        write_report(run_dir, make())
        release_room(run_dir)
    except OSError as error:
        sys.stderr.write(f"hyperpod_ext: {run_dir / REPORT} cannot be written: {error.strerror}\n")
