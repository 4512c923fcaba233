"""DDP with gradient buckets that keep their layout after a fault, so that sums keep their order.

DDP rebuilds its buckets after the first backward, in the gradients' order of arrival. A ring all-reduce adds each
element's contributions in an order that depends on the element's position in a bucket. A new DDP after a fault would
start from the first layout, and may get another order of arrival: its losses would then differ in the last bits from
those of a run without the fault.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hyperpod_ext.errors import JobFailedError

Buckets = list[list[int]]
"""Indices of the module's trained parameters in each bucket, in the order buckets are reduced."""

_CAN_SKIP_SYNC = "init_sync" in inspect.signature(DistributedDataParallel.__init__).parameters
"""Older torch always sends rank 0's values: this costs time, and changes nothing on ranks with equal values."""


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
    """Make `ddp` a usable DistributedDataParallel, which uses `layout`, if given, from the first step on. Collective.

    init_sync: send rank 0's values to all ranks first, unless the options say otherwise.

    Raises:
        JobFailedError: `layout` does not fit this module.
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
    """Return whether DDP reduces some parameters as sparse tensors, by DDP's own rule."""
    return any(
        isinstance(each, torch.nn.Embedding | torch.nn.EmbeddingBag) and each.sparse for each in module.modules()
    )


def layout_of(ddp: DistributedDataParallel) -> Buckets | None:
    """Return the layout that `ddp` uses from its next step on. Collective: call it after a step, on every rank.

    None before DDP has rebuilt its buckets at the first backward. Always None if DDP never rebuilds them, so that the
    first layout is the same in every DDP of the module: with `find_unused_parameters` or sparse gradients.
    """
    if isinstance(ddp, _ReversedDDP):
        return None
    rebuilt = ddp.reducer._rebuild_buckets()  # the next forward would do this first
    if not rebuilt and not ddp._has_rebuilt_buckets:
        return None
    ignored = ddp.parameters_to_ignore
    trained = [each for name, each in ddp.module.named_parameters() if each.requires_grad and name not in ignored]
    index_of = {id(parameter): index for index, parameter in enumerate(trained)}
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    return [[index_of[id(parameter)] for parameter in bucket.parameters()] for bucket in buckets]


class _PinnedDDP(DistributedDataParallel):
    """DDP with a given order of arrival.

    It passes its reducer the parameters in that order, and lets it build the buckets at once: the same computation from
    the same order as after the first backward of the first DDP. DDP rebuilds only once.
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
    """Return an order of arrival of parameters of these `kinds` from which DDP makes `layout`.

    Full buckets come in the order in which they were filled, followed by the rest of each kind, with the kinds in
    reverse order of their first parameter.
    """
    first: dict[Any, int] = {}
    last: dict[Any, int] = {}
    for number, bucket in enumerate(layout):
        first.setdefault(kinds[bucket[0]], bucket[0])
        last[kinds[bucket[0]]] = number
    begin = [first[kind] for kind in sorted(last, key=last.__getitem__, reverse=True)]
    return [*begin, *(index for bucket in layout for index in bucket if index not in begin)]


class _ReversedDDP(DistributedDataParallel):
    """DDP that uses the reverse of its parameters as the order of arrival, and builds its buckets at once.

    With sparse gradients the reducer cannot return its layout: their buckets have no tensor.
    """

    def __init__(self, module: torch.nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]  # torch's has no types
        return parameters[::-1], sparse[::-1]
