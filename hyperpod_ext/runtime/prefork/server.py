"""The pod's fork server: imports the modules that ranks need, and forks a rank for each process that `hyperpodrun`
starts.

The process that `hyperpodrun` starts is called the small process of a rank. If a small process ends, its rank and the
rank's children are killed. If the small process is stopped, its rank is stopped. When a rank ends, the server reports
that to the rank's small process. The fork server ends together with the launcher. If the fork server is killed, the
kernel kills all ranks.

Arguments: descriptor of the listening socket, process id of the launcher, path of the socket.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from hyperpod_ext.processes import become_subreaper, children, die_with_parent, kill_descendants, kill_group
from hyperpod_ext.runtime.prefork import place

_ORDER_S = 10.0
"""Time in seconds within which a small process must send its order. All other small processes wait while the server
waits for an order."""
_LOOK_S = 0.5
"""Time in seconds between two checks for small processes that were stopped, because SIGSTOP causes no event."""
_MODULE = "-m"


@dataclass(frozen=True, slots=True)
class Order:
    """Arguments and environment of a rank, as `hyperpodrun` has passed them to the rank's small process."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    umask: int
    cpus: list[int]
    output: list[int]
    """File descriptors for standard input, output and error of the rank."""

    @classmethod
    def read(cls, line: socket.socket) -> Order:
        """Read an order from a connection to a small process.

        Raises:
            OSError: the connection ended, or the order did not arrive in time.
            ValueError: the message is not an order, or comes from a process of another user.
        """
        _, uid = place.peer_of(line)
        if uid != os.getuid():
            raise ValueError(f"user {uid} requests a process of user {os.getuid()}")
        line.settimeout(_ORDER_S)
        head, output, _, _ = socket.recv_fds(line, 4, 3)
        try:
            head += place.exactly(line, 4 - len(head))
            fields = place.parse(place.exactly(line, place.length_of(head)))
            if len(output) != 3 or not _fits(fields):
                raise ValueError("an order lacks a field, or has a wrong one")
        except BaseException:
            for descriptor in output:
                os.close(descriptor)
            raise
        line.settimeout(None)
        known = {key: fields[key] for key in ("argv", "env", "cwd", "umask", "cpus")}
        return cls(**known, output=list(output))


def _fits(fields: dict[str, Any]) -> bool:
    argv, env, cpus = fields.get("argv"), fields.get("env"), fields.get("cpus")
    return (
        isinstance(argv, list)
        and len(argv) > 0
        and all(isinstance(word, str) for word in argv)
        and isinstance(env, dict)
        and all(isinstance(value, str) for value in env.values())
        and isinstance(fields.get("cwd"), str)
        and isinstance(fields.get("umask"), int)
        and isinstance(cpus, list)
        and all(isinstance(cpu, int) for cpu in cpus)
    )


class Server:
    """The fork server of one launcher. Forks ranks, and watches them and their small processes."""

    def __init__(self, listener: socket.socket, launcher: int) -> None:
        self._events = selectors.DefaultSelector()
        self._ranks: dict[int, int] = {}
        """Process id of each rank's small process, by the rank's process id."""
        self._ended = False
        self._events.register(os.pidfd_open(launcher), selectors.EVENT_READ, self._launcher_ended)
        self._events.register(listener, selectors.EVENT_READ, functools.partial(self._accept, listener))

    def serve(self) -> Order | None:
        """Serve until the launcher has ended, and return None; in a forked rank, return the order for this rank."""
        while not self._ended:
            for key, _ in self._events.select(_LOOK_S if self._ranks else None):
                if self._ended or self._events.get_map().get(key.fd) is not key:
                    continue  # skip this event, because an earlier event has closed the connection
                if (order := key.data()) is not None:
                    return order  # type: ignore[no-any-return]
            self._stop_with_fronts()
            self._reap()
        return None

    def _stop_with_fronts(self) -> None:
        for pid, front in self._ranks.items():
            # also check the rank: its small process passes SIGCONT on, and may be stopped again before the check
            if _is_stopped(front) and not _is_stopped(pid):
                os.kill(pid, signal.SIGSTOP)

    def _reap(self) -> None:
        """Reap processes that ranks have left behind and that have ended."""
        for pid in set(children(os.getpid())) - self._ranks.keys():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def _launcher_ended(self) -> None:
        self._ended = True
        kill_descendants(os.getpid())

    def _accept(self, listener: socket.socket) -> Order | None:
        try:
            line, _ = listener.accept()
        except OSError:  # the client is gone, or no descriptor is free: a waiting client is accepted later
            return None
        try:
            order = Order.read(line)
            return order if self._fork(order, line) == 0 else None
        except (OSError, ValueError) as error:  # the error concerns only this rank
            with contextlib.suppress(OSError):
                place.send(line, {"error": f"{type(error).__name__}: {error}"})
            line.close()
            return None

    def _fork(self, order: Order, line: socket.socket) -> int:
        """Fork a rank. Returns the rank's process id, and 0 in the rank itself.

        Raises:
            OSError: no process id or descriptor is left.
        """
        server, handle = os.getpid(), -1
        try:
            if (pid := os.fork()) == 0:
                os.setsid()
                die_with_parent(server)
                self._forget()
                line.close()
                return 0
            try:
                handle = os.pidfd_open(pid)
            except OSError:
                os.kill(pid, signal.SIGKILL)
                raise
        finally:
            if os.getpid() == server:
                for descriptor in order.output:
                    os.close(descriptor)
        self._ranks[pid] = place.peer_of(line)[0]
        self._events.register(handle, selectors.EVENT_READ, functools.partial(self._rank_ended, pid, handle, line))
        self._events.register(line, selectors.EVENT_READ, functools.partial(self._from_front, pid, line))
        with contextlib.suppress(OSError):  # the client is gone, which the next event will show
            place.send(line, {"pid": pid})
        return pid

    def _rank_ended(self, pid: int, handle: int, line: socket.socket) -> None:
        kill_group(pid)  # also kill the rank's children, before `waitpid` frees its process id
        _, status = os.waitpid(pid, 0)
        del self._ranks[pid]
        self._events.unregister(handle)
        os.close(handle)
        if line in self._events.get_map():
            self._events.unregister(line)
            with contextlib.suppress(OSError):
                place.send(line, {"status": status})
        line.close()

    def _from_front(self, pid: int, line: socket.socket) -> None:
        try:
            signals = line.recv(64)
        except OSError:
            signals = b""
        if not signals:
            self._events.unregister(line)
            kill_group(pid)
        for signum in signals:
            if signum in signal.valid_signals():
                os.kill(pid, signum)  # the process exists until `waitpid`, at least as a zombie

    def _forget(self) -> None:
        """In a forked rank, close the server's file descriptors."""
        for key in list(self._events.get_map().values()):
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
            else:
                key.fileobj.close()  # type: ignore[attr-defined]
        self._events.close()


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False  # the process has ended; the event of its connection will show that


