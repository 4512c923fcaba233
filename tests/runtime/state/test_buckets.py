"""Gradient buckets keep their layout from one DDP of a module to the next."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world_of_one import world_of_one
from wrapped_ddp import wrap

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.state import ddp_buckets as buckets


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with world_of_one():
        yield


class Crossed(nn.Module):
    """Uses its layers in another order than it names them, so gradients arrive in an order of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.third(self.first(x)))


def train_step(ddp: nn.Module) -> None:
    ddp(torch.ones(2, 8)).sum().backward()


def test_the_layout_is_known_after_a_step_of_two_micro_batches_that_both_reduce():
    """The second forward lays out anew, in the middle of the step: what follows a fault must do as its end did."""
    model = Crossed()
    ddp = wrap(model, None, bucket_cap_mb=0.0003)
    train_step(ddp)
    train_step(ddp)
    assert buckets.layout_of(ddp) is not None


class Mixed(nn.Module):
    """Layers of several dtypes."""

    def __init__(self, dtypes: list[torch.dtype]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=dtype) for dtype in dtypes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).to(torch.float32)
        return x


@pytest.mark.parametrize("cap_mb", [0.0002, 0.0003, 0.0006, 25])
@pytest.mark.parametrize("seed", range(5))
def test_layouts_of_several_dtypes_are_made_again(seed: int, cap_mb: float) -> None:
    """Buckets of another dtype came in another order, and the job ended at its first fault."""
    drawn = random.Random(seed)
    model = Mixed([drawn.choice((torch.float32, torch.bfloat16, torch.float64)) for _ in range(6)])
    first = wrap(model, None, bucket_cap_mb=cap_mb)
    train_step(first)
    layout = buckets.layout_of(first)
    assert layout is not None
    second = wrap(model, layout, bucket_cap_mb=cap_mb)  # which compares them, and raises
    order = [id(parameter) for parameter in model.parameters()]
    made = second.reducer._get_zeros_like_grad_buckets()
    assert [[order.index(id(each)) for each in bucket.parameters()] for bucket in made] == layout


def test_older_torch_is_not_given_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "_CAN_SKIP_SYNC", False)
    given: list[dict[str, object]] = []
    monkeypatch.setattr(DistributedDataParallel, "__init__", lambda _ddp, _module, **options: given.append(options))
    wrap(nn.Linear(1, 1), None, init_sync=False, bucket_cap_mb=1)
    assert given == [{"bucket_cap_mb": 1}]


def test_the_layout_is_known_after_one_step_and_holds_from_the_first_step_of_the_next():
    model = Crossed()
    first = wrap(model, None, bucket_cap_mb=0.0003)
    assert buckets.layout_of(first) is None
    train_step(first)
    layout = buckets.layout_of(first)
    assert layout is not None
    assert len(layout) > 1
    assert sorted(index for bucket in layout for index in bucket) == list(range(6))
    assert layout != [[5, 4, 3, 2, 1, 0]]
    del first

    second = wrap(model, layout, bucket_cap_mb=0.0003)
    order = [id(parameter) for parameter in model.parameters()]

    def laid_out() -> list[list[int]]:
        made = second.reducer._get_zeros_like_grad_buckets()
        return [[order.index(id(parameter)) for parameter in bucket.parameters()] for bucket in made]

    assert laid_out() == layout
    for _ in range(2):
        train_step(second)
        second.reducer._rebuild_buckets()
        assert laid_out() == layout


def test_where_unused_parameters_are_looked_for_there_is_nothing_to_keep():
    ddp = wrap(Crossed(), None, find_unused_parameters=True)
    train_step(ddp)
    assert buckets.layout_of(ddp) is None


class Embedded(nn.Module):
    """Has a parameter whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 8, sparse=True)
        self.layers = Crossed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.words(x.long()))


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_with_sparse_gradients_the_layout_is_final_from_the_first_step_on(options):
    model = Embedded()
    ddp = wrap(model, None, bucket_cap_mb=0.0003, **options)
    for _ in range(3):
        assert not ddp.reducer._rebuild_buckets()
        train_step(ddp)
        assert buckets.layout_of(ddp) is None
    assert model.words.weight.grad.is_sparse


def test_parameters_that_ddp_ignores_are_in_no_layout():
    model = Crossed()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["second.weight"])
    ddp = wrap(model, None)
    train_step(ddp)
    layout = buckets.layout_of(ddp)
    assert sorted(index for bucket in layout for index in bucket) == list(range(5))
    del ddp
    wrap(model, layout)


def test_another_module_is_refused():
    with pytest.raises(JobFailedError, match="has 2 trained parameters; before the fault it had 6"):
        wrap(nn.Linear(2, 2), [[5, 4], [3, 2, 1, 0]])


def test_other_options_are_refused():
    with pytest.raises(JobFailedError, match="cannot be laid out as before"):
        wrap(Crossed(), [[5, 4, 3], [2, 1, 0]])
