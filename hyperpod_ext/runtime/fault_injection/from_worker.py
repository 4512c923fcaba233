"""Faults that a worker injects. Each fault is for one rank, one step, and one phase of the step.

A fault is set in the job's spec (`chaos.inject`), in the variable HPX_CHAOS, or by `hp-ext chaos` while the job runs.
If no fault is set, a step does not check for faults.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from hyperpod_ext.config.fault_injection import InjectedFault, parse_injected
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.detection.heartbeat import Phase
from hyperpod_ext.runtime.fault_injection.orders import injected_folder, read_orders, take
from hyperpod_ext.runtime.ipc.environment import ENV_CHAOS, ENV_RUN_DIR

_COSTS_MONEY = {
    "KUBERNETES_SERVICE_HOST": "Kubernetes",
    "SM_TRAINING_ENV": "SageMaker",
    "TRAINING_JOB_NAME": "SageMaker",
}
"""Environment variables that exist on platforms where machines cost money, with the platform's name."""
_OOM_STEP = 64 << 20
_FOREVER_S = 1 << 20


class InjectedError(RuntimeError):
    """An exception that a fault injection has raised."""


class InjectionTarget(Protocol):
    """The parts of a training run that injected faults change or report to."""

    def event(self, event: str, **fields: Any) -> None: ...

    def snapshots(self) -> tuple[memoryview, int, int] | None:
        """Return (memory of this rank's snapshot slots, bytes per slot, used bytes per slot); None if there are no
        slots."""

    def first_parameter(self) -> torch.Tensor | None: ...


class Injector:
    """Injects the faults that are set for one rank.

    Each fault is injected once per job, in the first process that reaches the fault's step and phase."""

    def __init__(self, faults: Iterable[InjectedFault], rank: int, run_dir: Path, target: InjectionTarget) -> None:
        self._rank, self._run_dir, self._target = rank, run_dir, target
        spent = injected_folder(run_dir)
        self._armed = {
            name: fault
            for name, fault in ((_name(index, fault), fault) for index, fault in enumerate(faults))
            if fault.rank == rank and not (spent / name).exists()
        }
        self._slow: tuple[InjectedFault, int] | None = None
        self._has_orders: Callable[[], bool] = lambda: False

    def __bool__(self) -> bool:
        return bool(self._armed)

    def obey(self, has_orders: Callable[[], bool]) -> None:
        """Read new orders now, and again whenever `has_orders` returns true."""
        self._has_orders = has_orders
        self._read_orders()

    def at(self, phase: Phase, step: int) -> None:
        """Inject the faults that are due in `phase` of `step`, and report the faults whose step has passed."""
        if self._has_orders():
            self._read_orders()
        if self._slow is not None:
            fault, until = self._slow
            if step >= until:
                self._slow = None
            else:
                time.sleep(fault.seconds)
        for name, fault in list(self._armed.items()):
            missed = fault.step is not None and fault.step < step
            if not missed and not is_due(fault, phase, step):
                continue
            del self._armed[name]
            if not take(self._run_dir, name):
                continue
            if missed:
                self._target.event("fault_missed", rank=self._rank, kind=fault.kind, step=fault.step, at=step)
            else:
                self._inject(fault, phase, step)

    def _read_orders(self) -> None:
        for name, fault in read_orders(self._run_dir).items():
            if isinstance(fault, InjectedFault) and fault.rank == self._rank:
                self._armed[name] = fault

    def _inject(self, fault: InjectedFault, phase: Phase, step: int) -> None:
        self._target.event("injected", rank=self._rank, kind=fault.kind, step=step, phase=phase.word)
        where = f"in {phase.word} of step {step}"
        match fault.kind:
            case "exception":
                raise InjectedError(f"an injected exception {where}")
            case "sigkill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "sigsegv":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "hang":
                _hang(fault.how)
            case "slow":
                self._slow = (fault, step + fault.steps)
            case "oom":
                _run_out_of_memory()
            case "cut-network":
                _shut_connections()
            case "corrupt-memory":
                self._corrupt_snapshots()
            case "corrupt-weights":
                parameter = self._target.first_parameter()
                if parameter is not None:
                    _flip_a_bit(parameter)

    def _corrupt_snapshots(self) -> None:
        found = self._target.snapshots()
        if found is None:
            return
        memory, slot_bytes, used = found
        for start in range(0, len(memory), slot_bytes):
            memory[start + used // 2] ^= 1


def armed_faults(config: RuntimeConfig, environ: Mapping[str, str] = os.environ) -> tuple[InjectedFault, ...]:
    """Return the faults in the spec and in HPX_CHAOS. HPX_CHAOS=off turns all faults off.

    Raises:
        JobFailedError: HPX_CHAOS is invalid, or machines cost money on this platform and the spec does not allow faults
            there (`chaos.on_clusters`).
    """
    text = environ.get(ENV_CHAOS, "")
    if text.strip() == "off":
        return ()
    try:
        armed = parse_injected(text)
    except ValueError as error:
        raise JobFailedError(f"{ENV_CHAOS}: {error}", hint="docs/faults.md has the grammar.") from None
    armed = (*(config.chaos.inject if config.chaos else ()), *armed)
    place = next((place for name, place in _COSTS_MONEY.items() if name in environ), None)
    if armed and place and not (config.chaos and config.chaos.on_clusters):
        raise JobFailedError(
            f"faults are to be injected, but the job runs on {place}, where machines cost money",
            hint="To allow it, write chaos.on_clusters: true in the spec. Otherwise remove chaos from the spec, and "
            f"unset {ENV_CHAOS}.",
        )
    return armed


def run_dir_of(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the job's run directory, which the agent has chosen."""
    return Path(environ.get(ENV_RUN_DIR, "hpx-run"))


def is_due(fault: InjectedFault, phase: Phase, step: int) -> bool:
    """Return whether `fault` is due for a rank that is now in `phase` of `step`."""
    if fault.step is not None and fault.step != step:
        return False
    if fault.phase is not None:
        return fault.phase == phase.word
    return phase is Phase.DATA if fault.step is not None else True


def _name(index: int, fault: InjectedFault) -> str:
    return f"{index}-{re.sub(r'[^a-z0-9.-]+', '-', str(fault).lower())}"


def _hang(how: str) -> None:
    match how:
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "deadlock":
            lock = threading.Lock()
            with lock:
                lock.acquire()
        case "loop":
            while True:
                pass
        case "gil":
            sleep = ctypes.PyDLL(None).sleep  # PyDLL keeps the GIL during the call; CDLL would release it
            while True:
                sleep(_FOREVER_S)


def _run_out_of_memory() -> None:
    """Allocate more memory than this process may have.

    The memory limit of this process is lowered first, so that no other process is affected."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _OOM_STEP, hard))
    try:
        torch.empty(8 * _OOM_STEP, dtype=torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _shut_connections() -> None:
    """Shut down every TCP connection of this process, in both directions. Listening sockets stay open."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  (names only)
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # the descriptor of `listdir` is closed already
        with connection:
            is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
            if is_tcp and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # the peer has already disconnected


def _flip_a_bit(parameter: torch.Tensor) -> None:
    local = getattr(parameter, "_local_tensor", parameter).detach()
    first = local.view(-1)[:1].view(torch.uint8)
    first[-2:-1].bitwise_xor_(16)  # flip a high bit of the mantissa, which no rounding hides
