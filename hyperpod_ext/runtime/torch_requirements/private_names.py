"""The table of torch's private names that hyperpod_ext uses, each with the feature that needs it.

`check_loaded` is called when a job starts, and again when `run.keep` has built an object. So a version of torch without
a needed name is refused early, and not at the first fault. Names in modules that are not loaded yet are not looked up,
so that nothing is imported. `tests/runtime/torch_requirements/test_private_names.py` compares the table with the code.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hyperpod_ext.errors import HyperpodExtError


class Feature(Enum):
    """A feature that needs private names: the module of torch that is loaded if the feature is used, and a name for
    errors."""

    GROUPS = ("torch.distributed", "process groups")
    LASTING_GROUPS = ("torch.distributed", "process groups whose objects outlive a fault")
    DDP = ("torch.nn.parallel", "DistributedDataParallel")
    TENSORS = ("torch", "tensors and optimizers")
    DTENSOR = ("torch.distributed.tensor", "DTensors and device meshes")
    KEPT_MESHES = ("torch.distributed.tensor", "device meshes that are kept through a fault")
    KEPT_FSDP2 = ("torch.distributed.fsdp._fully_shard", "FSDP2 modules that are kept through a fault")
    REPRODUCIBLE_FSDP2 = ("torch.distributed.fsdp", "data_parallel(reproducible=True) of FSDP2 modules")
    REPRODUCIBLE_DDP = ("torch.autograd", "data_parallel(reproducible=True)")
    DCP = ("torch.distributed.checkpoint", "torch.distributed.checkpoint")

    @property
    def title(self) -> str:
        return self.value[1]

    @property
    def is_loaded(self) -> bool:
        return self.value[0] in sys.modules


_NEEDED = (Feature.GROUPS, Feature.DDP, Feature.TENSORS, Feature.DTENSOR)
"""Features without which a job cannot recover. Without `KEPT_MESHES` or `KEPT_FSDP2`, objects from `run.keep` are built
again after a fault. Without `LASTING_GROUPS`, process groups are made again. Other features are checked when they are
used."""


@dataclass(frozen=True, slots=True)
class PrivateName:
    """A private attribute of a module or class of torch."""

    holder: str
    """The module, or the module and the class, separated by a colon."""
    name: str
    purpose: str
    feature: Feature
    optional: bool = False
    """Whether the name may be missing, because a version of torch without this name does not need it."""

    def __str__(self) -> str:
        return f"{self.holder.replace(':', '.')}.{self.name}"

    def exists(self) -> bool:
        module, _, inner = self.holder.partition(":")
        try:
            holder: Any = importlib.import_module(module)
            for each in filter(None, inner.split(".")):
                holder = getattr(holder, each)
        except (ImportError, AttributeError):
            return False
        return hasattr(holder, self.name) or (inspect.isclass(holder) and self.name in _set_by_methods(holder))


_C10D, _C = "torch.distributed.distributed_c10d", "torch._C._distributed_c10d"
_DDP, _REDUCER = "torch.nn.parallel:DistributedDataParallel", f"{_C}:Reducer"
_MESH, _TENSOR, _DCP = "torch.distributed.device_mesh", "torch.distributed.tensor", "torch.distributed.checkpoint"
FSDP2 = "torch.distributed.fsdp._fully_shard"
_STATE, _GROUP, _PARAMETER = (
    f"{FSDP2}._fsdp_state:FSDPState",
    f"{FSDP2}._fsdp_param_group:FSDPParamGroup",
    f"{FSDP2}._fsdp_param:FSDPParam",
)

TABLE = (
    PrivateName("torch._C", "_distributed_c10d", "stores, which torch.distributed has without types", Feature.GROUPS),
    PrivateName(_C10D, "_new_process_group_helper", "each group's name and ranks, before it is made", Feature.GROUPS),
    PrivateName(_C10D, "_new_group_with_tag", "groups that run.keep made, to make them again", Feature.GROUPS),
    PrivateName(_C10D, "_world", "the groups that are open", Feature.GROUPS),
    PrivateName(f"{_C10D}:_world", "group_count", "resetting the number in the names of groups", Feature.GROUPS),
    PrivateName(f"{_C10D}:_world", "pg_map", "the groups that are open", Feature.GROUPS),
    PrivateName(f"{_C10D}:_world", "pg_names", "the names of the open groups", Feature.GROUPS),
    PrivateName(f"{_C}:ProcessGroup", "_get_backend", "the backend of a group for a kind of device", Feature.GROUPS),
    PrivateName(f"{_C}:ProcessGroup", "_device_types", "the kinds of devices of a group", Feature.GROUPS),
    PrivateName(f"{_C}:Backend", "_get_sequence_number_for_group", "how many collectives have begun", Feature.GROUPS),
    PrivateName(
        f"{_C}:Backend", "supports_reconfigure", "whether a backend can be reconfigured", Feature.LASTING_GROUPS
    ),
    PrivateName(f"{_C}:Backend", "reconfigure", "changing the ranks of an open group", Feature.LASTING_GROUPS),
    PrivateName(
        f"{_C}:Backend",
        "get_reconfigure_handle",
        "the address of a rank for a reconfigured group",
        Feature.LASTING_GROUPS,
    ),
    PrivateName(_C, "ReconfigureOptions", "the new ranks of a reconfigured group", Feature.LASTING_GROUPS),
    PrivateName(_DDP, "_has_rebuilt_buckets", "whether gradient buckets have their final layout", Feature.DDP),
    PrivateName(_DDP, "_build_params_for_reducer", "parameters in the order of the former buckets", Feature.DDP),
    PrivateName(_DDP, "_comm_hooks", "state of communication hooks, which no snapshot has", Feature.DDP),
    PrivateName(_REDUCER, "_rebuild_buckets", "buckets laid out before the first step", Feature.DDP),
    PrivateName("torch.distributed", "_broadcast_coalesced", "errors of DDP that a script swallows", Feature.DDP),
    PrivateName(_REDUCER, "_get_zeros_like_grad_buckets", "parameters of each bucket", Feature.DDP),
    PrivateName(_REDUCER, "_push_all_rebuilt_params", "buckets laid out before the first step", Feature.DDP),
    PrivateName("torch:Tensor", "_version", "whether a tensor has changed", Feature.TENSORS),
    PrivateName("torch:Tensor", "_backward_hooks", "state that hooks of gradients keep", Feature.TENSORS),
    PrivateName("torch:Tensor", "_post_accumulate_grad_hooks", "state that hooks of gradients keep", Feature.TENSORS),
    PrivateName("torch.nn:Module", "_forward_pre_hooks", "state that hooks of modules keep", Feature.TENSORS),
    PrivateName("torch.nn:Module", "_forward_hooks", "state that hooks of modules keep", Feature.TENSORS),
    PrivateName("torch.nn:Module", "_backward_hooks", "state that hooks of modules keep", Feature.TENSORS),
    PrivateName("torch.nn:Module", "_non_persistent_buffers_set", "buffers that are not saved", Feature.TENSORS),
    PrivateName("torch", "_foreach_norm", "norms of many gradients at once", Feature.TENSORS),
    PrivateName("torch.storage", "_dtype_to_storage_type_map", "snapshots that torch.load reads", Feature.TENSORS),
    PrivateName("torch._utils", "_rebuild_tensor_v2", "snapshots that torch.load reads", Feature.TENSORS),
    PrivateName("torch._utils", "_rebuild_tensor_v3", "snapshots that torch.load reads", Feature.TENSORS),
    PrivateName(
        "torch.amp:GradScaler", "_per_optimizer_states", "the state of a scaler after a fault", Feature.TENSORS
    ),
    PrivateName(
        "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter",
        "_shutdown_workers",
        "ending a loader's processes",
        Feature.TENSORS,
        optional=True,
    ),
    PrivateName("torch.autograd:Variable", "_execution_engine", "the end of a backward pass", Feature.REPRODUCIBLE_DDP),
    PrivateName("torch.nn.modules.batchnorm", "_BatchNorm", "refusing such layers", Feature.REPRODUCIBLE_DDP),
    PrivateName(f"{_TENSOR}._utils", "compute_local_shape_and_global_offset", "shards in snapshots", Feature.DTENSOR),
    PrivateName(f"{_TENSOR}:DTensor", "_local_tensor", "this rank's part of a DTensor", Feature.DTENSOR),
    PrivateName(f"{_TENSOR}:DTensor", "_op_dispatcher", "clearing caches about another rank", Feature.DTENSOR),
    PrivateName(_TENSOR, "_redistribute", "clearing caches about another rank", Feature.DTENSOR),
    PrivateName(
        f"{_TENSOR}._redistribute", "_gen_transform_infos", "clearing caches about another rank", Feature.DTENSOR
    ),
    PrivateName(
        f"{_TENSOR}.debug",
        "_clear_sharding_prop_cache",
        "clearing caches about another rank",
        Feature.DTENSOR,
        optional=True,
    ),
    PrivateName(
        f"{_MESH}", "_mesh_resources", "clearing flattened meshes of old groups", Feature.DTENSOR, optional=True
    ),
    PrivateName(f"{_MESH}:DeviceMesh", "_flatten_mapping", "flattened meshes, and their groups", Feature.KEPT_MESHES),
    PrivateName(f"{_MESH}:DeviceMesh", "_dim_group_names", "groups of flattened meshes", Feature.KEPT_MESHES),
    PrivateName(
        f"{_MESH}:DeviceMesh", "_pg_registry", "groups that compiled code uses", Feature.KEPT_MESHES, optional=True
    ),
    PrivateName(_STATE, "_fsdp_param_groups", "parameters of an FSDP2 module", Feature.KEPT_FSDP2),
    PrivateName(_STATE, "_is_root", "which FSDP2 module resets the others", Feature.KEPT_FSDP2),
    PrivateName(_STATE, "_comm_ctx", "reductions of gradients that are running", Feature.KEPT_FSDP2),
    PrivateName(_STATE, "_reset_iter_state", "resetting FSDP2 after an interrupted step", Feature.KEPT_FSDP2),
    PrivateName(f"{FSDP2}._fsdp_common", "DataParallelMeshInfo", "groups that FSDP2 holds", Feature.KEPT_FSDP2),
    PrivateName(
        f"{FSDP2}._fsdp_collectives",
        "ProcessGroupAllocMixin",
        "groups that FSDP2 holds",
        Feature.KEPT_FSDP2,
        optional=True,
    ),
    PrivateName(_GROUP, "_all_gather_result", "parameters that were being gathered", Feature.KEPT_FSDP2),
    PrivateName(_GROUP, "fsdp_params", "parameters of an FSDP2 module", Feature.KEPT_FSDP2),
    PrivateName(_PARAMETER, "_unsharded_param", "gradients that were being accumulated", Feature.KEPT_FSDP2),
    PrivateName(
        _PARAMETER,
        "unsharded_accumulated_grad",
        "gradients that were being accumulated",
        Feature.KEPT_FSDP2,
        optional=True,
    ),
    PrivateName(
        f"{FSDP2}._fsdp_state:FSDPCommContext",
        "active_gradient_reduction",
        "a reduction of gradients that is running",
        Feature.KEPT_FSDP2,
        optional=True,
    ),
    PrivateName(f"{FSDP2}:FSDPModule", "_get_fsdp_state", "parameters of an FSDP2 module", Feature.REPRODUCIBLE_FSDP2),
    PrivateName(_STATE, "_fsdp_param_groups", "parameters of an FSDP2 module", Feature.REPRODUCIBLE_FSDP2),
    PrivateName(
        f"{FSDP2}:FSDPModule",
        "set_custom_reduce_scatter",
        "replacing FSDP2's sums of gradients",
        Feature.REPRODUCIBLE_FSDP2,
    ),
    PrivateName(f"{_DCP}.filesystem", "_StorageInfo", "metadata that torch reads", Feature.DCP),
    PrivateName(f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING", "metadata that torch reads", Feature.DCP),
    PrivateName("torch.serialization", "_get_layout", "metadata that torch reads", Feature.DCP),
    PrivateName(f"{_DCP}._nested_dict", "flatten_state_dict", "names of values", Feature.DCP),
    PrivateName(f"{_DCP}.state_dict", "_init_optim_state", "counting the steps of unchanged scripts", Feature.DCP),
)


def check_loaded() -> None:
    """Check the names for features that every job needs, in those modules of torch that are loaded.

    Each feature is checked once per process.

    Raises:
        HyperpodExtError: this torch lacks names without which a job cannot recover. The error message lists all missing
            names.
    """
    check(*(feature for feature in _NEEDED if feature.is_loaded))


def check(*features: Feature) -> None:
    """Raise HyperpodExtError if a name that these features need is missing in this torch."""
    gone = [name for feature in features for name in missing(feature)]
    if gone:
        import torch

        raise HyperpodExtError(
            f"torch {torch.__version__} lacks names that recovery of {', '.join(_titles(gone))} needs: "
            + ", ".join(map(str, gone)),
            hint="docs/compatibility.md lists the versions of torch that have them.",
        )


@functools.cache
def missing(feature: Feature) -> tuple[PrivateName, ...]:
    """Return the names for a feature that this torch lacks. The function imports the modules that should contain the
    names."""
    return tuple(each for each in TABLE if each.feature is feature and not each.optional and not each.exists())


def look_up_loaded() -> None:
    """Look up the names for all features in use. Processes that are forked from this process then need not look up the
    names."""
    for feature in Feature:
        if feature.is_loaded:
            missing(feature)


def _titles(names: list[PrivateName]) -> list[str]:
    return list(dict.fromkeys(each.feature.title for each in names))


def _set_by_methods(kind: type) -> set[str]:
    """Return the names of attributes that a class declares or that its methods use, which its instances may have."""
    declared = {name for each in kind.__mro__ for name in vars(each).get("__annotations__", {})}
    return declared.union(*(code.co_names for each in kind.__mro__ for code in _codes(each)))


def _codes(kind: type) -> Iterator[Any]:
    for value in vars(kind).values():
        function = value.fget if isinstance(value, property) else value
        function = inspect.unwrap(function) if callable(function) else function
        if inspect.isfunction(function):
            yield function.__code__
