"""Keep FSDP2 modules, device meshes and DTensors after a fault, and give them new process groups.

A fault ends every process group, except lasting groups (`process_group/lasting_groups.py`). The references to an ended
group are removed from all objects, because otherwise gloo's threads and sockets would never be closed. In the next
generation, each object gets the new process group with the old group's name. A device mesh looks up its groups by name
at each use, so it needs only groups with the same names. FSDP2's parameter groups store group objects, which are
replaced by the new groups.

Torch names process groups by numbers, in the order of their creation. A new process creates the groups of `run.keep` by
calling the script's `build` function. Surviving processes create the groups by repeating the recorded calls, without
calling `build`.
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
    """Process groups and meshes that a call of the script's `build` function has created."""

    calls: list[tuple[tuple[Any, ...], dict[str, Any], str]] = field(default_factory=list)
    """Positional arguments, keyword arguments and name of each new group. The name is empty on ranks outside of the
    group."""
    meshes: int = 0
    """Number of new device meshes, not all of which are in `calls`: a mesh over all ranks needs no new group."""
    talked: bool = False
    """Whether `build` called collectives, so that all ranks, including surviving ones, call it after a fault."""


@contextlib.contextmanager
def recording() -> Iterator[Made]:
    """Record the process groups and device meshes that are created inside the `with` block."""
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
        DeviceMesh.__init__ = init  # type: ignore[method-assign]  # restore the original method
    made.talked = collectives_begun() != before
    private_names.check_loaded()  # check again: `build` may have imported DTensors or FSDP2


def can_be_kept() -> bool:
    """Return whether this version of torch allows meshes, DTensors and FSDP2 modules to be used again after a fault."""
    meshes_can = not Feature.KEPT_MESHES.is_loaded or not private_names.missing(Feature.KEPT_MESHES)
    return meshes_can and interrupted_fsdp.can_be_reset()


def repeat(made: Made) -> None:
    """Create the process groups in `made` again, in the same order.

    Raises:
        JobFailedError: a new group has another name, because the script has created groups in another order.
    """
    for arguments, options, name in made.calls:
        group = _c10d._new_group_with_tag(*arguments, **options)
        if _name(group) != name:
            raise JobFailedError(
                f"process group {name} was created as {_name(group)} after the fault, because the script creates its "
                "groups in another order",
                hint="Create process groups and device meshes in run.keep, or in the same order in each call.",
            )


def _name(group: Any) -> str:
    return str(group.group_name) if isinstance(group, dist.ProcessGroup) else ""


class _Gone:
    """Placeholder for an ended process group in an object, until a new group of the same name exists."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        raise JobFailedError(
            f"process group {self._name} was not created again after the fault",
            hint="Create process groups and device meshes in run.keep, or again in each call of the training function.",
        )


@dataclass(frozen=True)
class GroupHolder:
    """An attribute of an object that held a process group, directly or in a dict of groups or meshes."""

    holder: Callable[[], Any]
    """Weak reference to the object with the attribute."""
    attribute: str
    name: str
    """Name of the process group."""
    key: str = ""
    value: Any = None
    """If the attribute is a dict, `key` is the key of the removed entry, and `value` the flattened mesh in the entry;
    None if the entry was a group."""


def let_go(*, groups_last: bool = False) -> list[GroupHolder]:
    """Remove the process groups from all objects that hold them, and reset interrupted FSDP2 modules.

    Args:
        groups_last: whether process groups outlive the fault, and therefore stay in their objects. If they outlive it,
            only device meshes' caches of groups and flattened meshes are emptied, because a new process fills these
            caches at the first use.
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
    """Clear older torch's registry of flattened meshes, where a new mesh would find entries of an equal old mesh."""
    registry = getattr(device_mesh, "_mesh_resources", None)
    if registry is not None and private_names.missing(Feature.KEPT_MESHES):
        registry.root_to_flatten_mapping.clear()
        registry.flatten_name_to_root_dims.clear()


def _kinds_of_holders() -> tuple[type, ...]:
    """Return the types whose instances may hold process groups, if torch has loaded the types."""
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
    # a mesh creates its groups for torch.compile and its flattened meshes at the first use. After a fault, surviving
    # processes must create these groups again, in the same order as a new process
    for attribute in ("_pg_registry", "_flatten_mapping"):
        for key, value in dict(vars(thing).get(attribute) or {}).items():
            name = key if attribute == "_pg_registry" else (getattr(value, "_dim_group_names", None) or [""])[0]
            places.append(
                GroupHolder(here, attribute, str(name), key, value if attribute == "_flatten_mapping" else None)
            )
            del vars(thing)[attribute][key]
    return places


def give_back(places: Sequence[GroupHolder], asleep: Collection[str] = ()) -> list[GroupHolder]:
    """Set this generation's process groups in the objects that held the old groups of the same names.

    Args:
        places: the attributes from which `let_go` removed a group.
        asleep: names of lasting groups that this generation has not created yet.

    Returns:
        The attributes whose process group does not exist yet.
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


def forget_meshes() -> None:
    """Clear torch's caches of DTensor operations.

    Needed after this process has become another rank, and before the script makes its meshes and models again.

    Torch's caches are keyed by mesh, and torch treats meshes over the same ranks as equal. With old caches, a new
    DTensor could get an old mesh: one in which this process still has its old rank, or one that FSDP2 refuses because
    it is another object than the new mesh.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, _redistribute, debug

    if hasattr(debug, "_clear_sharding_prop_cache"):
        debug._clear_sharding_prop_cache()
    else:
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    _redistribute._gen_transform_infos.cache_clear()
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):  # older torch does not have this function
        _redistribute.clear_redistribute_planner_cache()


def of_now(value: Any) -> Any:
    """Return `value` with each process group replaced by this generation's group of the same name.

    Process groups inside lists, tuples and dicts are also replaced. Lists and dicts are changed in place.
    """
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
    """Return whether `value` contains DTensors, meshes or process groups, which only fit one world size.

    Modules, optimizers, lists, tuples and dicts are searched.
    """
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
