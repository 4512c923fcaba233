"""A process from the fork server of `hyperpodrun` is to its launcher what the script's own would be; here we launch."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_S, until

from hyperpod_ext.processes import is_alive
from hyperpod_ext.runtime.prefork import place, server

FRONT = [sys.executable, "-u", "-m", "hyperpod_ext.runtime.prefork"]
SHOWS = """\
import json, os, sys
print(json.dumps([sys.argv, os.environ["WORD"], os.getcwd(), sys.stdin.read(), sys.path[0], __name__]))
print("an error", file=sys.stderr)
sys.exit(3)
"""
WAITS = """\
import os, signal, subprocess, sys
def told(*_):
    print("told", flush=True)
    sys.exit(7)
signal.signal(signal.SIGUSR1, told)
child = subprocess.Popen(["sleep", "1000"])
print(os.getpid(), os.getppid(), child.pid, "hyperpod_ext.runtime.prefork.place" in sys.modules, flush=True)
while True:
    signal.pause()
"""


SERVER = """\
from hyperpod_ext.runtime.prefork import server
server.import_all = lambda: None  # what is tried here needs none of it
server.main()
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the socket of a fork server lies, which has not imported what ranks need."""
    folder = tmp_path_factory.mktemp("p")
    folder.chmod(0o700)
    path = place.socket_in(str(folder), os.getpid())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        command = [sys.executable, "-c", SERVER, str(listener.fileno()), str(os.getpid()), path]
        server = subprocess.Popen(command, pass_fds=[listener.fileno()], start_new_session=True)
    yield folder
    server.kill()
    server.wait()


@pytest.fixture
def own_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One where no fork server is."""
    folder = tmp_path_factory.mktemp("o")
    folder.chmod(0o700)
    return folder


@pytest.fixture
def environ(directory: Path) -> dict[str, str]:
    return {**os.environ, place.ENV_DIRECTORY: str(directory)}


def _connected(directory: Path) -> socket.socket:
    line = place.connect(place.socket_in(str(directory), os.getpid()))
    assert line is not None
    return line


def _waiting(tmp_path: Path, environ: dict[str, str]) -> tuple[subprocess.Popen[str], list[int]]:
    """A rank that waits: its small process, and its own id, its parent's and its child's."""
    (tmp_path / "waits.py").write_text(WAITS)
    command = [*FRONT, str(tmp_path / "waits.py")]
    front = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert front.stdout is not None
    *pids, imported = front.stdout.readline().split()
    assert imported == "True", "it is a process with its imports done"
    return front, [int(pid) for pid in pids]


def _gone(*pids: int) -> None:
    until(lambda: not any(is_alive(pid) for pid in pids), f"one of {pids} lives on")


def test_the_script_finds_what_it_would_find_and_ends_as_it_would(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "lib").mkdir()
    script = tmp_path / "lib" / "shows.py"
    script.write_text(SHOWS)

    def seen(*command: str) -> tuple[int, Any, str]:
        env = {**environ, "WORD": "of \udc80 this"}
        done = subprocess.run(command, env=env, cwd=tmp_path, input="some input", capture_output=True, text=True)
        return done.returncode, json.loads(done.stdout), done.stderr

    assert seen(*FRONT, "lib/shows.py", "--a", "b $c") == seen(sys.executable, "-u", "lib/shows.py", "--a", "b $c")


