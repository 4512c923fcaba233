"""Keep objects with process groups after a fault: FSDP2 modules, device meshes, DTensors.

A fault ends every process group, except lasting ones (`process_group/lasting_groups.py`). Objects release an ended
group first, because otherwise gloo's threads and sockets would stay, and get the group of the same name in the next
generation. A device mesh looks up its groups by name at each use, so equal names make it complete again; FSDP2's
parameter groups store group objects, and get the new ones.

Names are numbers in the order in which groups are made. A new process makes the groups of `run.keep` by calling
`build`; survivors make them from the recorded calls, without `build`.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.process_group.torch_private import collectives_begun
from hyperpod_ext.runtime.snapshot.image import is_dtensor
from hyperpod_ext.runtime.state import interrupted_fsdp
from hyperpod_ext.runtime.torch_requirements import private_names
from hyperpod_ext.runtime.torch_requirements.private_names import Feature

_c10d = dist.distributed_c10d


@dataclass
class Made:
    """Process groups and meshes made by a call of `build`."""

    calls: list[tuple[tuple[Any, ...], dict[str, Any], str]] = field(default_factory=list)
    """Arguments of each new group, with the group's name (empty on ranks outside of the group)."""
    meshes: int = 0
    """Number of new device meshes; a mesh over all ranks needs no new group."""
    talked: bool = False
    """Whether `build` communicated, so that all ranks, survivors too, must call it."""


@contextlib.contextmanager
def recording() -> Iterator[Made]:
    """Record the process groups that are made inside."""
    made, make, before = Made(), _c10d._new_group_with_tag, collectives_begun()

    def record(*arguments: Any, **options: Any) -> Any:
        group = make(*arguments, **options)
        made.calls.append((arguments, options, _name(group)))
        return group

    init = DeviceMesh.__init__

    def count(mesh: DeviceMesh, /, *arguments: Any, **options: Any) -> None:
        made.meshes += 1
        init(mesh, *arguments, **options)

    _c10d._new_group_with_tag = record
    DeviceMesh.__init__ = count  # type: ignore[assignment,method-assign]  # put back below
    try:
        yield made
    finally:
        _c10d._new_group_with_tag = make
        DeviceMesh.__init__ = init  # type: ignore[method-assign]  # as it was
    made.talked = collectives_begun() != before
    private_names.check_loaded()  # `build` may have imported DTensors or FSDP2


def can_be_kept() -> bool:
    """Return whether meshes, DTensors and FSDP2 modules can be used again after a fault with this torch."""
    meshes_can = not Feature.KEPT_MESHES.is_loaded or not private_names.missing(Feature.KEPT_MESHES)
    return meshes_can and interrupted_fsdp.can_be_reset()


def repeat(made: Made) -> None:
    """Make the same groups again, in the same order.

    Raises:
        JobFailedError: the names differ, because groups were made in another order.
    """
    for arguments, options, name in made.calls:
        group = _c10d._new_group_with_tag(*arguments, **options)
        if _name(group) != name:
            raise JobFailedError(
                f"process group {name} became {_name(group)} after the fault",
                hint="Make process groups and device meshes in run.keep, or in the same order in each call.",
            )


def _name(group: Any) -> str:
    return str(group.group_name) if isinstance(group, dist.ProcessGroup) else ""


class _Gone:
    """Placeholder of a process group until the next group of the same name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        raise JobFailedError(
            f"process group {self._name} was not made again after the fault",
            hint="Make process groups and device meshes in run.keep, or anew in each call of the training function.",
        )


@dataclass(frozen=True)
class GroupHolder:
    """An attribute with a process group, or with a mesh that has one."""

    holder: Callable[[], Any]
    """Weak reference to the object."""
    attribute: str
    name: str
    """Name of the group."""
    key: str = ""
    value: Any = None
    """Entry of the attribute, if it is a mapping."""


def let_go(*, groups_last: bool = False) -> list[GroupHolder]:
    """Remove the process groups from all objects that hold them, and reset interrupted FSDP2 modules.

    If groups outlive the fault, remove only flattened meshes, which a new process makes at the first use.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return []
    kinds = _kinds_of_holders()
    holders = [thing for thing in gc.get_objects() if issubclass(type(thing), kinds)]
    places = [place for thing in holders for place in _take_out(thing, groups_last)]
    if interrupted_fsdp.can_be_reset():
        interrupted_fsdp.reset([thing for thing in holders if hasattr(thing, "_fsdp_param_groups")])
    _forget_flattened()
    return places


