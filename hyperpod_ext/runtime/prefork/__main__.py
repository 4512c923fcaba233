"""The small process of a rank, which `hyperpodrun -m hyperpod_ext.runtime.prefork train.py ...` starts for each rank.

The small process imports no heavy modules. The small process requests a rank from its launcher's fork server, which the
first small process starts, and represents the rank to `hyperpodrun`. The small process passes signals on to the rank,
shares its output with the rank, and ends with the rank's exit status. If the small process is stopped or killed, the
fork server stops or kills the rank. If the fork server cannot fork a rank, the small process itself runs the script,
with all its imports.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import NoReturn

from hyperpod_ext.runtime.prefork import place

_FORWARDED = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGWINCH),
)


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: python -m hyperpod_ext.runtime.prefork {SCRIPT | -m MODULE} [ARGUMENT]...")
    try:
        server = _connect()
        _ask(server)
        answer = place.receive(server)
    except (OSError, ValueError) as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    if "pid" not in answer:
        _run_here(str(answer.get("error", "no answer")))
    _be(int(answer["pid"]), server)


def _connect() -> socket.socket:
    """Connect to the fork server of this process's launcher. Start the server if it is not running."""
    path = place.socket_of(os.getppid())
    if (server := place.connect(path)) is None:
        with place.locked(path):
            if (server := place.connect(path)) is None:  # no other process has started the server
                _start_server(path)
                server = place.connect(path)
    if server is None:
        raise ConnectionRefusedError(f"{path} does not answer")
    if place.peer_of(server)[1] != os.getuid():
        raise PermissionError(f"{path} is another user's")
    return server


def _start_server(path: str) -> None:
    """Start the fork server with a socket that listens already, so that clients can connect, and wait while the server
    imports."""
    import subprocess

    if os.path.lexists(path):  # a fork server that was killed may have left its socket
        os.unlink(path)  # noqa: PTH108  (pathlib would be one more import)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(1024)
        command = [sys.executable, "-m", "hyperpod_ext.runtime.prefork.server"]
        command += [str(listener.fileno()), str(os.getppid()), path]
        process = subprocess.Popen(
            command, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        process.returncode = 0  # do not wait for the server: it serves other workers, too


def _ask(server: socket.socket) -> None:
    order = {
        "argv": sys.argv[1:],
        "env": dict(os.environ),
        "cwd": os.getcwd(),  # noqa: PTH109
        "umask": _umask(),
        "cpus": sorted(os.sched_getaffinity(0)),
    }
    body = json.dumps(order).encode()  # json escapes invalid text, and the reader restores it
    socket.send_fds(server, [len(body).to_bytes(4, "big")], [0, 1, 2])
    server.sendall(body)


def _umask() -> int:
    found = os.umask(0o077)
    os.umask(found)
    return found


def _be(pid: int, server: socket.socket) -> NoReturn:
    """Represent the rank's process until it ends, and then end with its exit status."""
    import select

    # set_wakeup_fd makes Python write the number of each signal to the fork server's socket; a handler in Python cannot
    # send the number, because the handler does not run if the signal arrives just before a blocking call
    server.setblocking(False)
    signal.set_wakeup_fd(server.fileno(), warn_on_full_buffer=False)
    for signum in _FORWARDED:
        signal.signal(signum, lambda _signum, _frame: None)
    answers = select.poll()
    answers.register(server, select.POLLIN)
    answers.poll()
    signal.set_wakeup_fd(-1)
    server.setblocking(True)
    try:
        status = int(place.receive(server)["status"])
    except OSError:
        from hyperpod_ext.processes import kill_group

        kill_group(pid)  # the kernel killed the rank, but not the rank's children
        sys.exit("the fork server of this pod ended, and the process of this rank with it")
    if os.WIFSIGNALED(status):
        _end_by(os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def _end_by(signum: int) -> NoReturn:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # write no core dump, because the rank has already written one
    if signum not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
    os._exit(128 + signum)  # this line is reached only if the signal is blocked


def _run_here(why: str) -> NoReturn:
    sys.stderr.write(f"hyperpod_ext: no forked process ({why}): the script starts in a new process, with its imports\n")
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-u", *sys.argv[1:]])


if __name__ == "__main__":
    main()
