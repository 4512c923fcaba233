"""Checks the requirements of a node before its workers start. Unchecked, a full /dev/shm would cause a SIGBUS later."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.storage.open import open_tier

_MIB = 1 << 20
_TIER_S = 60.0
"""Time in seconds after which a durable tier that is unreachable makes the start of the job fail."""


def check_node(config: RuntimeConfig, script: Path, *, shm: Path = Path("/dev/shm")) -> None:
    """Check all requirements of this node, and raise one error for all that are missing.

    Raises:
        JobFailedError: requirements are missing. The error message has one line for each missing requirement, with what
            to do.
    """
    lacks = [lack for lack in (_script(script), _shared_memory(config, shm), *_packages(config)) if lack]
    if lacks:
        raise JobFailedError("\n".join(lacks))


def check_tiers(config: RuntimeConfig) -> None:
    """Check that checkpoints can be written to the shared tiers: a bucket may be missing or deny access, a disk may be
    full.

    The disks of the job's own nodes are not checked, because a job starts even if these disks fail.

    Raises:
        UnreachableError: a tier cannot be written. The error message says what to do.
    """
    for tier in config.checkpoint.shared():
        open_tier(tier, config.name, deadline_s=_TIER_S).check()


def _script(script: Path) -> str | None:
    if script.is_file():
        return None
    return f"{script}: no such script in {Path.cwd()}; is it in the container image?"


def _shared_memory(config: RuntimeConfig, shm: Path) -> str | None:
    if config.shared_memory_mib is None:
        return None
    if not shm.is_dir():
        return f"{shm} does not exist; the job asks for {config.shared_memory_mib} MiB of it (shared_memory_mib)"
    status = os.statvfs(shm)
    free, size = status.f_bavail * status.f_frsize / _MIB, status.f_blocks * status.f_frsize / _MIB
    if free >= config.shared_memory_mib:
        return None
    return (
        f"{shm} has {free:.0f} MiB free of {size:.0f}; "
        f"the job asks for {config.shared_memory_mib} (shared_memory_mib). "
        "Mount a larger one: docker run --shm-size, or in Kubernetes an emptyDir with medium: Memory"
    )


def _packages(config: RuntimeConfig) -> list[str]:
    needed = {"torch": "pip install torch", "awscrt": "pip install 'hyperpod-ext[runtime]'"}
    if config.checkpoint.durable() or config.encrypted:  # cryptography makes MACs and certificates
        needed["cryptography"] = needed["awscrt"]
    return [f"{name} is not installed here: {command}" for name, command in needed.items() if find_spec(name) is None]
