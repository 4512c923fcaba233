"""A simulated worker: joins, restores, trains and reports as `@resilient` does, over the agent's own protocol."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.declared import encode, with_version

from .event_loop import Process
from .memory import Copy

if TYPE_CHECKING:
    from .cluster import Cluster
    from .machine import Machine

_TRANSFER_S, _RETRY_S = 0.02, 0.3
_PEER_S = 5.0
"""How long another node that says nothing is waited for."""


class AbortedError(Exception):
    """The generation is over."""


class RaisedError(Exception):
    """The training function raises."""


class Worker(Process):
    """One process of one rank."""

    def __init__(self, cluster: Cluster, machine: Machine, rank: int, pid: int) -> None:
        clock = machine.clock
        super().__init__(cluster.loop, f"rank {rank} (pid {pid})", machine.host, clock)
        self.cluster, self.machine, self.rank, self.pid = cluster, machine, rank, pid
        self.state: Copy | None = None
        self.generation, self.newest, self.world_size = 0, 1, 0
        self.is_waiting = False
        """Whether it waits for a generation to begin."""
        self.has_restored = False
        """Whether it has the state that its generation begins from."""
        self.finishes_step = False
        """Whether no other rank is needed any more for the step that it makes."""
        self.raises = False
        """Whether it raises at its next step."""
        self._making = -1
        """Step that it makes, or makes next; -1: none yet."""
        self._stop: int | None = None
        """Step that it stops after, if all agree to."""
        self._stop_number, self._stop_agreed = 0, False
        self._inbox: deque[c.ToWorker] = deque()
        self._waiting: asyncio.Future[Any] | None = None

    @property
    def aborted(self) -> bool:
        return self.newest > max(self.generation, 1)

    async def run(self) -> None:
        """From its start to its end."""
        reader, self._writer = await asyncio.open_unix_connection(self.machine.agent_socket)
        self._say(with_version(encode(c.WorkerHandshake(rank=self.rank, pid=self.pid))))
        self.start(self._listen(reader))
        while True:
            await self._join()
            try:
                await self._restore()
                await self._train()
                self._report(c.Finished, digest=str(self.state.history if self.state else ""))
                await self._next(c.FinishTraining)
            except AbortedError:
                continue
            except RaisedError:
                where = {"place": f"train.py:{self.cluster.new_pid()}", "code": "JobFailedError", "hint": ""}
                step = self.state.step + 1 if self.state else 0
                self._report(c.Failed, cause="ValueError: planted", step=step, final=False, **where)
                while not self.aborted:
                    await self._something()
                continue
            self.machine.exited(self, 0)
            return

    # --- a generation ---------------------------------------------------------------------------

    async def _join(self) -> None:
        live = None
        if (state := self.state) is not None:
            live = c.LiveState(
                step=state.step,
                save_id=state.save_id,
                own_digest=state.own_digest,
                sharing=state.sharing,
                world_size=state.world_size,
            )
        self.is_waiting, self._making, self._stop = True, -1, None
        self._report(c.Join, live=live, store_port=1)
        while True:
            order = await self._pop()
            if isinstance(order, c.BeginGeneration):
                break
        self.is_waiting = False
        self.generation, self.rank, self.world_size = order.generation, order.rank, order.world_size
        self._decision = order.decision
        self.cluster.judge.begins(self, order)

    async def _restore(self) -> None:
        attempt, self.has_restored = 0, False
        while True:
            attempt += 1
            given = self._decision
            named = {"rank": self.rank, "save_id": given.save_id, "node": -1, "url": "", "folder": ""}
            others = (c.RestoreSource(kind=given.others, **named),)
            error = await self._take(given.sources.get(self.rank, others)[0])
            self.has_restored = not error
            self._report(c.Restored, attempt=attempt, error=error)
            order = await self._next(c.GoOn, c.TryNext)
            if isinstance(order, c.GoOn):
                break
            self._decision, self.has_restored = order.decision, False
        self.cluster.judge.goes_on(self, order.step)

    def _source(self) -> c.RestoreSource:
        """Where it gets its state: what is said of it, or of all those that nothing is said of."""
        given, rank = self._decision, self.rank
        own = c.RestoreSource(kind=given.others, rank=rank, save_id=given.save_id, node=-1, url="", folder="")
        return given.sources.get(rank, (own,))[0]

    async def _take(self, source: c.RestoreSource) -> str:
        """The state of the decision; why not, if it cannot be had."""
        cluster, kind = self.cluster, source.kind
        if kind == "self":
            return "" if self.state and self.state.save_id == source.save_id else "it has not what it is said to have"
        if kind == "fresh":
            self.state = Copy(self.rank, 0, self.generation, 0, cluster.sharing, self.world_size)
            return ""
        await self._sleep(_TRANSFER_S)
        if kind == "live":
            while (other := cluster.worker_of(source.rank)) is None or cluster.network.is_cut(self.host, other.host):
                await self._sleep(_RETRY_S)  # until it comes, or the generation is over
            found = other.state
        else:
            machine = self.machine if kind == "memory" else cluster.machines[source.node]
            waits_until = self.loop.time() + _PEER_S
            while cluster.network.is_cut(self.host, machine.host) and self.loop.time() < waits_until:
                await self._sleep(_RETRY_S)
            if machine.memory is None or cluster.network.is_cut(self.host, machine.host):
                cluster.judge.unreadable = True
                return f"node {machine.node} cannot be reached"
            found = machine.memory.find(source.rank, source.save_id)
        if found is None or found.save_id != source.save_id:
            return f"{source.save_id} of rank {source.rank} is not there"
        self.state = Copy(self.rank, found.step, found.generation, found.history, found.sharing, self.world_size)
        return ""

    async def _train(self) -> None:
        assert self.state is not None
        cluster = self.cluster
        step = self.state.step
        self._event("begun", generation=self.generation, step=step, of=cluster.steps, sharing=cluster.sharing)
        self._making = step + 1
        while self.state.step < cluster.steps:
            if self.aborted:
                raise AbortedError
            if self.raises:
                self.raises = False
                raise RaisedError
            began, step = cluster.loop.time() + self.clock, self.state.step + 1
            history = await self._wait(cluster.collectives.arrive(self, step, self.state.history))
            self.finishes_step = False
            made = Copy(self.rank, step, self.generation, history, cluster.sharing, self.world_size)
            if self.machine.memory is None or not self.machine.memory.save(made):
                while not self.aborted:
                    await self._something()
                raise AbortedError
            self.state = made
            self._event("step", generation=self.generation, step=step, of=cluster.steps, began=began)
            await self._stop_after(step)

    async def _stop_after(self, step: int) -> None:
        """Stand after this step, if all have agreed to, until the generation is over."""
        stands = 0
        while self._stop is not None and self._stop <= step and not self.aborted:
            if self._stop_agreed and stands != self._stop_number:
                stands = self._stop_number
                self._report(c.RankStopped, number=stands, step=step)
            await self._something()
        self._making = step + 1

    def _hear_of_stop(self, order: c.AskStop | c.StopAtStep | c.WithdrawStop) -> None:
        match order:
            case c.AskStop(number=number, step=step):
                over = self._making >= 0 and step >= self.cluster.steps
                can = not over and not self.aborted and 0 <= self._making <= step
                self._stop_number, self._stop_agreed, self._stop = number, False, step if can else None
                self._report(c.StopAnswer, number=number, can=can, at=self._making, over=over)
            case c.StopAtStep(number=number):
                self._stop_agreed |= number == self._stop_number
            case c.WithdrawStop(number=number):
                self._stop = None if number == self._stop_number else self._stop

    # --- its line to the agent ------------------------------------------------------------------

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while True:
            try:
                message = await wire.read(reader)
            except ConnectionError:
                message = None
            if message is None:
                self.kill()  # the agent is gone; a worker without one has no job
                return
            order = c.WORKER_ORDERS.decode(message)
            if isinstance(order, c.AbortGeneration):
                self.newest, self._stop = order.generation, None
                self.cluster.collectives.leave(self)
            if isinstance(order, c.AskStop | c.StopAtStep | c.WithdrawStop):
                self._hear_of_stop(order)
            self._inbox.append(order)
            if self._waiting is not None and not self._waiting.done():
                if self.aborted and not self.is_waiting and not self.finishes_step:
                    self._waiting.set_exception(AbortedError())
                elif self._waits_for_orders:
                    self._waiting.set_result(None)

    _waits_for_orders = False

    async def _wait(self, future: asyncio.Future[Any]) -> Any:
        """Until that is done, or the generation is over."""
        if self.aborted and not self.is_waiting:
            raise AbortedError
        self._waiting = future
        return await future

    async def _something(self) -> None:
        """Until an order comes."""
        self._waiting, self._waits_for_orders = self.loop.create_future(), True
        try:
            await self._waiting
        except AbortedError:
            pass
        finally:
            self._waits_for_orders = False

    async def _pop(self) -> c.ToWorker:
        while not self._inbox:
            await self._something()
        return self._inbox.popleft()

    async def _next(self, *kinds: type[Any]) -> Any:
        while not self.aborted:
            order = await self._pop()
            if isinstance(order, kinds) and getattr(order, "generation", None) == self.generation:
                return order
        raise AbortedError

    async def _sleep(self, seconds: float) -> None:
        future = self.loop.create_future()
        self.soon(lambda: future.done() or future.set_result(None), seconds)
        await self._wait(future)

    def _event(self, event: str, **fields: Any) -> None:
        self._report(c.Event, event=event, t=self.loop.time() + self.clock, fields={"rank": self.rank, **fields})

    def _report(self, kind: type[c.Report], **fields: Any) -> None:
        self._say(encode(kind(generation=self.generation, **fields)))

    def _say(self, message: wire.Message) -> None:
        self._writer.write(wire.encode(message))


class Collectives:
    """One for each step of each generation. It ends when all ranks are there; if one is gone, it never does."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._open: dict[tuple[int, int], dict[int, tuple[Worker, asyncio.Future[int]]]] = {}

    def arrive(self, worker: Worker, step: int, history: int) -> asyncio.Future[int]:
        """Comes to the history of the step."""
        cluster, key = self._cluster, (worker.generation, step)
        here = self._open.setdefault(key, {})
        if (other := here.get(worker.rank)) is not None and other[0] is not worker:
            cluster.judge.violated(f"{worker} and {other[0]} are both rank {worker.rank} of generation {key[0]}")
        future: asyncio.Future[int] = cluster.loop.create_future()
        here[worker.rank] = worker, future
        if len(here) == worker.world_size:
            self._meet(key, worker.world_size)
        return future

    def _meet(self, key: tuple[int, int], world_size: int) -> None:
        """All ranks are there. What they say to each other comes once the network is whole."""
        cluster, here = self._cluster, self._open.get(key, {})
        if len(here) < world_size:
            return
        workers = [one for one, _ in here.values()]
        if self._are_cut(workers):
            cluster.loop.call_later(_RETRY_S, self._meet, key, world_size)
            return
        del self._open[key]
        made = cluster.judge.steps(workers, key[1])
        for one in workers:  # what is left of the step is its own business: told to leave, it ends the step first
            one.finishes_step = True
        for one, done in here.values():
            seconds = cluster.step_s + cluster.rng.uniform(0, cluster.spread_s)
            one.soon(lambda done=done: done.done() or done.set_result(made), seconds)

    def _are_cut(self, workers: list[Worker]) -> bool:
        first = workers[0].host
        return any(self._cluster.network.is_cut(first, one.host) for one in workers[1:])

    def leave(self, worker: Worker) -> None:
        """It waits there no more."""
        for here in self._open.values():
            if worker.rank in here and here[worker.rank][0] is worker:
                del here[worker.rank]
