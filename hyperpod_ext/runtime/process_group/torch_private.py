"""Access to torch's private functions that create and number process groups.

`torch_requirements/private_names.py` lists the private names."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.runtime.torch_requirements import private_names
from hyperpod_ext.runtime.torch_requirements.tried_versions import warn_if_untried

GroupMaker = Callable[[str, Sequence[int], Callable[..., Any]], Any]

_OLDEST = (2, 6)
_c10d: Any = getattr(dist, "distributed_c10d", None)
_make_group: Any = getattr(_c10d, "_new_process_group_helper", None)
ReconfigureOptions: Any = getattr(getattr(torch._C, "_distributed_c10d", None), "ReconfigureOptions", None)
"""torch's class for a backend's new configuration: `uuid`, and one entry in `handles` per rank. None before torch
2.14."""


def check() -> None:
    """Raise HyperpodExtError if this version or build of torch does not support recovery."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _OLDEST:
        raise HyperpodExtError(f"torch {torch.__version__} is too old", hint="Recovery needs torch 2.6 or newer.")
    if not dist.is_available() or not dist.is_gloo_available():
        raise HyperpodExtError(
            "this build of torch has no torch.distributed with the backend gloo",
            hint="Install a build with gloo, such as the one on PyPI.",
        )
    warn_if_untried("torch", torch.__version__)
    private_names.check_loaded()


def on_new_group(maker: GroupMaker | None) -> None:
    """Call `maker` instead of torch's function for each new group. `on_new_group(None)` restores torch's function.

    `maker` gets the group's name, its ranks (empty for the default group), and torch's function with its arguments."""
    if maker is None:
        _c10d._new_process_group_helper = _make_group
        return

    @functools.wraps(_make_group)
    def make_group(*arguments: Any, **options: Any) -> Any:
        name, ranks = str(arguments[5]), list(arguments[2])  # the arguments `group_name` and `global_ranks_in_group`
        return maker(name, ranks, functools.partial(_make_group, *arguments, **options))

    _c10d._new_process_group_helper = make_group


def forget_groups(kept: int = 0) -> None:
    """Reset torch's counter of groups to `kept`.

    torch names a group's keys by the group's number. A failed init increases the counter, and destroying a group does
    not decrease the counter. Without a reset, survivors and new processes would use different names for the same group.
    """
    _c10d._world.group_count = kept


def open_groups() -> dict[str, dist.ProcessGroup]:
    """Return torch's open groups by name, in order of creation."""
    return {str(name): group for group, name in _c10d._world.pg_names.items()}


def store_of(group: dist.ProcessGroup) -> Any:
    """Return the store that torch has recorded for a group."""
    return _c10d._world.pg_map[group][1]


def backends_of(device: str) -> dict[str, Any]:
    """Return each open group's backend for `device`, by group name, without backends that torch cannot abort.

    Thread-safe."""
    found = {}
    for group, name in list(_c10d._world.pg_names.items()):
        with contextlib.suppress(RuntimeError):  # the group has no backend for this device
            backend = group._get_backend(torch.device(device))
            if hasattr(backend, "abort"):  # gloo has no `abort` before torch 2.7
                found[str(name)] = backend
    return found


def parts_of(group: dist.ProcessGroup) -> dict[str, Any]:
    """Return the backends of a group, each under the first device type that it serves, with CPU first."""
    devices = sorted(group._device_types, key=lambda device: (device.type != "cpu", device.type))
    parts: dict[str, Any] = {}
    for device in devices:
        if (backend := group._get_backend(device)) not in parts.values():
            parts[device.type] = backend
    return parts


def collectives_begun() -> int:
    """Return the number of collectives that this process has begun on its open process groups."""
    begun = 0
    for group in list(_c10d._world.pg_map):
        # a group that is being opened or closed raises, and backend "fake" (mesh dimensions of size 1) too
        with contextlib.suppress(RuntimeError, ValueError):
            backends: list[Any] = [group._get_backend(device) for device in group._device_types]
            begun += sum(one._get_sequence_number_for_group() for one in {id(one): one for one in backends}.values())
    return begun