def main() -> None:
    listening, launcher, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher; this process ends with the launcher
    become_subreaper()
    import_all()
    server = Server(socket.socket(fileno=listening), launcher)
    order = server.serve()
    if order is None:
        Path(path).unlink(missing_ok=True)
        Path(f"{path}.lock").unlink(missing_ok=True)
        os._exit(0)
    _become(order, launcher)
    _run(order.argv)


def import_all() -> None:
    """Import the modules that ranks need, and the modules that the job lists in `restart.preload`.

    Raises:
        SystemExit: a module cannot be imported before forking. The error message contains the reason.
    """
    from hyperpod_ext.config.job.runtime import ENV_RUNTIME, RuntimeConfig
    from hyperpod_ext.runtime.agent.fork_server import preload

    text = os.environ.get(ENV_RUNTIME)
    preloaded = preload(RuntimeConfig.from_json(text).restart.preload if text else ())
    if "error" in preloaded:
        sys.exit(f"hyperpod_ext: no processes can be forked: {preloaded['error']}")


def _become(order: Order, launcher: int) -> None:
    """Prepare this forked process to run the script, as if `hyperpodrun` had started it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for target, descriptor in enumerate(order.output):
        os.dup2(descriptor, target)
    for descriptor in order.output:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(order.env)
    os.environ[place.ENV_LAUNCHER] = str(launcher)
    os.umask(order.umask)
    os.sched_setaffinity(0, order.cpus)
    os.chdir(order.cwd)
    tempfile.tempdir = None  # read TMPDIR again, which may differ in the rank
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]  # as `python -u` does


def _run(argv: list[str]) -> None:
    """Run the script or module as Python would. If no such script or module exists, run Python itself, which reports
    the error."""
    sys.excepthook = _say
    if argv[0] == _MODULE and len(argv) > 1:
        sys.argv, sys.path[0] = argv[1:], os.getcwd()  # noqa: PTH109
        if _is_module(argv[1]):
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
            return
    elif Path(argv[0]).is_file() and os.access(argv[0], os.R_OK):
        path = str(Path.cwd() / argv[0])
        sys.argv, sys.path[0] = argv, str(Path(argv[0]).resolve().parent)
        main = sys.modules["__main__"] = ModuleType("__main__")
        loader = SourceFileLoader("__main__", path)
        vars(main).update(__file__=path, __loader__=loader, __builtins__=builtins, __cached__=None)
        exec(loader.source_to_code(loader.get_data(path), path), vars(main))
        return
    os.execv(sys.executable, [sys.executable, "-u", *argv])


def _is_module(name: str) -> bool:
    try:
        found = find_spec(name)
        return found is not None and (
            found.submodule_search_locations is None or find_spec(f"{name}.__main__") is not None
        )
    except (ImportError, ValueError):
        return False


def _say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception as Python does. The traceback begins at the script's first frame."""
    own = trace
    while own is not None and own.tb_frame.f_code is not _run.__code__:
        own = own.tb_next
    if own is not None:
        trace = own.tb_next
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith("<frozen "):
            trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    main()
