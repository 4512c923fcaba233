"""Checks the health of a node when the agent starts, and before a worker is restarted after a fault.

A check is a function that returns why the node is unhealthy, or None. The checks in this module have names. A job may
use checks of its own, as `module:function`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.detection import gpu_health

_MIB = 1 << 20
_ROOM = frozenset({"shared-memory", "disk"})
"""Names of the checks for free space, whose result may improve within seconds."""
_LOOK_AGAIN_S = 0.25


@dataclass(frozen=True, slots=True)
class HealthContext:
    """The input of every health check."""

    config: RuntimeConfig
    run_dir: Path
    address: str
    """Address at which other nodes reach this node."""
    shm: Path = Path("/dev/shm")
    net: Path = Path("/sys/class/net")
    begun: bool = False
    """Whether the job has trained already: false when the job starts, true for a process that replaces another."""


class HealthCheck(Protocol):
    """A health check, which must change nothing and must return soon."""

    def __call__(self, context: HealthContext) -> str | None:
        """Return a sentence that says why the node is unhealthy; None if it is healthy."""


def shared_memory(context: HealthContext) -> str | None:
    """Check that /dev/shm exists and is not full."""
    if not context.shm.is_dir():
        return f"{context.shm} does not exist"
    status = os.statvfs(context.shm)
    if status.f_blocks and not status.f_bavail:
        return f"{context.shm} is full: {status.f_blocks * status.f_frsize / _MIB:.0f} MiB are in use"
    return None


def disk(context: HealthContext) -> str | None:
    """Check that the run directory and the folder of every file tier are writable and have free space.

    The check is skipped if the job has trained already: the job can continue without these folders, and its warnings
    name failed writes.
    """
    if context.begun:
        return None
    needed = context.config.restart.health.disk_mib
    folders = [tier.folder for tier in context.config.checkpoint.durable() if not tier.on_node]
    for place in (context.run_dir, *(Path(folder) for folder in folders if folder)):
        folder = next((path for path in (place, *place.parents) if path.exists()), place)
        try:
            status = os.statvfs(folder)
        except OSError as error:
            return f"{folder}: {error.strerror}"
        if not folder.is_dir():
            return f"{folder} is not a folder"
        if not os.access(folder, os.W_OK):
            return f"{folder} cannot be written"
        if (free := status.f_bavail * status.f_frsize / _MIB) < needed:
            return f"{folder} has {free:.0f} MiB free; a node needs {needed} (restart.health.disk_mib)"
    return None


def network(context: HealthContext) -> str | None:
    """Check that the network interface through which this node reaches other nodes is up."""
    exact = context.config.interface or os.environ.get("GLOO_SOCKET_IFNAME", "")
    names = [name for name in exact.split(",") if name and name[0] not in "^="]
    for name in names:
        if not (context.net / name).exists():
            return f"there is no network interface {name}; there are: {_listed(context.net)}"
    choice = "" if exact else os.environ.get("NCCL_SOCKET_IFNAME", "")
    is_loopback = context.address.startswith("127.")
    if choice and not (is_loopback and choice.startswith("^")):
        names = _chosen_by_nccl(choice, [entry.name for entry in sorted(context.net.iterdir())])
        if not names:
            return f"no network interface matches NCCL_SOCKET_IFNAME ({choice}); there are: {_listed(context.net)}"
    if is_loopback and not names:
        names = ["lo"]
    candidates = names or [entry.name for entry in sorted(context.net.iterdir()) if entry.name != "lo"]
    states = {name: _state(context.net / name) for name in candidates}
    if not states or any(state in ("up", "unknown") for state in states.values()):  # `unknown` is loopback's state
        return None
    return "no network interface is up: " + ", ".join(f"{name} is {state}" for name, state in states.items())


def _chosen_by_nccl(choice: str, there: list[str]) -> list[str]:
    """Return the interfaces in `there` that NCCL_SOCKET_IFNAME allows.

    A leading `^` (exclude) or `=` (exact) applies to all names in the variable. Without `=`, the names are prefixes. A
    list with `^` also excludes loopback, through which no other node can be reached."""
    is_excluding = choice.startswith("^")
    choice = choice.removeprefix("^")
    is_exact = choice.startswith("=")
    # NCCL also allows `:port` after a name
    listed = [name.partition(":")[0] for name in choice.removeprefix("=").split(",")]
    wanted = [name for name in listed if name]
    matched = [name for name in there if (name in wanted if is_exact else name.startswith(tuple(wanted)))]
    return [name for name in there if name not in matched and name != "lo"] if is_excluding else matched


def _listed(net: Path) -> str:
    return ", ".join(sorted(entry.name for entry in net.iterdir())) if net.is_dir() else "none"


def _state(interface: Path) -> str:
    try:
        return (interface / "operstate").read_text().strip()
    except OSError as error:
        return str(error.strerror)


def gpu(context: HealthContext) -> str | None:
    """Check ECC errors, Xids (errors of the driver) and the CUDA driver for every GPU. Without GPUs, return None."""
    del context
    return gpu_health.unhealthy_reason()


CHECKS: Mapping[str, HealthCheck] = {
    "shared-memory": shared_memory,
    "disk": disk,
    "network": network,
    "gpu": gpu,
}
"""All named checks, by name."""


def find_check(name: str) -> HealthCheck:
    """Return the check with this name, or the function `module:function`.

    Raises:
        JobFailedError: the check or function does not exist.
    """
    if name in CHECKS:
        return CHECKS[name]
    module, colon, function = name.partition(":")
    hint = f"Checks are {', '.join(CHECKS)}, or your own function as module:function."
    if not colon:
        raise JobFailedError(f"there is no health check {name!r} (restart.health.checks)", hint=hint)
    try:
        found: HealthCheck = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise JobFailedError(f"health check {name!r} (restart.health.checks): {error}", hint=hint) from error
    return found


@dataclass(frozen=True, slots=True)
class Health:
    """The results of all checks that were run."""

    unhealthy: Mapping[str, str]
    """Why the node is unhealthy, by the name of each failed check; empty if the node is healthy."""
    seconds: float

    def sentence(self) -> str:
        return "; ".join(f"{name}: {why}" for name, why in self.unhealthy.items())


async def examine(context: HealthContext) -> Health:
    """Run the job's checks concurrently. A check that raises or does not return in time counts as failed.

    Raises:
        JobFailedError: the name of a check is unknown.
    """
    policy = context.config.restart.health
    checks = {name: find_check(name) for name in policy.checks}
    began = time.monotonic()
    answers = await asyncio.gather(*(_ask(check, context, policy.timeout_s) for check in checks.values()))
    unhealthy = {name: why for name, why in zip(checks, answers, strict=True) if why}
    return Health(unhealthy, time.monotonic() - began)


async def examine_until_fit(context: HealthContext) -> Health:
    """Run the job's checks. If only free space is lacking, repeat the checks until they pass, for at most `timeout_s`
    s.

    While checks are repeated, the memory of a dead process may be freed, and files may be deleted.

    Raises:
        JobFailedError: the name of a check is unknown.
    """
    began = time.monotonic()
    until = began + context.config.restart.health.timeout_s
    while (health := await examine(context)).unhealthy.keys() and health.unhealthy.keys() <= _ROOM:
        if time.monotonic() > until:
            break
        await asyncio.sleep(_LOOK_AGAIN_S)
    return Health(health.unhealthy, time.monotonic() - began)


async def _ask(check: HealthCheck, context: HealthContext, limit_s: float) -> str | None:
    """Run a check in a thread of its own, and return its result.

    If the check takes too long, the thread is left running, because it may hang in a file system."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str | None] = loop.create_future()

    def set_answer(found: str | None) -> None:
        if not answer.done():
            answer.set_result(found)

    def work() -> None:
        try:
            found = check(context)
        except Exception as error:  # any error of a user's check is the check's result
            found = f"{type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):  # the event loop may have ended
            loop.call_soon_threadsafe(set_answer, found)

    threading.Thread(target=work, name="hpx-health", daemon=True).start()
    try:
        async with asyncio.timeout(limit_s):
            return await answer
    except TimeoutError:
        return f"no answer within {limit_s:g} s"
