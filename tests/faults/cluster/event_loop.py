"""An event loop whose time is simulated, and whose callbacks belong to simulated processes.

Real code runs on it unchanged: `time.monotonic()` is simulated too (`simulated_time`), and connections are those of
`network.py`. A process that is dead runs nothing any more; one that is paused runs what was due when it goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import heapq
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

PROCESS: contextvars.ContextVar[Process] = contextvars.ContextVar("process")


class StandstillError(Exception):
    """Nothing is due, and nobody will do anything any more."""


class Process:
    """Something that can be killed or stopped, and has a clock of its own.

    Args:
        clock: what its clock shows more than others'.
    """

    def __init__(self, loop: SimulatedLoop, name: str, host: str, clock: float) -> None:
        self.loop, self.name, self.host, self.clock = loop, name, host, clock
        self.alive, self.paused = True, False
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)
        self._due: list[_Handle] = []
        self.at_end: list[Callable[[], None]] = []
        """Called once it is dead: its connections close, its parent hears of it."""

    def __repr__(self) -> str:
        return self.name

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` as this process."""
        return self.loop.create_task(work, context=self.context)

    def soon(self, call: Callable[[], object], seconds: float = 0.0) -> None:
        """Call this in the process, in a while."""
        if seconds:
            self.loop.call_later(seconds, call, context=self.context)
        else:
            self.loop.call_soon(call, context=self.context)

    def keep(self, handle: _Handle) -> None:
        """It is paused, or dead: this is due when it goes on, or never."""
        if self.alive:
            self._due.append(handle)

    def kill(self) -> None:
        """As SIGKILL does."""
        if self.alive:
            self.alive, self._due = False, []
            for tell in self.at_end:
                tell()

    def pause(self) -> None:
        """As SIGSTOP does: time goes on without it."""
        self.paused = True

    def resume(self) -> None:
        """What was due meanwhile runs now, in its order."""
        self.paused = False
        due, self._due = self._due, []
        self.loop.ready.extend(due)


class _Handle(list[Any]):
    """Of asyncio's, what is used: callback, arguments and context; without a callback it is cancelled.

    Thousands of them are made in a story, and a list is made without a call of Python's.
    """

    __slots__ = ()

    def cancel(self) -> None:
        self[0], self[1] = None, ()

    def cancelled(self) -> bool:
        return self[0] is None


class Connects(Protocol):
    """The network, as the loop sees it."""

    async def connect(self, factory: Callable[[], Any], address: Any) -> Any: ...

    def listen(self, factory: Callable[[], Any], address: Any) -> Any: ...


class SimulatedLoop(asyncio.BaseEventLoop):
    """Time stands still while anything is ready, and then jumps to what is due next."""

    network: Connects

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._due: list[tuple[float, int, _Handle]] = []
        self._timers = 0
        self._tasks: list[asyncio.Task[Any]] = []
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]
        self.create_future = functools.partial(asyncio.Future, loop=self)  # type: ignore[method-assign]

    # --- time -----------------------------------------------------------------------------------

    @property
    def ready(self) -> Any:
        return self._ready  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        """All that is ready now, and then what is due next, until somebody stops the loop.

        Raises:
            StandstillError: nothing is due any more.
        """
        ready, due, pop = self.ready, self._due, heapq.heappop
        take = ready.popleft
        while not self._stopping:  # type: ignore[attr-defined]
            while due and due[0][2][0] is None:
                pop(due)
            if not ready:
                if not due:
                    raise StandstillError("nothing is due any more")
                if due[0][0] > self._now:
                    self._now = due[0][0]
            until = self._now + 1e-9
            while due and due[0][0] < until:
                ready.append(pop(due)[2])
            for _ in range(len(ready)):
                callback, args, context = handle = take()
                if callback is None:
                    continue
                process = context.get(PROCESS)
                if process is not None and (process.paused or not process.alive):
                    process.keep(handle)
                    continue
                try:
                    context.run(callback, *args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self.call_exception_handler({"message": f"in {callback}", "exception": error})

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        handle = _Handle((callback, args, contextvars.copy_context() if context is None else context))
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    call_soon_threadsafe = call_soon

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        timer = _Handle((callback, args, contextvars.copy_context() if context is None else context))
        self._timers += 1
        heapq.heappush(self._due, (when, self._timers, timer))
        return timer

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.call_at(self._now + delay, callback, *args, context=context)

    # --- what else code asks a loop for -----------------------------------------------------------

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: Any) -> None:
        pass

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        return await self.network.connect(protocol_factory, (host, port))

    async def create_unix_connection(self, protocol_factory: Any, path: Any = None, **_: Any) -> Any:
        return await self.network.connect(protocol_factory, str(path))

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        return self.network.listen(protocol_factory, (host, port))

    async def create_unix_server(self, protocol_factory: Any, path: Any = None, **_: Any) -> Any:
        Path(path).touch()  # its mode is set
        return self.network.listen(protocol_factory, str(path))

    def _make_task(self, loop: Any, coro: Any, context: Any = None) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, context=context)
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # those of dead processes never end
        self._tasks.append(task)
        return task

    def end(self) -> None:
        """What processes were doing when they were killed goes with them: nothing of it runs any more."""
        self.ready.clear()
        self._due.clear()
        asyncio._set_running_loop(self)  # code that runs as if it were told to end may start tasks, which end here, too
        for task in self._tasks:
            if not task.done():
                with contextlib.suppress(BaseException):
                    task.get_coro().close()  # type: ignore[union-attr]
        asyncio._set_running_loop(None)
        self._tasks.clear()
        self.ready.clear()
        self.close()


@contextlib.contextmanager
def simulated_time(loop: SimulatedLoop) -> Iterator[None]:
    """Clocks show the loop's time, each process's as much more as it is ahead."""

    def now() -> float:
        process = PROCESS.get(None)
        return loop._now if process is None else loop._now + process.clock

    def wall() -> float:
        return 1e9 + loop.time()

    with mock.patch.object(time, "monotonic", now), mock.patch.object(time, "time", wall):
        yield
