"""Ends a job as succeeded, failed or cancelled. In each case, the nodes upload the last step."""

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
"""Final state of a job."""
_STOP_SHARE = 0.5
"""Share of a cancelled job's grace period that ranks get to finish a common step and save it."""
ASK_LATER_S = 0.05
"""Number of seconds until a stop request is repeated, if some ranks have not begun their training loop."""
_FARTHEST = 1024
"""Maximum number of steps between the newest step and the step after which ranks are requested to stop. A job with
short steps needs a large number, because ranks may have passed the requested step before they answer."""


class JobEnd:
    """Records the exit codes of worker processes, and ends the job."""

    def __init__(self, job: JobContext) -> None:
        self._run, self._members, self._membership, self._outbox = job.run, job.members, job.membership, job.outbox
        self._ranks, self._schedule, self._events = job.ranks, job.schedule, job.events
        self.final_save = FinalSave()
        self.all_uploaded = asyncio.Event()
        self.anybody_joined = False
        self._exit_codes: dict[int, int] = {}
        self._last_lines: dict[int, str] = {}
        self._last_stop: StopAgreement | None = None
        """Agreement of all ranks on the last step of a cancelled job; None if no such stop was requested."""
        self._cancelled_at: float | None = None
        self._error: dict[str, str] | None = None
        self._waits: tuple[FinalState, dict[str, str] | None] | None = None
        """Final state and error of a job whose end is delayed until it is sure that no other coordinator exists; None
        if the end is not delayed."""
        self._reporting: asyncio.Task[None] | None = None
        self.ended: asyncio.Future[FinalState] = asyncio.get_running_loop().create_future()
        """Future with the final state of the job: succeeded, failed or cancelled."""

    @property
    def is_stopping(self) -> bool:
        """Whether the job was cancelled and will end once all ranks have saved a common step."""
        return self._last_stop is not None

    @property
    def is_ending(self) -> bool:
        """Whether the job has ended or was cancelled."""
        return self._cancelled_at is not None or self.ended.done()

    # --- processes end --------------------------------------------------------------------------

    def exited(self, rank: int, code: int, last_line: str = "") -> None:
        """Record that the process of `rank` has ended after its training, with exit `code` (negative: killed by this
        signal). `last_line`: last line of the rank's log."""
        self._exit_codes[rank] = code
        self._last_lines[rank] = last_line
        self.check_exits()

    def know_exits(self, codes: dict[int, int]) -> None:
        """Add the exit codes of ranks that ended under an earlier coordinator. `codes`: exit code of each rank."""
        self._exit_codes |= codes

    def lost_when_done(self, node: int) -> None:
        """Record the loss of a node whose ranks had finished training. Each rank of this node whose exit code was not
        reported gets exit code 0."""
        for rank in self._membership.ranks_on(node):
            self._exit_codes.setdefault(rank, 0)
        self.check_exits()

    def check_exits(self) -> None:
        """Save the last step if all processes have ended with exit code 0. Fail the job if a process has ended with an
        exit code other than 0 after its training. The job also fails if some processes have ended without training,
        while other ranks wait in their training function."""
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
            message = f"rank {rank} ended without calling its @resilient function, while other ranks wait in it"
            self.fail(Fail("JobFailedError", message, "Every rank of a job must call it."))

    # --- requests to end ----------------------------------------------------------------------------

    def cancel(self) -> None:
        """Cancel the job on request. Unless every step is saved to a durable tier anyway, the job ends after a common
        step that all ranks save."""
        if self._cancelled_at is not None:
            return  # a repeated request must not extend the grace period
        membership, policy = self._membership, self._schedule.policy
        # save a common step if ranks have just got new numbers: perhaps no rank has saved a step under its new number
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
        # number the stop requests of a cancelled job downwards from -1, because those of a resize count up from 1
        number = agreement.number - 1
        step = agreement.ask(number, self._ranks.newest(self._membership.committed))
        ask = c.AskStop(generation=self._membership.generation, number=number, step=step, ends=True)
        asyncio.get_running_loop().call_later(ASK_LATER_S if later else 0.0, self._outbox.to_all, ask)

    def stop_answered(self, rank: int, number: int, can: bool, making: int, over: bool) -> None:
        """Process the answer of `rank` to a stop request. `StopAgreement.answered` documents the arguments. A rank that
        makes no more steps saves its last step without a stop request."""
        assert self._last_stop is not None
        match self._last_stop.answered(rank, number, can, making, over):
            case Answer.AGREED:
                self._outbox.to_all(c.StopAtStep(generation=self._membership.generation, number=number))
            case Answer.ASK_AGAIN | Answer.ASK_LATER as answer:
                self._ask_to_stop(self._last_stop, later=answer is Answer.ASK_LATER)

    def stopped(self, rank: int, number: int) -> None:
        """Record that `rank` has saved the agreed step and stopped. End the job once all ranks have stopped."""
        assert self._last_stop is not None
        if self._last_stop.stopped(rank, number):
            self.end("cancelled")

    # --- the last step --------------------------------------------------------------------------

    def _save_last(self) -> None:
        """Order all nodes to upload the last step to the durable tiers, after which the job ends as succeeded."""
        if not self._run.config.checkpoint.durable():
            self.end("succeeded")
        elif not self.final_save.begun:
            self.final_save.begun = True
            self._outbox.to_all(c.SaveLast())

    def agent_came(self, node: int) -> None:
        """Send the order to save the last step to an agent that connects after this order was sent to all agents."""
        if self.final_save.begun and not self.ended.done():
            self._outbox.send(node, c.SaveLast())

    def holds(self, node: int, held: tuple[c.HeldSnapshot, ...]) -> None:
        """Record which snapshots are in the memory of `node`, after training has ended."""
        self.final_save.held[node] = held
        self._name_last()

    def uploaded(self, node: int) -> None:
        """Record that `node` has uploaded its part of the last step."""
        self.final_save.done(node)
        self._check_uploads()

    def agent_lost(self, node: int) -> None:
        """Record that `node` is lost, so that the final save does not wait for it."""
        self.final_save.lost(node)
        self._name_last()
        self._check_uploads()

    def _name_last(self) -> None:
        """When all nodes have reported their snapshots, order them to upload the newest one that all ranks have."""
        ends = self.ended.result() != "succeeded" if self.ended.done() else self.final_save.begun
        nodes = set(self._members.agents)
        if not ends or self._run.config.restarts_script:
            # upload nothing: a script that restores its own state also saves its own checkpoints
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
        """Fail the job because of an internal error of the coordinator."""
        self.fail(Fail("HyperpodExtError", f"internal error of the coordinator: {why}"))

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
        """Return whether the last fault was a lost node, and the other nodes could elect another coordinator. After the
        loss of a node, perhaps this coordinator's own node is cut off from the network."""
        faults = self._membership.faults
        counts = bool(faults) and faults[-1].node_lost and not self._membership.held
        return counts and self._members.others_may_go_on

    def is_sure(self) -> None:
        """End the job if its end was delayed, because it is now sure that the other nodes have no other coordinator."""
        if self._waits is not None:
            self.end(*self._waits)

    def order(self) -> c.EndJob:
        """Return the order to end the job, which contains the rest of the grace period."""
        spent_s = time.monotonic() - self._cancelled_at if self._cancelled_at is not None else 0.0
        grace_s = self._schedule.policy.grace_s - spent_s
        error = self._error or {}
        why, hint = error.get("message", ""), error.get("hint", "")
        return c.EndJob(state=self.ended.result(), grace_s=grace_s, why=why, hint=hint)

    async def reported(self) -> None:
        """Wait until the job's report is written. If nodes uploaded snapshots after the end of the job, write the
        report again."""
        if self._reporting is None:
            return
        await self._reporting
        if self.final_save.held and self.ended.result() != "succeeded":
            self._report(self.ended.result())
            await self._reporting

    def _report(self, state: FinalState) -> None:
        """Write the job's report in a thread. Writing the report of a long job takes so long that without a thread,
        agents would treat this coordinator as lost."""
        make = self._events.reporter(state=state, error=self._error, world_size=len(self._membership.nodes))
        self._reporting = asyncio.get_running_loop().create_task(self._write_aside(make))

    async def _write_aside(self, make: Callable[[], dict[str, Any]]) -> None:
        await asyncio.to_thread(_write, self._run.run_dir, make)


def _write(run_dir: Path, make: Callable[[], dict[str, Any]]) -> None:
    """Write the job's report. An OSError is only printed to stderr, and does not change the job's final state."""
    try:
        write_report(run_dir, make())
        release_room(run_dir)
    except OSError as error:
        sys.stderr.write(f"hyperpod_ext: {run_dir / REPORT} cannot be written: {error.strerror}\n")
