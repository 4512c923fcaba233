"""DDP whose gradient buckets keep their layout after a fault, so that all-reduces add in the same order.

DDP rebuilds its buckets after the first backward pass, in the order in which the gradients became ready. A ring
all-reduce adds the ranks' values of each element in an order that depends on the element's position in a bucket. A new
DDP after a fault would start with the initial layout, and gradients may become ready in another order. Without the
fixed layout, the losses after a fault would differ in the last bits from the losses of a run without the fault.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hyperpod_ext.errors import JobFailedError

Buckets = list[list[int]]
"""For each gradient bucket, the indices of its parameters among the module's trained parameters. Buckets are in the
order in which DDP reduces them."""

_CAN_SKIP_SYNC = "init_sync" in inspect.signature(DistributedDataParallel.__init__).parameters
"""Whether DDP can skip its initial broadcast of rank 0's values. Older torch always broadcasts, which only costs time
if ranks have equal values."""


class IncompleteDDP(DistributedDataParallel):
    """`DistributedDataParallel(module, **options)` without its reducer, until `complete` is called."""

    def __init__(self, module: torch.nn.Module, options: dict[str, Any]) -> None:
        torch.nn.Module.__init__(self)
        self.module, self._options = module, options

    def forward(self, *_: Any, **__: Any) -> Any:
        raise JobFailedError(
            "the result of run.data_parallel was called before its module was registered",
            hint="Register the module first: run.restore(model=...), or run.steps(total, **locals()).",
        )


def complete(ddp: IncompleteDDP, layout: Buckets | None, *, init_sync: bool = True) -> None:
    """Turn `ddp` into a usable DistributedDataParallel. Collective: every rank must call this function.

    Args:
        ddp: the incomplete object, changed in place.
        layout: bucket layout to use from the first step on; None to let DDP choose the layout.
        init_sync: broadcast rank 0's values to all ranks first, unless the script has passed its own `init_sync`.

    Raises:
        JobFailedError: `layout` does not fit the wrapped module.
    """
    module, training, options = ddp.module, ddp.training, {"init_sync": init_sync} | vars(ddp).pop("_options")
    if not _CAN_SKIP_SYNC:
        del options["init_sync"]
    more = () if layout is None else (layout,)
    ddp.__class__ = _kind_of(module, layout, options)  # type: ignore[assignment]  # one of its bases, or a sibling
    ddp.__init__(module, *more, **options)  # type: ignore[misc]  # of the new class
    ddp.training = training


def _kind_of(
    module: torch.nn.Module, layout: Buckets | None, options: Mapping[str, Any]
) -> type[DistributedDataParallel]:
    if layout is not None:
        return _PinnedDDP
    sparse = _has_sparse_gradients(module) and not options.get("find_unused_parameters")
    return _ReversedDDP if sparse else DistributedDataParallel


def _has_sparse_gradients(module: torch.nn.Module) -> bool:
    """Return whether the module has sparse embeddings, whose gradients DDP reduces as sparse tensors."""
    return any(
        isinstance(each, torch.nn.Embedding | torch.nn.EmbeddingBag) and each.sparse for each in module.modules()
    )


def layout_of(ddp: DistributedDataParallel) -> Buckets | None:
    """Return the bucket layout that `ddp` uses from its next step on. Collective: call this function after a step, on
    every rank.

    Returns None until DDP has rebuilt its buckets, after the first backward pass. Returns None if DDP keeps its first
    buckets, which are the same in every process: with `find_unused_parameters` and without `static_graph`, or in
    `_ReversedDDP`.
    """
    if isinstance(ddp, _ReversedDDP):
        return None
    rebuilt = ddp.reducer._rebuild_buckets()  # the next forward pass would also rebuild the buckets
    if not rebuilt and not ddp._has_rebuilt_buckets:
        return None
    ignored = ddp.parameters_to_ignore
    trained = [each for name, each in ddp.module.named_parameters() if each.requires_grad and name not in ignored]
    index_of = {id(parameter): index for index, parameter in enumerate(trained)}
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    return [[index_of[id(parameter)] for parameter in bucket.parameters()] for bucket in buckets]


class _PinnedDDP(DistributedDataParallel):
    """DDP that builds its gradient buckets from a given layout.

    The constructor passes the parameters to DDP's reducer in an order from which the reducer builds `layout`, and makes
    the reducer rebuild its buckets at once. The resulting buckets are equal to those in the given layout. DDP rebuilds
    its buckets only once, so the layout does not change later.
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
    """Return an order of parameters from which DDP builds `layout`, if gradients become ready in this order.

    DDP lists full buckets first, in the order in which they became full. After the full buckets, DDP lists the last,
    partly filled bucket of each kind (dtype and device), with the kinds in reverse order of their first parameter.

    Args:
        layout: the wanted buckets.
        kinds: dtype and device of each parameter.
    """
    first: dict[Any, int] = {}
    last: dict[Any, int] = {}
    for number, bucket in enumerate(layout):
        first.setdefault(kinds[bucket[0]], bucket[0])
        last[kinds[bucket[0]]] = number
    begin = [first[kind] for kind in sorted(last, key=last.__getitem__, reverse=True)]
    return [*begin, *(index for bucket in layout for index in bucket if index not in begin)]


class _ReversedDDP(DistributedDataParallel):
    """DDP that builds its final buckets in the constructor, as if gradients became ready in reverse parameter order.

    The class is used for modules with sparse gradients, because the reducer cannot return the layout of buckets of
    sparse gradients: these buckets have no tensor.
    """

    def __init__(self, module: torch.nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]  # torch's has no types
        return parameters[::-1], sparse[::-1]
