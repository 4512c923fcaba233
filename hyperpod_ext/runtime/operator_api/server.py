"""The HTTP server of a pod. For each request, `states` decides; the server then starts, pauses, resumes or ends the
agent."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from hyperpod_ext.runtime.ipc.http_server import HttpServer, Request, Response
from hyperpod_ext.runtime.operator_api import states
from hyperpod_ext.runtime.operator_api.requests import Ranks, Start, Stop, mistakes
from hyperpod_ext.runtime.operator_api.states import Answer, NodeStart, Order, Pod, State
from hyperpod_ext.version import __version__

_METHODS = {"/status": "GET", "/start": "POST", "/update": "POST", "/stop": "POST", "/shutdown": "POST"}
_MALFORMED = 422
_AGAIN_S = 60.0
"""Time in seconds after which the same refusal is logged again."""
_MOST_REFUSALS = 64
Body = TypeVar("Body", bound=BaseModel)


class Agent(Protocol):
    """The methods of this node's agent that the server calls."""

    @property
    def runs(self) -> bool: ...

    @property
    def waits_for(self) -> str:
        """Why the agent cannot continue, as a phrase; empty if it can continue."""

    def begin(self, at: NodeStart) -> None:
        """Start the agent as soon as an agent that is running has ended."""

    def resume(self, nodes: int, gone: Collection[str]) -> None:
        """Resume training, without the pods at the addresses `gone`, which have left the job."""

    def pause(self) -> None: ...

    async def rest(self, limit_s: float) -> None:
        """Hold training. Returns when ranks have left their step, or after `limit_s` seconds."""

    async def end(self) -> None:
        """End the agent, and wait until all its processes have ended."""

    def leave(self) -> None:
        """End the agent and this process."""

    def note(self, **fields: Any) -> None:
        """Write an event to the job's log, if the job has a log."""