def _forget_flattened() -> None:
    """Clear torch's registry of flattened meshes, in which a new mesh, equal to the old one, would find old ones."""
    registry = getattr(device_mesh, "_mesh_resources", None)
    if registry is not None and private_names.missing(Feature.KEPT_MESHES):
        registry.root_to_flatten_mapping.clear()
        registry.flatten_name_to_root_dims.clear()


def _kinds_of_holders() -> tuple[type, ...]:
    """Return the loaded types with instances that hold process groups."""
    kinds: list[type] = [DeviceMesh]
    for module, names in (
        ("_fsdp_common", ("DataParallelMeshInfo",)),
        ("_fsdp_state", ("FSDPState",)),
        ("_fsdp_collectives", ("ProcessGroupAllocMixin", "SymmMemAllocMixin")),
    ):
        loaded = sys.modules.get(f"{private_names.FSDP2}.{module}")
        kinds += [getattr(loaded, name) for name in names if isinstance(getattr(loaded, name, None), type)]
    return tuple(kinds)


def _take_out(thing: Any, groups_last: bool) -> list[GroupHolder]:
    here, places = weakref.ref(thing), []
    for attribute, value in list(vars(thing).items()):
        if isinstance(value, dist.ProcessGroup) and not groups_last:
            places.append(GroupHolder(here, attribute, str(value.group_name)))
            setattr(thing, attribute, _Gone(str(value.group_name)))
    # of a mesh: groups for torch.compile, and flattened meshes, which are made at the first use. Survivors must make
    # the same groups as a new process
    for attribute in ("_pg_registry", "_flatten_mapping"):
        for key, value in dict(vars(thing).get(attribute) or {}).items():
            name = key if attribute == "_pg_registry" else (getattr(value, "_dim_group_names", None) or [""])[0]
            places.append(
                GroupHolder(here, attribute, str(name), key, value if attribute == "_flatten_mapping" else None)
            )
            del vars(thing)[attribute][key]
    return places


def give_back(places: Sequence[GroupHolder], asleep: Collection[str] = ()) -> list[GroupHolder]:
    """Set the groups of this generation in place of those of the same names; return the holders still without one.

    Args:
        asleep: names of kept groups that are not of this generation.
    """
    missing = []
    for place in places:
        holder, group = place.holder(), None if place.name in asleep else _group_of(place.name)
        if group is None:
            missing.append(place)
        elif holder is not None and place.key:
            vars(holder)[place.attribute][place.key] = place.value or group
        elif holder is not None:
            setattr(holder, place.attribute, group)
    return missing


def forget_rank() -> None:
    """Clear torch's caches of DTensor operations after this process has become another rank.

    The caches are keyed by mesh, and meshes of the same ranks are equal: results would get a mesh with this process in
    its old position.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, _redistribute, debug

    if hasattr(debug, "_clear_sharding_prop_cache"):
        debug._clear_sharding_prop_cache()
    else:
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    _redistribute._gen_transform_infos.cache_clear()
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):  # older torch has no such cache
        _redistribute.clear_redistribute_planner_cache()


def of_now(value: Any) -> Any:
    """Replace process groups in `value`, also inside lists, tuples and dicts, by those of this generation."""
    if isinstance(value, dist.ProcessGroup):
        return _group_of(str(value.group_name)) or value
    if type(value) is list:
        value[:] = [of_now(each) for each in value]
    elif type(value) is dict:
        value.update({key: of_now(each) for key, each in value.items()})
    elif type(value) is tuple:
        return tuple(of_now(each) for each in value)
    return value


def is_sharded(value: Any) -> bool:
    """Return whether `value` holds shards, also inside modules or containers: they only fit one world size."""
    if isinstance(value, torch.nn.Module):
        return any(is_dtensor(tensor) for tensor in (*value.parameters(), *torch.nn.Module.buffers(value)))
    if isinstance(value, torch.optim.Optimizer):
        return any(is_dtensor(parameter) for group in value.param_groups for parameter in group["params"])
    if isinstance(value, list | tuple):
        return any(is_sharded(each) for each in value)
    if isinstance(value, dict):
        return any(is_sharded(each) for each in value.values())
    return isinstance(value, DeviceMesh | dist.ProcessGroup) or is_dtensor(value)


def _group_of(name: str) -> dist.ProcessGroup | None:
    return next((group for group, known in _c10d._world.pg_names.items() if str(known) == name), None)