@pytest.mark.parametrize(
    "argv",
    [
        ("-m", "package.shows", "--a"),
        ("-m", "package", "--a"),
        ("-m", "package.nothing"),
        ("-m", "other.shows"),
        ("-m",),
        ("nothing.py",),
        ("package",),
        ("raises.py",),
        ("no_python.py",),
    ],
    ids=" ".join,
)
def test_what_python_would_run_or_say(argv: tuple[str, ...], tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "package").mkdir()
    for name in ("shows.py", "__main__.py"):
        (tmp_path / "package" / name).write_text(SHOWS)
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "raises.py").write_text("def f():\n    raise KeyError('a')\n\nf()\n")
    (tmp_path / "no_python.py").write_text("a b c\n")

    def seen(*command: str) -> tuple[int, str, str]:
        env = environ | {"WORD": "a"}
        done = subprocess.run([*command, *argv], env=env, cwd=tmp_path, input="b", capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    assert seen(*FRONT) == seen(sys.executable, "-u")


def test_a_rank_stops_and_goes_on_with_its_small_process(tmp_path: Path, environ: dict[str, str]) -> None:
    front, (rank, _, _) = _waiting(tmp_path, environ)

    def stopped() -> bool:
        return Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    for _ in range(2):
        front.send_signal(signal.SIGSTOP)
        until(stopped, "the rank is not stopped")
        # as when the small process handed SIGCONT on, and is stopped anew before the fork server looks
        os.kill(rank, signal.SIGCONT)
        until(stopped, "the rank goes on while its small process is stopped")
        front.send_signal(signal.SIGCONT)
        until(lambda: not stopped(), "the rank does not go on")
    front.kill()
    front.wait()
    _gone(rank)


SHARES = """\
import os
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
held = SharedMemory(create=True, size=4096)
while b"resource_tracker" not in open(f"/proc/{resource_tracker._resource_tracker._pid}/cmdline", "rb").read():
    pass  # whoever is to remove it begins
print(held.name, flush=True)
os.kill(os.getpid(), 9)
"""


def test_shared_memory_of_a_killed_rank_is_removed(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "shares.py").write_text(SHARES)
    done = subprocess.run([*FRONT, str(tmp_path / "shares.py")], env=environ, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    until(lambda: not Path(f"/dev/shm/{done.stdout.strip()}").exists(), "it is left")


def test_a_signal_goes_on_to_the_rank(tmp_path: Path, environ: dict[str, str]) -> None:
    front, (rank, _, child) = _waiting(tmp_path, environ)
    front.send_signal(signal.SIGUSR1)
    said, _ = front.communicate()
    assert (said, front.returncode) == ("told\n", 7)
    _gone(rank, child)


def test_a_killed_rank_is_a_killed_process_to_the_launcher(tmp_path: Path, environ: dict[str, str]) -> None:
    front, (rank, _, child) = _waiting(tmp_path, environ)
    os.kill(rank, signal.SIGKILL)
    assert front.wait() == -signal.SIGKILL
    _gone(child)


def test_a_rank_whose_small_process_is_killed_leaves_nothing(tmp_path: Path, environ: dict[str, str]) -> None:
    (front, (rank, server, child)), (other, others) = _waiting(tmp_path, environ), _waiting(tmp_path, environ)
    assert others[1] == server, "one for all of a launcher"
    os.killpg(front.pid, signal.SIGKILL)
    _gone(rank, child)
    assert is_alive(others[0])
    os.killpg(other.pid, signal.SIGTERM)
    assert other.wait() == -signal.SIGTERM


ORDER = {"argv": ["x.py"], "env": {}, "cwd": "/", "umask": 0, "cpus": [0]}


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ((place.MOST + 1).to_bytes(4, "big"), "more than"),
        (b"\0\0\0\2[]", "instead of a message"),
        (b"\0\0\0\1x", "JSONDecodeError"),
        (b"\0\0\0\2{}", "lacks a field"),
        *(
            (len(body).to_bytes(4, "big") + body, "lacks a field")
            for key, value in {"argv": [], "env": {"A": 1}, "cwd": 1, "umask": "0", "cpus": ["0"]}.items()
            for body in [json.dumps(ORDER | {key: value}).encode()]
        ),
    ],
)
def test_what_is_no_order_is_refused_in_words(sent: bytes, words: str, directory: Path) -> None:
    with _connected(directory) as line:
        # at once: what is refused by its first four bytes may be answered, and hung up on, before more is sent
        assert socket.send_fds(line, [sent], [0, 1, 2]) == len(sent)
        assert words in place.receive(line)["error"]


