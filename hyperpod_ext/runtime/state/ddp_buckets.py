"""DDP whose gradient buckets keep their layout through a fault, so that sums keep their order.

DDP lays its buckets out anew after the first backward, in the order gradients arrived. A ring all-reduce
adds each element's contributions in an order that depends on where in a bucket it lies. A new DDP after
a fault would start from the first layout, and may meet another order of arrival: its losses would then
differ in the last bits from those of a run without the fault.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hyperpod_ext.errors import JobFailedError

Buckets = list[list[int]]
"""Indices of the module's trained parameters in each bucket, in the order buckets are reduced."""

_CAN_SKIP_SYNC = "init_sync" in inspect.signature(DistributedDataParallel.__init__).parameters
"""Older torch always sends rank 0's values, which cost time and change nothing where ranks agree on them already."""


def wrap(module: torch.nn.Module, layout: Buckets | None, **options: Any) -> DistributedDataParallel:
    """`DistributedDataParallel(module, **options)`; with a `layout`, that is final from the first step on.

    Collective. Raises JobFailedError when `layout` is not one of this module.
    """
    if not _CAN_SKIP_SYNC:
        options.pop("init_sync", None)
    if layout is None and _has_sparse_gradients(module) and not options.get("find_unused_parameters"):
        return _ReversedDDP(module, **options)
    return DistributedDataParallel(module, **options) if layout is None else _PinnedDDP(module, layout, **options)


def _has_sparse_gradients(module: torch.nn.Module) -> bool:
    """Whether DDP reduces some parameters as sparse tensors: the same question as DDP's own."""
    return any(
        isinstance(each, torch.nn.Embedding | torch.nn.EmbeddingBag) and each.sparse for each in module.modules()
    )


def layout_of(ddp: DistributedDataParallel) -> Buckets | None:
    """The layout that `ddp` uses from its next step on. Collective: call it after a step, on every rank.

    None while DDP has not laid out anew: before its first backward, and for ever if the first layout is final and the
    same in every DDP of the module: with `find_unused_parameters`, and with sparse gradients.
    """
    if isinstance(ddp, _ReversedDDP):
        return None
    anew = ddp.reducer._rebuild_buckets()  # what the next forward would do first
    if not anew and not ddp._has_rebuilt_buckets:
        return None
    ignored = ddp.parameters_to_ignore
    trained = [each for name, each in ddp.module.named_parameters() if each.requires_grad and name not in ignored]
    index_of = {id(parameter): index for index, parameter in enumerate(trained)}
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    return [[index_of[id(parameter)] for parameter in bucket.parameters()] for bucket in buckets]


class _PinnedDDP(DistributedDataParallel):
    """DDP that is told the order of arrival instead of waiting for it.

    It hands its reducer the parameters in that order, and has it lay out its buckets at once: the same
    reckoning on the same order as after the first backward of the first DDP, and DDP does it only once.
    """

    def __init__(self, module: torch.nn.Module, layout: Buckets, **options: Any) -> None:
        self._layout = layout
        super().__init__(module, **options)
        self.reducer._push_all_rebuilt_params()
        made = layout_of(self)
        if made != layout:
            raise JobFailedError(
                f"data_parallel: gradient buckets cannot be laid out as before the fault: {layout} became {made}",
                hint="Call run.data_parallel with the same options each time.",
            )

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]  # torch's has no types
        named = sorted(index for bucket in self._layout for index in bucket)
        if named != list(range(len(parameters))):
            raise JobFailedError(
                f"data_parallel: the module has {len(parameters)} trained parameters; "
                f"before the fault it had {len(named)}",
                hint="Call run.data_parallel for the same modules, in the same order, each time.",
            )
        arrival = _arrival(self._layout, [(each.dtype, each.device) for each in parameters])
        return [parameters[index] for index in arrival], [sparse[index] for index in arrival]


def _arrival(layout: Buckets, kinds: Sequence[Any]) -> list[int]:
    """An order of arrival of parameters of these `kinds`, of which DDP makes `layout`.

    Full buckets come in the order in which they were filled. After them comes the rest of each kind, the kind whose
    first parameter arrived last before the others.
    """
    first: dict[Any, int] = {}
    last: dict[Any, int] = {}
    for number, bucket in enumerate(layout):
        first.setdefault(kinds[bucket[0]], bucket[0])
        last[kinds[bucket[0]]] = number
    begin = [first[kind] for kind in sorted(last, key=last.__getitem__, reverse=True)]
    return [*begin, *(index for bucket in layout for index in bucket if index not in begin)]


class _ReversedDDP(DistributedDataParallel):
    """DDP that takes the reverse of its parameters for the order of arrival, and lays out its buckets at once.

    With sparse gradients the reducer cannot say which layout it has: their buckets have no tensor to show.
    """

    def __init__(self, module: torch.nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]  # torch's has no types
        return parameters[::-1], sparse[::-1]