class OperatorApi:
    """Answers the operator's five requests.

    Args:
        agent: this node's agent.
        nodes: number of the job's nodes.
        sizes: numbers of nodes with which an elastic job may run.
        allowed: networks and addresses that may send orders. If `allowed` is empty, only the address that sends the
            first order may send orders.
    """

    def __init__(self, agent: Agent, nodes: int, allowed: Collection[str], sizes: Collection[int] = ()) -> None:
        self._agent, self._allowed = agent, allowed
        self.pod = Pod(nodes, frozenset(sizes))
        self._server = HttpServer(self._handle, _say)
        self._work: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._operator = states.Caller()
        self._refusals: dict[tuple[str, str], float] = {}
        """Time, in seconds of the monotonic clock, at which a refusal was last logged, by client and path."""
        self._name = ""
        self._made: dict[int, tuple[int, int]] = {}
        """Rank and newest step of each worker, by local rank. Any thread may write to this dict."""

    async def listen(self, host: str, port: int) -> int:
        """Start to serve requests. The pod is ready when this method returns. Returns the port.

        Raises:
            OSError: the port is used by another process.
        """
        self._loop = asyncio.get_running_loop()
        self.pod = states.enter(self.pod, State.INIT, now())
        port = await self._server.listen(host, port)
        self.pod = states.is_ready(self.pod, now(), agent_runs=False)
        return port

    async def close(self) -> None:
        await self._server.close()
        await asyncio.gather(*self._work)

    # --- events of the job, from any thread -------------------------------------------------------

    def fault_seen(self, cause: str, rank: int = -1) -> None:
        self._take(lambda pod: states.fault_seen(pod, cause, rank))

    def goes_on_without(self, step: int, ranks: int, of: int) -> None:
        self._take(lambda pod: states.goes_on_without(pod, step, ranks, of))

    def fault_mended(self, step: int) -> None:
        self._take(lambda pod: states.fault_mended(pod, step))

    def stepped(self, name: str, rank: int, local_rank: int, step: int) -> None:
        """Record that a rank on this node has made a step."""
        self._name = name
        self._made[local_rank] = rank, step

    def job_ended(self, *, succeeded: bool, message: str, restart_mode: str) -> None:
        def ended(pod: Pod) -> Pod:
            return states.job_ended(pod, now(), succeeded=succeeded, message=message, restart_mode=restart_mode)

        self._take(ended)

    def _take(self, change: Callable[[Pod], Pod]) -> None:
        def take() -> None:
            self.pod = change(self.pod)

        assert self._loop is not None
        self._loop.call_soon_threadsafe(take)

    # --- requests -----------------------------------------------------------------------------------

    def _handle(self, request: Request) -> Response:
        if request.path not in _METHODS:
            return Response(404, {"detail": "Not Found"})
        if request.method != _METHODS[request.path]:
            return Response(405, {"detail": "Method Not Allowed"})
        self._operator = states.heard(self._operator, request.caller, time.monotonic())
        if request.path == "/status":
            return self._status()
        before = self.pod
        try:
            answer = self._answer(request)
        except ValidationError as error:
            self._note(request, before, _MALFORMED, "the body is malformed")
            return Response(_MALFORMED, {"detail": mistakes(error)})
        self.pod = answer.pod
        if answer.status == states.OK and not self._allowed:
            self._operator = states.obeyed(self._operator, request.caller, time.monotonic())
        # do not log requests that only repeat an earlier one
        if answer.why or answer.orders or answer.pod.rank != before.rank:
            self._note(request, before, answer.status, answer.why)
        for order in answer.orders:
            self._carry_out(order, request, answer.gone)
        if answer.status != states.OK:
            return Response(answer.status, {"detail": answer.why})
        return self._status() if request.path == "/update" else Response(states.OK)

    def _status(self) -> Response:
        pod = states.waiting(states.made(self.pod, self._name, dict(self._made)), self._agent.waits_for)
        return Response(states.OK, states.status(pod, __version__))

    def _answer(self, request: Request) -> Answer:
        members, moment = self.pod.addresses.values(), time.monotonic()
        if why := states.why_refused(request.caller, self._allowed, members, self._operator, moment):
            return Answer(self.pod, states.FORBIDDEN, why)
        match request.path:
            case "/start":
                return states.start(self.pod, _read(Start, request.body), now())
            case "/update":
                return states.update(self.pod, _read(Ranks, request.body))
            case "/stop":
                asked = _read(Stop, request.body) if _says(request.body) else Stop()
                return states.stop(self.pod, asked, now())
            case _:
                return states.shutdown(self.pod, now())

    def _note(self, request: Request, before: Pod, status: int, why: str) -> None:
        """Log a request and its result: on stderr, and in the job's event log if there is one."""
        if status == states.FORBIDDEN and not self._is_news(request):
            return  # a client that repeats refused requests must not fill the disk
        words = f"{request.path} of {request.caller}: {status}" + (f", {why}" if why else "")
        _say(f"{words}; {before.state.value} -> {self.pod.state.value}, rank {self.pod.rank}")
        state = self.pod.state.value.lower()
        self._agent.note(call=request.path, caller=request.caller, status=status, why=why, state=state)

    def _is_news(self, request: Request) -> bool:
        """Return whether this refusal should be logged: it was not logged within the last minute.

        To limit memory, refusals of further clients are not logged while `_MOST_REFUSALS` are remembered."""
        moment, what = time.monotonic(), (request.caller, request.path)
        self._refusals = {known: since for known, since in self._refusals.items() if moment - since < _AGAIN_S}
        if what in self._refusals or len(self._refusals) >= _MOST_REFUSALS:
            return False
        self._refusals[what] = moment
        return True

    # --- orders ---------------------------------------------------------------------------------

    def _carry_out(self, order: Order, request: Request, gone: Collection[str]) -> None:
        match order:
            case Order.BEGIN:
                self._made.clear()
                self._agent.begin(self.pod.node_start)
            case Order.RESUME:
                self._agent.resume(self.pod.nodes, gone)
            case Order.PAUSE:
                self._agent.pause()
                self._is_ready()
            case Order.REST:
                self._spawn(self._rest(float(_read(Stop, request.body).timeout or 0)))
            case Order.END:
                self._spawn(self._end())
            case Order.LEAVE:
                self._agent.leave()

    async def _rest(self, limit_s: float) -> None:
        await self._agent.rest(limit_s)
        self._is_ready()

    async def _end(self) -> None:
        await self._agent.end()
        self._is_ready()

    def _is_ready(self) -> None:
        self.pod = states.is_ready(self.pod, now(), agent_runs=self._agent.runs)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)


@contextlib.contextmanager
def serving(api: OperatorApi, host: str, port: int) -> Iterator[int]:
    """Serve the operator in a separate thread, so that the pod answers even while its agent is busy. Yields the port.

    Raises:
        OSError: the port is used by another process.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="hpx-operator", daemon=True)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(api.listen(host, port), loop).result()
        asyncio.run_coroutine_threadsafe(api.close(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def now() -> str:
    """Return the present time as ISO 8601 in UTC, which the operator reads."""
    return datetime.now(UTC).isoformat()


def _says(body: bytes) -> bool:
    return bool(body) and body.strip() != b"null"


def _read(kind: type[Body], body: bytes) -> Body:
    return kind.model_validate_json(body or b"null")


def _say(words: str) -> None:
    sys.stderr.write(f"hyperpod_ext, the operator's calls: {words}\n")