def test_a_directory_that_others_can_enter_is_not_used(tmp_path: Path, environ: dict[str, str]) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "says.py").write_text("print('it ran')")
    command = [*FRONT, str(tmp_path / "says.py")]
    env = environ | {place.ENV_DIRECTORY: str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "it ran\n"
    assert f"{tmp_path} is not a directory of this user alone" in done.stderr


def test_a_rank_that_ends_as_it_is_signalled_ends_no_other(
    directory: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    """The launcher ends all ranks when one fails, and others may fail at that moment."""
    front, (other, server, _) = _waiting(tmp_path, environ)
    with _connected(directory) as line:
        rank = _ordered(line, tmp_path / "waits.py", environ)
        os.kill(server, signal.SIGSTOP)  # so that it finds both at once
        os.kill(rank, signal.SIGKILL)
        _gone(rank)
        line.send(bytes([signal.SIGTERM]))
        os.kill(server, signal.SIGCONT)
        assert os.WTERMSIG(place.receive(line)["status"]) == signal.SIGKILL
    front.send_signal(signal.SIGUSR1)
    assert front.wait() == 7
    _gone(rank, other)


def _ordered(line: socket.socket, script: Path, environ: dict[str, str]) -> int:
    """A rank whose small process we are."""
    cpus = sorted(os.sched_getaffinity(0))
    order = {"argv": [str(script)], "env": environ, "cwd": "/", "umask": 0o22, "cpus": cpus}
    body = json.dumps(order).encode()
    with open(os.devnull, "r+b") as nothing:  # noqa: PTH123
        socket.send_fds(line, [len(body).to_bytes(4, "big")], [nothing.fileno()] * 3)
    line.sendall(body)
    return int(place.receive(line)["pid"])


def test_where_nothing_can_be_forked_the_others_live_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        pool = server.Server(listener, os.getpid())
        line = place.connect(str(tmp_path / "socket"))
        assert line is not None
        line.settimeout(PATIENCE_S)
        before = len(list(Path("/proc/self/fd").iterdir()))
        monkeypatch.setattr(os, "fork", _no_process_left)
        with ThreadPoolExecutor() as threads:
            asking = threads.submit(_ordered, line, tmp_path / "x.py", {})
            assert pool._accept(listener) is None
            with pytest.raises(KeyError):  # the answer has an error in the place of a process
                asking.result()
        assert len(list(Path("/proc/self/fd").iterdir())) == before, "what came with the order is closed"
        line.close()


def _no_process_left() -> int:
    raise BlockingIOError("no process left")


@pytest.mark.thorough
def test_the_fork_servers_end_is_the_ranks_and_the_next_starts_another(tmp_path: Path, environ: dict[str, str]) -> None:
    front, (rank, server, child) = _waiting(tmp_path, environ)
    os.kill(server, signal.SIGKILL)
    assert front.wait() == 1
    _gone(rank, child)
    front, (rank, another, child) = _waiting(tmp_path, environ)
    assert another != server
    front.kill()
    _gone(rank, child)  # both at once, and nobody would end what the rank has forked
    os.kill(another, signal.SIGKILL)
    _gone(another)


@pytest.mark.thorough
def test_nothing_outlives_the_launcher(tmp_path: Path, environ: dict[str, str], own_directory: Path) -> None:
    environ |= {place.ENV_DIRECTORY: str(own_directory)}
    (tmp_path / "waits.py").write_text(WAITS)
    launches = f"import subprocess; subprocess.run({[*FRONT, str(tmp_path / 'waits.py')]})"
    launcher = subprocess.Popen([sys.executable, "-c", launches], env=environ, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    rank, server, child, _ = launcher.stdout.readline().split()
    launcher.kill()
    launcher.wait()
    _gone(int(rank), int(server), int(child))
    assert list(own_directory.iterdir()) == []


def test_the_small_process_imports_nothing_heavy() -> None:
    code = "import hyperpod_ext.runtime.prefork.__main__, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"torch", "pydantic", "numpy", "asyncio", "subprocess", "pathlib"} & set(loaded) <= {"pathlib"}


def test_the_directory_is_that_of_the_other_sockets() -> None:
    from hyperpod_ext.runtime.ipc.environment import ENV_SOCKET_DIR

    assert place.ENV_DIRECTORY == ENV_SOCKET_DIR
