"""Find a job's memory server on this node, or start it.

The server has its own session, so that it outlives the training processes.
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
from hyperpod_ext.runtime.memory_server.protocol.requests import Handshake
from hyperpod_ext.user_folders import state_folder

EVENTS = ".events"
_START_S = 60.0
_LONGEST_SOCKET = 107  # bytes; the kernel's limit


def runtime_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of this user's sockets, inaccessible to other users; make it if it is missing.

    Raises:
        HyperpodExtError: the directory belongs to or is accessible by another user.
    """
    found = environ.get(ENV_SOCKET_DIR)
    path = Path(found) if found else Path(tempfile.gettempdir()) / f"hyperpod_ext-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    known = path.lstat()
    if not stat.S_ISDIR(known.st_mode) or known.st_uid != os.getuid() or known.st_mode & 0o077:
        raise HyperpodExtError(
            f"{path} is not a directory of this user alone, so no socket is put there",
            hint=f"Remove it, or name another directory in {ENV_SOCKET_DIR}.",
        )
    return path


def place_of(directory: Path) -> str:
    """Return an identifier of the machine and the directory: different for containers that do not share it."""
    known = directory.stat()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{known.st_dev}-{known.st_ino}"


@dataclass(frozen=True, slots=True)
class ServerFiles:
    """Files of one node of one job.

    `index` is different for nodes on the same machine, as in a rehearsal. It is 0 for a node with its own machine, also
    if torchrun changes the node's number.
    """

    directory: Path
    job: str
    index: int

    def _file(self, suffix: str) -> Path:
        path = self.directory / f"{self.job}.{self.index}.{suffix}"
        if len(os.fsencode(path)) > _LONGEST_SOCKET:
            raise HyperpodExtError(f"{path} is too long for a socket", hint=f"Name a short one in {ENV_SOCKET_DIR}.")
        return path

    @property
    def socket(self) -> Path:
        return self._file("socket")

    @property
    def lock(self) -> Path:
        return self._file("lock")

    @property
    def events(self) -> Path:
        """Directory of the node's events in a job without our agent. The memory server uploads them."""
        return self.socket.with_suffix(EVENTS)

    @property
    def log(self) -> Path:
        return self._file("log")


def secret_file_of(job: str, environ: Mapping[str, str] = os.environ, *, durable: bool = False) -> Path:
    """Return the file of the job's secret on this machine; make it if it is missing.

    The file is in the user's state folder, because the secret must survive a reboot like the durable copies that need
    it. For a job without durable copies it is next to the socket if the user has no state folder.

    Raises:
        HyperpodExtError: there is no state folder, and the job has durable copies.
    """
    try:
        return _secret_in(state_folder(environ) / "hyperpod_ext" / "secrets", job)
    except (OSError, HyperpodExtError) as error:
        if not durable:
            return _secret_in(runtime_dir(environ) / "secrets", job)
        why = str(error).partition("\n")[0]
        raise HyperpodExtError(
            f"the secret of job {job}, which its durable checkpoints need, cannot be kept on this machine: {why}",
            hint=f"Put at least 16 random bytes into a file of mode 600 and name it in {ENV_SECRET_FILE}; or set "
            "XDG_STATE_HOME to a folder that this user can write to.",
        ) from error


def _secret_in(directory: Path, job: str) -> Path:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / job
    partial = directory / f".{job}.{secrets.token_hex(8)}"
    if not path.exists():
        write_atomically(partial, secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)  # complete or absent, and never in place of another process's
        partial.unlink()
    return path


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file, which is released at the latest when the process ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def start_server(
    place: ServerFiles, config: RuntimeConfig, node: int, secret_file: Path, idle_exit_s: float
) -> MemoryClient:
    """Return a connection to the node's memory server; start the server if there is none.

    Raises:
        UnreachableError: the server does not start; with the end of its output.
    """
    with locked(place.lock):  # held until the server has our connection: an idle one could end at this moment
        client = _connect(place.socket) or _start(place, config, node, secret_file, idle_exit_s)
        client.ask(Handshake())
        return client


def _connect(path: Path) -> MemoryClient | None:
    try:
        return MemoryClient(str(path))
    except OSError:
        return None


def _start(place: ServerFiles, config: RuntimeConfig, node: int, secret_file: Path, idle_exit_s: float) -> MemoryClient:
    place.socket.unlink(missing_ok=True)  # of a killed server; the lock excludes one that is starting
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
    deadline = time.monotonic() + _START_S
    while (client := _connect(place.socket)) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            output = place.log.read_text(errors="replace").strip().splitlines()[-5:]
            raise UnreachableError("the memory server does not start:\n" + "\n".join(output), hint=f"See {place.log}.")
        time.sleep(0.02)
    process.returncode = 0  # keeps Popen from warning that the process was not waited for
    return client
