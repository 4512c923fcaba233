"""Finds a job's memory server on this node, or starts one.

The memory server runs in its own session (`setsid`), so that it outlives the training processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ext.config.job.runtime import ENV_RUNTIME, RuntimeConfig
from hyperpod_ext.errors import HyperpodExtError, UnreachableError
from hyperpod_ext.files import write_atomically
from hyperpod_ext.runtime.ipc.environment import ENV_SECRET_FILE, ENV_SOCKET_DIR
from hyperpod_ext.runtime.memory_server.client.client import MemoryClient
from hyperpod_ext.runtime.memory_server.protocol.requests import SERVER_START_S, Handshake
from hyperpod_ext.user_folders import state_folder

EVENTS = ".events"
_LONGEST_SOCKET = 107  # the kernel's limit for the path of a Unix socket, in bytes


def runtime_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory for this user's sockets, which other users cannot access. Creates the directory if it does
    not exist.

    Raises:
        HyperpodExtError: the directory belongs to another user, or another user can access it.
    """
    found = environ.get(ENV_SOCKET_DIR)
    path = Path(found) if found else Path(tempfile.gettempdir()) / f"hyperpod_ext-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    known = path.lstat()
    if not stat.S_ISDIR(known.st_mode) or known.st_uid != os.getuid() or known.st_mode & 0o077:
        raise HyperpodExtError(
            f"{path} is not a directory of this user alone, so no socket is created there",
            hint=f"Remove {path}, or set {ENV_SOCKET_DIR} to another directory.",
        )
    return path


def place_of(directory: Path) -> str:
    """Return an identifier of this machine and of `directory`. Two containers get the same identifier only if they
    share the directory."""
    known = directory.stat()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{known.st_dev}-{known.st_ino}"


@dataclass(frozen=True, slots=True)
class ServerFiles:
    """The files in the socket directory that belong to one node of one job.

    `index` distinguishes nodes that share a machine, as in a rehearsal. If each node has its own machine, `index` is 0.
    """

    directory: Path
    job: str
    index: int

    def _file(self, suffix: str) -> Path:
        path = self.directory / f"{self.job}.{self.index}.{suffix}"
        if len(os.fsencode(path)) > _LONGEST_SOCKET:
            raise HyperpodExtError(f"{path} is too long for a socket", hint=f"Set {ENV_SOCKET_DIR} to a shorter path.")
        return path

    @property
    def socket(self) -> Path:
        return self._file("socket")

    @property
    def lock(self) -> Path:
        return self._file("lock")

    @property
    def events(self) -> Path:
        """Directory to which the node's processes write events in a job without our agent, and from which the memory
        server uploads the events."""
        return self.socket.with_suffix(EVENTS)

    @property
    def log(self) -> Path:
        return self._file("log")


def secret_file_of(job: str, environ: Mapping[str, str] = os.environ, *, durable: bool = False) -> Path:
    """Return the file with the job's secret on this machine. Creates the file if it does not exist.

    The file is in the user's state folder, which survives a reboot, because durable checkpoints cannot be read without
    the secret. If the user has no state folder and the job has no durable checkpoints, the file is next to the memory
    server's socket.

    Raises:
        HyperpodExtError: the user has no state folder, but the job has durable checkpoints.
    """
    try:
        return _secret_in(state_folder(environ) / "hyperpod_ext" / "secrets", job)
    except (OSError, HyperpodExtError) as error:
        if not durable:
            return _secret_in(runtime_dir(environ) / "secrets", job)
        why = str(error).partition("\n")[0]
        raise HyperpodExtError(
            f"the secret of job {job}, which its durable checkpoints need, cannot be kept on this machine: {why}",
            hint=f"Put at least 16 random bytes into a file of mode 600 and set {ENV_SECRET_FILE} to its path; or set "
            "XDG_STATE_HOME to a folder that this user can write to.",
        ) from error


def _secret_in(directory: Path, job: str) -> Path:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / job
    partial = directory / f".{job}.{secrets.token_hex(8)}"
    if not path.exists():
        write_atomically(partial, secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)  # a hard link never exposes half a file or replaces an existing file
        partial.unlink()
    return path


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file inside the `with` block. The lock is also released when the process ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def start_server(
    place: ServerFiles, config: RuntimeConfig, node: int, secret_file: Path, idle_exit_s: float
) -> MemoryClient:
    """Return a connection to the node's memory server. Starts the server if it does not run.

    Raises:
        UnreachableError: the server does not start; the error's message contains the end of the server's output.
    """
    # the lock keeps an idle server from ending before it has accepted our connection
    with locked(place.lock):
        client = _connect(place.socket) or _start(place, config, node, secret_file, idle_exit_s)
        client.ask(Handshake())
        return client


def _connect(path: Path) -> MemoryClient | None:
    try:
        return MemoryClient(str(path))
    except OSError:
        return None


def _start(place: ServerFiles, config: RuntimeConfig, node: int, secret_file: Path, idle_exit_s: float) -> MemoryClient:
    # a killed server may have left its socket file; the caller's lock keeps other processes from starting a server now
    place.socket.unlink(missing_ok=True)
    command = [sys.executable, "-m", "hyperpod_ext.runtime.memory_server", "--socket", str(place.socket)]
    command += ["--node", str(node), "--lock", str(place.lock), "--idle-exit-s", str(idle_exit_s)]
    environ = {**os.environ, ENV_RUNTIME: config.model_dump_json(), ENV_SECRET_FILE: str(secret_file)}
    log = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    finally:
        os.close(log)
    deadline = time.monotonic() + SERVER_START_S
    while (client := _connect(place.socket)) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            output = place.log.read_text(errors="replace").strip().splitlines()[-5:]
            raise UnreachableError("the memory server does not start:\n" + "\n".join(output), hint=f"See {place.log}.")
        time.sleep(0.02)
    process.returncode = 0  # prevents Popen's warning that the server is still running
    return client
