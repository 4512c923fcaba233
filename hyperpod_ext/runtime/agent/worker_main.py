"""Code of a forked worker process: prepares the process, runs the training script, and exits."""

from __future__ import annotations

import importlib
import multiprocessing.process
import os
import runpy
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, NoReturn

from hyperpod_ext.config.job.runtime import ENV_RUNTIME, RuntimeConfig
from hyperpod_ext.files import make_private_folder
from hyperpod_ext.processes import die_with_parent, wait_readable
from hyperpod_ext.runtime.detection.death_watch import LivenessLock
from hyperpod_ext.runtime.detection.failure_causes import one_line
from hyperpod_ext.runtime.detection.heartbeat import ENV_HEARTBEAT
from hyperpod_ext.runtime.ipc.environment import ENV_AGENT_SOCKET

SCRIPT_RAISED = 1


def main(order: dict[str, Any], agent_pid: int) -> NoReturn:
    """Run the training script as `__main__` in this process, then exit with the script's exit code. `close_inherited`
    must be called first.

    Args:
        order: dict with the keys `argv` (script and arguments), `env` (environment variables), `cwd` (working
            directory) and `log` (path of the log file).
    """
    code = SCRIPT_RAISED
    try:
        _become_worker(order, agent_pid)
        code = _run_script(order["argv"])
    except BaseException as error:
        traceback.print_exc()
        print(one_line(error), file=sys.stderr)  # noqa: T201  (the agent quotes the log's last line in its report)
    finally:
        try:
            _flush()
        finally:
            os._exit(code)  # skip exit handlers inherited from the fork server


def _flush() -> None:
    """Flush stdout and stderr, which the script may have closed or replaced."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except Exception as error:
            # an error (for example a full disk) must not fail the job
            os.write(2, f"the last output of the script was not written: {error}\n".encode())


def _become_worker(order: dict[str, Any], agent_pid: int) -> None:
    """Turn this forked process into a worker, with its own session, log and environment. Waits until the agent is the
    process's parent."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    leave_sigterm_to_the_agent()
    log = _open_log(Path(order["log"]))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(null)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # always a real file here
    wait_adopted(agent_pid)
    die_with_parent(agent_pid)
    os.environ.update(order["env"])
    heartbeat = Path(order["env"][ENV_HEARTBEAT])
    LivenessLock(heartbeat).hold()
    use_temporary_folder(temporary_folder(Path(os.environ[ENV_AGENT_SOCKET]).parent, os.getpid()))
    os.chdir(order["cwd"])


def _open_log(path: Path) -> int:
    """Open the rank's log, and return the file descriptor. If the log cannot be opened, for example because the disk is
    full, the rank trains without a log."""
    try:
        make_private_folder(path.parent)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        sys.stderr.write(f"hyperpod_ext: {path} cannot be opened, its output is lost: {error.strerror}\n")
        return os.open(os.devnull, os.O_WRONLY)


def close_inherited(kept: int = 2) -> None:
    """Close the file descriptors 3 to 63, which were inherited from the fork server, except `kept`. Must be called
    right after the fork, before this process opens any file."""
    os.closerange(3, min(kept, 64))
    os.closerange(kept + 1, 64)


def temporary_folder(socket_dir: Path, pid: int) -> Path:
    """Return the folder in which the `multiprocessing` module of worker `pid` creates its sockets. The agent removes
    the folder after the worker has ended."""
    return socket_dir / f"worker{pid}"


def use_temporary_folder(folder: Path) -> None:
    """Make the `multiprocessing` module use `folder`. The default folder of `multiprocessing`, in TMPDIR, would be left
    behind if the worker is killed. TMPDIR itself is not changed, because compiled kernels are cached in TMPDIR."""
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        # continue, because only scripts that use sockets of `multiprocessing` need the folder
        sys.stderr.write(f"hyperpod_ext: {folder} cannot be created: {error.strerror}\n")
        return
    multiprocessing.process.current_process()._config["tempdir"] = str(folder)  # type: ignore[attr-defined]


def leave_sigterm_to_the_agent() -> None:
    """Ignore SIGTERM in this process, unless the script sets its own handler. Slurm sends SIGTERM to all processes, but
    the agent alone handles the signal."""
    signal.signal(signal.SIGTERM, _left_to_the_agent)
    before = threading.local()

    def block() -> None:
        # block SIGTERM, so that no signal between the fork and `reset_child` is lost
        before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def restore() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before.mask)

    def reset_child() -> None:
        # SIGTERM must end the script's child processes, such as data loaders
        if signal.getsignal(signal.SIGTERM) is _left_to_the_agent:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        restore()

    os.register_at_fork(before=block, after_in_parent=restore, after_in_child=reset_child)


def _left_to_the_agent(_signum: int, _frame: object) -> None:
    pass


def wait_adopted(agent_pid: int) -> None:
    """Wait until the intermediate process of the double fork has ended, so that the agent is this process's parent.
    Without this wait, `die_with_parent` would watch the intermediate process."""
    parent = os.getppid()
    if parent == agent_pid:
        return
    try:
        handle = os.pidfd_open(parent)
    except ProcessLookupError:
        return
    wait_readable(handle)
    os.close(handle)


def _run_script(argv: list[str]) -> int:
    import torch

    # set the number of threads, because torch has read OMP_NUM_THREADS in the fork server, on import
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.argv = argv
    sys.path[0] = str(Path(argv[0]).resolve().parent)
    try:
        config = RuntimeConfig.from_json(os.environ[ENV_RUNTIME])
        # imported here to avoid an import cycle: the modules import the control planes, which import this package
        if config.compat is not None:
            importlib.import_module("hyperpod_ext.compat.import_names").install(config.compat)
        if config.restarts_script:
            importlib.import_module("hyperpod_ext.runtime.scripts.script").run_script(argv[0])
        else:
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)  # noqa: T201  (as Python does after sys.exit("text"))
        return 1
    return 0
