"""What changes from step to step and was not handed to `run.restore` is named; what may change is left alone."""

from __future__ import annotations

import copy
import importlib
import itertools
import random
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from durable_place import Directory
from small_job import MEMORY, SmallJob
from small_job import trained as trained_job
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.utils import parametrize
from torch.optim import lr_scheduler, swa_utils

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime import Run, resilient
from hyperpod_ext.runtime.data import ElasticDataLoader
from hyperpod_ext.runtime.events.report import GIVE_A_GENERATOR, unseeded_text
from hyperpod_ext.runtime.state.unsaved.carried import is_only_set
from hyperpod_ext.runtime.state.unsaved.fingerprints import end_look, is_number
from hyperpod_ext.runtime.state.unsaved.reachable import is_of_script

MODULE_LEVEL = np.random.default_rng(3)
NUMBERS = itertools.count()


class Ema:
    """As people write them."""

    def __init__(self, model: nn.Module, *, deep: bool) -> None:
        self.shadow = copy.deepcopy(model) if deep else {name: p.detach().clone() for name, p in named(model)}

    def update(self, model: nn.Module) -> None:
        for name, parameter in named(model):
            mine = self.shadow if isinstance(self.shadow, dict) else dict(self.shadow.named_parameters())
            mine[name].data.mul_(0.9).add_(parameter.detach(), alpha=0.1)


class EmaWithState(Ema):
    def state_dict(self) -> dict[str, Any]:
        return dict(self.shadow)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state


class Curriculum:
    __slots__ = ("level",)  # as a dataclass may have them

    def __init__(self) -> None:
        self.level = 0


class Data:
    def __init__(self) -> None:
        self.rng = np.random.RandomState(1)


class Replay:
    def __init__(self) -> None:
        self.seen = deque(maxlen=100)
        self.rows = np.zeros((10, 4))


class LossMeter:
    def __init__(self) -> None:
        self.count, self.total, self.since = 0, 0.0, time.time()
        self.last = torch.zeros(3)


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


Each = Callable[[int], object]


def trained(
    make: Callable[[nn.Module, torch.optim.Optimizer], tuple[Any, Each]],
    handed: Callable[[Any], dict[str, Any]] = lambda _: {},
    left_out: bool = False,
    optimizer_handed: bool = True,
) -> None:
    """A job of four steps, with something of one's own beside model and optimizer."""

    def train(run: Run) -> None:
        def build() -> tuple[nn.Module, torch.optim.Optimizer, Any, Each]:
            model = nn.Linear(4, 2)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            return model, optimizer, *make(model, optimizer)

        model, optimizer, extra, each = run.keep(build)
        saved = {"model": model, **({"optimizer": optimizer} if optimizer_handed else {}), **handed(extra)}
        run.restore(**saved)
        if left_out:
            run.leave_out(extra)
        parallel = run.data_parallel(model)
        losses = []
        for step in run.steps(4):
            optimizer.zero_grad()
            loss = parallel(torch.randn(8, 4)).square().mean()
            loss.backward()
            optimizer.step()
            each(step)
            losses.append(loss.detach())

    resilient(train)()


def scheduler(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    schedule = lr_scheduler.StepLR(optimizer, 2)
    return schedule, lambda _: schedule.step()


def averaged(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    average = swa_utils.AveragedModel(model)
    return average, lambda _: average.update_parameters(model)


def ema(kind: type[Ema], *, deep: bool) -> Callable[..., tuple[Any, Each]]:
    def make(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
        copied = kind(model, deep=deep)
        return copied, lambda _: copied.update(model)

    return make


def second_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    other = nn.BatchNorm1d(4)
    return other, lambda _: other(torch.randn(8, 4))


def second_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    other = torch.optim.Adam([nn.Parameter(torch.ones(2))])

    def each(_: int) -> None:
        other.param_groups[0]["params"][0].grad = torch.ones(2)
        other.step()

    return other, each


def scaler(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    scaling = torch.amp.GradScaler("cpu", growth_interval=1)

    def each(_: int) -> None:
        scaling.scale(torch.ones(1, requires_grad=True))
        scaling._found_inf_per_device = lambda _: {}  # type: ignore[method-assign,assignment]
        scaling._scale *= 2

    return scaling, each


def torch_generator(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    generator = torch.Generator().manual_seed(1)
    return generator, lambda _: torch.rand(3, generator=generator)


def numpy_generator(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    generator = np.random.default_rng(1)
    return generator, lambda _: generator.normal(size=5)


def data(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    own = Data()
    return own, lambda _: own.rng.permutation(1000)


def python_generator(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    generator = random.Random(1)
    return generator, lambda _: generator.random()


def in_a_closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    generator = np.random.default_rng(1)
    return None, lambda _: generator.normal(size=5)


def in_the_module(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    return None, lambda _: MODULE_LEVEL.normal(size=5)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (scheduler, r"extra \(StepLR\)"),
        (averaged, r"extra \(AveragedModel, "),
        (ema(Ema, deep=True), r"extra.shadow \(Linear, weight\)"),
        (ema(EmaWithState, deep=False), r"extra \(EmaWithState, shadow.weight\)"),
        (second_model, r"extra \(BatchNorm1d, running_mean\)"),
        (second_optimizer, r"extra \(Adam, step of parameter 0\)"),
        (scaler, r"extra \(GradScaler\)"),
        (torch_generator, r"extra \(Generator\)"),
        (numpy_generator, r"extra \(Generator\)"),
        (python_generator, r"extra \(Random\)"),
        (data, r"extra.rng \(RandomState\)"),
        (in_a_closure, r"generator \(Generator\)"),
        (in_the_module, r"MODULE_LEVEL \(Generator\)"),
    ],
)
def test_what_was_not_handed_over_is_named_at_its_second_step(make: Callable[..., Any], told: str) -> None:
    with pytest.raises(JobFailedError, match=told) as error:
        trained(make)
    assert "run.restore(" in error.value.hint


def test_an_optimizer_that_was_not_handed_over_is_named() -> None:
    with pytest.raises(JobFailedError, match=r"optimizer \(AdamW, step of parameter 0\)"):
        trained(lambda *_: (None, lambda _: None), optimizer_handed=False)


class Position:
    """Hands over what it does not hold by an attribute."""

    def __init__(self, generator: np.random.Generator) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": repr(self.generator.bit_generator.state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("make", "handed"),
    [
        (scheduler, lambda extra: {"schedule": extra}),
        (averaged, lambda extra: {"average": extra}),
        (ema(EmaWithState, deep=False), lambda extra: {"ema": extra}),
        (ema(Ema, deep=True), lambda extra: {"ema": extra.shadow}),
        (numpy_generator, lambda extra: {"position": Position(extra)}),
        (scaler, lambda extra: {"scaler": extra}),
    ],
)
def test_what_was_handed_over_may_change(make: Callable[..., Any], handed: Any, capfd: Any) -> None:
    trained(make, handed)
    assert "no snapshot" not in capfd.readouterr().err


@pytest.mark.parametrize("make", [scheduler, averaged, numpy_generator, ema(Ema, deep=False)])
def test_what_is_said_to_need_no_snapshot_is_left_alone(make: Callable[..., Any], capfd: Any) -> None:
    trained(make, left_out=True)
    assert "no snapshot" not in capfd.readouterr().err


def curriculum(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    own = Curriculum()
    return own, lambda step: setattr(own, "level", step)


def replay(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    own = Replay()
    return own, lambda _: own.seen.append((torch.ones(4), 1.0))


def replay_rows(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    own = Replay()
    return own, lambda step: own.rows.fill(step)


class Reward:
    def __init__(self) -> None:
        self.baseline = 0.0


def reward(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    own = Reward()
    return own, lambda step: setattr(own, "baseline", 0.9 * own.baseline + step)


def average_of_one_value(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    own = {"weight": torch.zeros(3), "bias": torch.zeros(1)}
    return own, lambda step: [each.fill_(step) for each in own.values()]


COUNTED = 0


def counted(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    def each(_: int) -> None:
        global COUNTED
        COUNTED += 1

    return None, each


def counted_in_a_closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    made = 0

    def each(_: int) -> None:
        nonlocal made
        made += 1

    return None, each


def batches() -> Iterator[torch.Tensor]:
    number = 0
    while True:
        number += 1
        yield torch.full((8, 4), float(number))


def rows_of_a_generator(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    rows = batches()
    return rows, lambda _: next(rows)


def smoothed_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    smoothed = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}

    def smooth(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def hook(gradient: torch.Tensor) -> torch.Tensor:
            smoothed[name] = 0.9 * smoothed[name] + 0.1 * gradient
            return smoothed[name].clone()

        return hook

    for name, parameter in model.named_parameters():
        parameter.register_hook(smooth(name))
    return None, lambda step: None


def smoothed_outputs(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    smoothed = {"mean": torch.zeros(2), "square": torch.zeros(2)}

    def hook(_: nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
        smoothed["mean"] = 0.9 * smoothed["mean"] + output.detach().mean(0)
        smoothed["square"] = 0.9 * smoothed["square"] + output.detach().square().mean(0)
        return output - 0.01 * smoothed["mean"]

    model.register_forward_hook(hook)
    return None, lambda step: None


def rows_of_a_list(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    rows = itertools.cycle(enumerate([torch.rand(8, 4) for _ in range(9)]))
    return rows, lambda _: next(rows)


def plain_loader(workers: int = 0) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.rand(40, 4)), 8, num_workers=workers)


def rows_of_a_loader(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    rows = iter(plain_loader())
    return rows, lambda _: next(rows)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (ema(Ema, deep=False), "extra.shadow (dict)"),
        (average_of_one_value, "extra (dict)"),
        (reward, "extra (Reward)"),
        (counted, "COUNTED (int)"),
        (counted_in_a_closure, "made (int)"),
        (rows_of_a_generator, "extra (generator)"),
        (rows_of_a_list, "extra (cycle)"),
        (rows_of_a_loader, "extra (_SingleProcessDataLoaderIter)"),
        (curriculum, "extra (Curriculum)"),
        (replay, "extra.seen (deque)"),
        (smoothed_gradients, "smoothed (dict)"),
        (smoothed_outputs, "smoothed (dict)"),
        (replay_rows, "extra (Replay)"),
    ],
)
def test_what_may_be_state_is_warned_of(make: Callable[..., Any], told: str, capfd: Any) -> None:
    trained(make)
    warned = capfd.readouterr().err
    assert told in warned
    assert warned.count("is in no snapshot") == 1


def meter(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    own = LossMeter()

    def each(step: int) -> None:
        own.count, own.total, own.since, own.last = step, own.total + 0.5, time.time(), torch.rand(3)

    return own, each


def losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    seen: list[Any] = []
    return seen, lambda step: seen.extend([0.5, torch.rand(1), {"step": step, "loss": 1.0}])


def seeded_each_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    own = {"torch": torch.Generator(), "numpy": np.random.RandomState(1), "python": random.Random(1)}

    def each(step: int) -> None:
        torch.rand(3, generator=own["torch"].manual_seed(step))
        own["numpy"].seed(step)
        own["numpy"].rand(5)
        own["python"].seed(step)
        own["python"].random()
        own["new"] = np.random.default_rng(step)
        own["new"].normal()

    return own, each


def copied_each_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    other = copy.deepcopy(model)
    return other, lambda _: other.load_state_dict(model.state_dict())


def loader(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    rows = torch.utils.data.TensorDataset(torch.arange(2))
    own = torch.utils.data.DataLoader(rows, shuffle=True, generator=torch.Generator().manual_seed(1))
    return [own, own.generator], lambda _: list(own)


@pytest.mark.parametrize("uptime_s", [5.0, 100.0, 3600.0])
def test_a_number_is_no_time_because_the_machine_has_just_booted(
    uptime_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: uptime_s)
    for number in (0.0, 0.9, 3.2):
        assert is_number(number)
    for moment in (uptime_s, uptime_s * 0.95, time.time(), time.time() - 500):
        assert not is_number(moment)


def test_a_time_that_was_read_in_the_step_is_one_however_long_the_step_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that has just booted, a busy one made a long step of it, and the time was taken for state."""
    now = [50.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    end_look()
    now[0] = 90.0
    assert not is_number(52.0)
    assert is_number(48.0)
    end_look()
    assert is_number(52.0)
    monkeypatch.undo()
    end_look()


def evaluated_now_and_then(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    generator = torch.Generator().manual_seed(0)
    return generator, lambda step: step % 2 or torch.rand(3, generator=generator.manual_seed(0))


def timer(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    return (profiler, [time.time()]), lambda _: profiler.step()


def passing_buffer(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    other = nn.Module()
    other.register_buffer("cache", torch.zeros(3), persistent=False)
    return other, lambda step: other.cache.fill_(step)


def input_buffer(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Each]:
    static = torch.zeros(8, 4)
    return static, lambda step: static.copy_(torch.randn(8, 4))


@pytest.mark.parametrize(
    "make",
    [
        *(meter, losses, seeded_each_step, copied_each_step, loader),
        *(evaluated_now_and_then, timer, passing_buffer, input_buffer),
    ],
)
def test_what_training_does_not_depend_on_may_change(make: Callable[..., Any], capfd: Any) -> None:
    trained(make)
    assert "no snapshot" not in capfd.readouterr().err


def looped(body: Callable[[Run], object]) -> None:
    """A job whose loop is `body`."""

    def train(run: Run) -> None:
        model = run.keep(lambda: nn.Linear(4, 2))
        run.restore(model=model)
        body(run)

    resilient(train)()


def baseline(run: Run) -> None:
    mean, hidden, previous, best = 0.0, torch.zeros(4), None, 9.0
    columns = torch.zeros(4, 4).t()
    began, total = time.time(), 0
    for _ in run.steps(4):
        loss = float(torch.rand(1))
        mean = 0.9 * mean + 0.1 * loss
        hidden = hidden.detach() * 0.5 + loss
        columns = (columns.t() * 0.5 + loss).t()
        if previous is not None and loss < previous:
            best = loss
        previous = loss
        took = time.time() - began
        began = time.time()
        if total > 100:
            break
    print(best, took, loss)


def with_a_loader(run: Run) -> None:
    for _, (rows,) in zip(run.steps(4), plain_loader(), strict=False):
        assert len(rows) == 8


def from_a_generator(run: Run) -> None:
    for _, rows in zip(run.steps(4), batches(), strict=False):
        assert len(rows) == 8


def left_out_by_name(run: Run) -> None:
    mean = 0.0
    run.leave_out("mean")
    for _ in run.steps(4):
        mean = 0.9 * mean + 0.1 * float(torch.rand(1))


def left_out_loader(run: Run) -> None:
    rows = plain_loader()
    run.leave_out(rows)
    for _, _ in zip(run.steps(4), rows, strict=False):
        pass


def with_our_loader(run: Run) -> None:
    rows = ElasticDataLoader(torch.rand(99, 4), global_batch_size=4, micro_batch_size=4, rank=0, world_size=1)
    run.leave_out(rows)
    for _, batch in zip(run.steps(4), rows.steps(), strict=False):
        rows.ack(batch)


def set_before_it_is_read(run: Run) -> None:
    loss = rows = None
    for step in run.steps(4):
        rows = [step * each for each in range(3)]
        total = 0.0
        for each in rows:
            total += each
        loss = total
    print(loss, rows)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (baseline, ["columns (Tensor)", "hidden (Tensor)", "mean (float)", "previous (float)"]),
        (with_a_loader, ["_SingleProcessDataLoaderIter iterated with run.steps"]),
        (from_a_generator, ["generator iterated with run.steps"]),
        *((each, []) for each in (left_out_by_name, left_out_loader, with_our_loader, set_before_it_is_read)),
    ],
)
def test_what_a_loop_carries_on_is_warned_of(body: Callable[[Run], object], told: list[str], capfd: Any) -> None:
    looped(body)
    warned = capfd.readouterr().err
    found = re.search("hyperpod_ext: (.*) changed in the first two steps", warned)
    assert (found[1].split(", ") if found else []) == told


class Annealed(nn.Module):
    """Divides by a number that falls with each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.temperature, self.size = nn.Linear(4, 2), 1.0, 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.temperature *= 0.9
        out: torch.Tensor = self.inner(x) / self.temperature
        return out


class AnnealedAndSaved(Annealed):
    def get_extra_state(self) -> Any:
        return torch.tensor(self.temperature)

    def set_extra_state(self, state: Any) -> None:
        self.temperature = float(state)


class Carried(nn.Module):
    """Keeps tensors in plain attributes, which are in no `state_dict()`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = nn.Linear(4, 4), kind
        self.scale = nn.Parameter(torch.ones(4))
        self.kept: Any = (torch.ones(4), 0) if kind == "tuple" else np.ones(4) if kind == "array" else torch.ones(4)
        if kind == "transposed":  # not contiguous: values are not read, as on a GPU
            self.kept = torch.ones(4, 4).t()
        if kind == "pair":
            self.kept = (torch.ones(4, 4).t(), torch.ones(4, 4).t())
        if kind == "parametrized":  # gives the module another class, as `fully_shard` does
            parametrize.register_parametrization(self, "scale", nn.Softplus())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        match self.kind:
            case "transposed":
                self.kept = (self.kept.t() * 0.9).t()
            case "pair":
                self.kept = tuple((each.t() * 0.9).t() for each in self.kept)
            case "replaced" | "parametrized":
                self.kept = self.kept * 0.9 + out.detach().mean(0)
            case "in place":
                self.kept.mul_(0.9)
            case "tuple":
                self.kept = (self.kept[0] * 0.9, self.kept[1] + 1)
            case "array":
                self.kept = self.kept * 0.9
        return out


class Produced(nn.Module):
    """Leaves results of each pass in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.auxiliary: Any = torch.zeros(())
        self.output: Any = None
        self.score: Any = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        self.auxiliary, self.output = out.square().mean(), (out.detach(), 3)
        self.auxiliary = self.auxiliary + Result(out).score
        self.score = Result(out).score
        return out + self.auxiliary


class Result:
    """What another library's module returns."""

    def __init__(self, out: torch.Tensor) -> None:
        self.score = out.detach().mean()


UTILS = """
import collections
import torch

STATE = {"mean": 0.0}
NESTED = collections.OrderedDict(of={"count": 0})
TENSORS = {}
COUNT = 0
AVERAGE = torch.zeros(3)
SEEN = collections.Counter()
IN_A_METHOD = {"weight": 1.0}
CONFIG = {"rate": 0.1, "layers": [1, 2, 3]}
TABLES = {}
OUTPUTS = {}
METRICS = {"loss": 0.0}
LATEST = {}


class Temperature:
    value = None
    scale = 2.0
    losses = {"value": 1.0}

    @classmethod
    def anneal(cls):
        cls.value = 0.9 * (cls.value or 1.0)

    @staticmethod
    def add():
        weigh()


class Rewards:
    def add(self):
        weigh()


REWARDS = Rewards()
del Rewards


class Position:
    latest = 0
    rows = []
    metric = 0.0


def weigh():
    IN_A_METHOD["weight"] *= 0.5


def count():
    global COUNT
    COUNT += 1


def average():
    global AVERAGE
    AVERAGE = 0.9 * AVERAGE + 1


def follow(model):
    for name, parameter in model.named_parameters():
        if name not in TENSORS:
            TENSORS[name] = parameter.detach().clone()
        else:
            TENSORS[name].mul_(0.9).add_(parameter.detach(), alpha=0.1)


def smooth(model):
    for name, parameter in model.named_parameters():
        TENSORS[name] = 0.9 * TENSORS.get(name, 0.0) + parameter.detach()


def table(size):
    if size not in TABLES:
        TABLES[size] = torch.arange(size)
    return TABLES[size]


def output(model, inputs, found):
    OUTPUTS["first"], OUTPUTS["second"] = found.detach(), found.detach() * 2


def measure(step):
    METRICS["loss"] += 1.0 / step
    LATEST["step"] = step
    return LATEST["step"] + METRICS["loss"]
"""


SCRIPT = """
import torch
from torch import nn

import {project}.others
from {project} import utils


def train(run):
    model = run.keep(lambda: nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.restore(model=model, optimizer=optimizer)
    model.register_forward_hook(utils.output)
    for step in run.steps(4):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        {body}
"""


@pytest.fixture
def train_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that trains by a script of two modules, the loop of which ends with a statement."""

    def train(statement: str) -> None:
        project = tmp_path / f"project_{next(NUMBERS)}"
        project.mkdir()
        (project / "__init__.py").touch()
        (project / "utils.py").write_text(UTILS)
        (project / "others.py").write_text(UTILS)
        (project / "train.py").write_text(SCRIPT.replace("{body}", statement).replace("{project}", project.name))
        monkeypatch.syspath_prepend(str(tmp_path))
        resilient(importlib.import_module(f"{project.name}.train").train)()

    return train


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ('utils.STATE["mean"] = 0.9 * utils.STATE["mean"] + step', "utils.STATE (dict)"),
        ('{project}.utils.STATE["mean"] += step', "utils.STATE (dict)"),
        ('from .utils import STATE; STATE["mean"] += step', "STATE (dict)"),
        ('from . import others; others.STATE["mean"] += step', "others.STATE (dict)"),
        ('import {project}.others as more; more.STATE["mean"] += step', "others.STATE (dict)"),
        ('utils.NESTED["of"]["count"] += 1', "utils.NESTED['of'] (dict)"),
        ('utils.SEEN["rows"] += step', "utils.SEEN (Counter)"),
        ("utils.COUNT += 1", "utils.COUNT (int)"),
        ("utils.count()", "utils.COUNT (int)"),
        ("[utils.count() for _ in range(2)]", "utils.COUNT (int)"),
        ("utils.average()", "utils.AVERAGE (Tensor)"),
        ("utils.Temperature.anneal()", "Temperature.value (float)"),
        ("utils.Position.latest = step", "Position.latest (int)"),
        ("utils.REWARDS.add()", "IN_A_METHOD (dict)"),
        ("utils.Temperature.add()", "IN_A_METHOD (dict)"),
        ("utils.follow(model)", "TENSORS (dict)"),
        ("utils.smooth(model)", "TENSORS (dict)"),
    ],
)
def test_state_in_another_module_of_the_script_and_in_classes_is_warned_of(
    statement: str, told: str, train_with: Callable[[str], None], capfd: Any
) -> None:
    train_with(statement)
    warned = capfd.readouterr().err
    assert told in warned
    assert warned.count("is in no snapshot") == 1
    name = re.findall(r"[A-Za-z_]+", told.replace("['of']", ""))[-2]
    line = 1 + next(n for n, line in enumerate(UTILS.splitlines()) if re.match(rf"(    )?{name} = ", line))
    assert re.search(rf"at (utils|others)\.py:{line}\b", warned)


def test_a_number_that_a_module_changes_in_its_passes_is_warned_of(capfd: Any) -> None:
    def train(run: Run) -> None:
        model = run.keep(Annealed)
        run.restore(model=model)
        for _ in run.steps(4):
            model(torch.randn(8, 4))

    resilient(train)()
    warned = capfd.readouterr().err
    assert "hyperpod_ext: model.temperature (float) changed in the first two steps" in warned
    assert f"First set: model.temperature at {Path(__file__).name}:{train.__code__.co_firstlineno + 1}." in warned


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("replaced", "Tensor"),
        ("in place", "Tensor"),
        ("tuple", "tuple"),
        ("array", "ndarray"),
        ("transposed", "Tensor"),
        ("pair", "tuple"),
        ("parametrized", "Tensor"),
    ],
)
def test_a_tensor_that_a_module_carries_in_an_attribute_is_warned_of(kind: str, named: str, capfd: Any) -> None:
    def train(run: Run) -> None:
        model = run.keep(lambda: Carried(kind))
        run.restore(model=model)
        for _ in run.steps(4):
            model(torch.randn(8, 4))

    resilient(train)()
    assert f"hyperpod_ext: model.kept ({named}) changed in the first two steps" in capfd.readouterr().err


def test_results_that_a_module_leaves_in_attributes_are_not_warned_of(capfd: Any) -> None:
    def train(run: Run) -> None:
        model = run.keep(Produced)
        run.restore(model=model)
        for _ in run.steps(4):
            (model(torch.randn(8, 4)).mean() + model.auxiliary).backward()
            model.zero_grad()

    resilient(train)()
    assert "no snapshot" not in capfd.readouterr().err


def test_what_was_left_out_of_a_module_and_what_cannot_be_read_is_not_warned_of(capfd: Any) -> None:
    def train(run: Run) -> None:
        model = run.keep(lambda: nn.Sequential(Carried("in place"), Carried("none")))
        run.restore(model=model)
        run.leave_out(model[0])
        for step in run.steps(4):
            model[1].kept = torch.nested.nested_tensor([torch.ones(step), torch.ones(2)])
            model(torch.randn(8, 4))

    resilient(train)()
    assert "no snapshot" not in capfd.readouterr().err


def test_what_a_module_saves_itself_and_what_was_left_out_is_not_warned_of(capfd: Any) -> None:
    def train(run: Run) -> None:
        saves, left_out = run.keep(lambda: (AnnealedAndSaved(), Annealed()))
        run.restore(saves=saves)
        run.leave_out(left_out)
        for _ in run.steps(4):
            saves(torch.randn(8, 4))
            left_out(torch.randn(8, 4))

    resilient(train)()
    assert "no snapshot" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "statement",
    [
        "pass",
        'utils.CONFIG["rate"]',
        "utils.table(8)",
        "utils.measure(step)",
        "utils.Position.rows = [step]",
        "utils.Position.metric = 1.0 / step",
        "utils.Temperature.losses.update(value=1.0 / step)",
    ],
)
def test_tables_settings_outputs_and_metrics_in_another_module_are_not_warned_of(
    statement: str, train_with: Callable[[str], None], capfd: Any
) -> None:
    train_with(statement)
    assert "no snapshot" not in capfd.readouterr().err


ITEMS: dict[str, float] = {}


def replaced(value: float) -> None:
    ITEMS["value"] = value


def replaced_and_read(value: float) -> float:
    ITEMS["loss"] = value
    ITEMS["rate"] = value / 2
    return ITEMS["loss"]


def read_of_another_item(value: float) -> None:
    seen = ITEMS.keys() if value else ()
    ITEMS["rate"] = value * len(seen)


def of_another_item(value: float) -> None:
    ITEMS["rate"] = ITEMS["loss"] * value


def smoothed_item(name: str) -> None:
    ITEMS[name] = 0.9 * ITEMS[name] + 1


def counted_item(name: str) -> None:
    ITEMS["rate"] = 0.0
    ITEMS[name] += 1


@pytest.mark.parametrize(
    ("functions", "only_set"),
    [
        ([replaced], True),
        ([replaced, replaced_and_read], True),
        ([of_another_item], True),
        ([read_of_another_item], False),
        ([smoothed_item], False),
        ([replaced, counted_item], False),
        ([named], False),
    ],
)
def test_items_are_only_set_if_no_function_reads_one_before_it_sets_it(
    functions: list[Callable[..., Any]], only_set: bool
) -> None:
    assert is_only_set([each.__code__ for each in functions], "ITEMS") is only_set


class Compressed:
    """A hook's state in slots, as torch's PowerSGDState has it."""

    __slots__ = ("errors", "process_group")

    def __init__(self) -> None:
        self.errors: dict[int, torch.Tensor] = {}
        self.process_group = dist.group.WORLD


def feedback(state, bucket):  # DDP takes no annotations that are text
    """Keeps what rounding loses for the next step."""
    gradient = bucket.buffer() + state.errors.get(bucket.index(), 0.0)
    rounded = gradient.bfloat16().float()
    state.errors[bucket.index()] = gradient - rounded
    return default_hooks.allreduce_hook(state.process_group, RoundedBucket(rounded))


class RoundedBucket:
    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def buffer(self) -> torch.Tensor:
        return self._buffer


def hooked(register: Callable[[Run, Any], object]) -> None:
    """A job of four steps whose DDP reduces its gradients by a hook."""

    def train(run: Run) -> None:
        model = run.keep(lambda: nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.restore(model=model, optimizer=optimizer)
        parallel = run.data_parallel(model)
        register(run, parallel)
        for _ in run.steps(4):
            optimizer.zero_grad()
            parallel(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()

    resilient(train)()


def power_sgd(run: Run, parallel: Any) -> None:
    state = powerSGD_hook.PowerSGDState(process_group=None, start_powerSGD_iter=1000)
    parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def own_feedback(run: Run, parallel: Any) -> None:
    parallel.register_comm_hook(Compressed(), feedback)


def feedback_in_a_closure(run: Run, parallel: Any) -> None:
    kept = Compressed()

    def closed_over(_, bucket):
        return feedback(kept, bucket)

    parallel.register_comm_hook(None, closed_over)


@pytest.mark.parametrize(
    ("register", "named"),
    [
        (power_sgd, "powerSGD_hook.state (PowerSGDState)"),
        (own_feedback, "feedback.state (Compressed)"),
        (feedback_in_a_closure, "closed_over.state (function)"),
    ],
)
def test_a_communication_hook_that_keeps_something_is_refused_at_the_second_step(register: Any, named: str) -> None:
    with pytest.raises(JobFailedError, match=re.escape(f"{named} changes from step to step and is in no snapshot")):
        hooked(register)


def test_a_communication_hook_without_state_or_with_state_that_was_left_out_is_not_named() -> None:
    def known_feedback(run: Run, parallel: Any) -> None:
        state = Compressed()
        run.leave_out(state)
        parallel.register_comm_hook(state, feedback)

    hooked(known_feedback)
    hooked(lambda run, parallel: parallel.register_comm_hook(None, default_hooks.fp16_compress_hook))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_without_a_generator_is_named_with_the_cure(workers: int, capfd: Any) -> None:
    """Also one that was left out, as docs/faults.md advises for a loader that begins where the job goes on."""

    def loop(run: Run) -> None:
        rows, seeded = plain_loader(workers), plain_loader()
        seeded.generator = torch.Generator()
        run.leave_out(rows, seeded)
        assert len(list(run.steps(4))) == 4

    looped(loop)
    (warned,) = [line for line in capfd.readouterr().err.splitlines() if "no generator=" in line]
    assert warned == f"hyperpod_ext: {unseeded_text(['rows (DataLoader)'])} {GIVE_A_GENERATOR}"


@pytest.mark.parametrize(("step", "durable", "looks"), [(1, False, True), (2, False, False), (2, True, True)])
def test_who_takes_anothers_place_looks_where_the_others_may_not_have(
    tmp_path: Path, step: int, durable: bool, looks: bool
) -> None:
    """They have once this run has made two steps. What comes from a durable tier, another run may have made."""
    job = trained_job(SmallJob(tmp_path / "job", tiers=(MEMORY, Directory(tmp_path / "durable").tier())).start(), step)
    try:
        if durable:
            job.lose_node(0)
            job.start_node(0)
        assert job.resume() == step
        assert job.ranks[0].run._unsaved.is_done is not looks
    finally:
        job.stop()


def test_a_package_of_an_environment_that_this_one_goes_on_to_is_no_script(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As with --system-site-packages: what torch's own objects hold is not looked at there either."""
    for folder, theirs in (("lib/python3/dist-packages", True), ("job", False)):
        (tmp_path / folder).mkdir(parents=True)
        name = f"module_of_{'a_package' if theirs else 'the_script'}"
        (tmp_path / folder / f"{name}.py").touch()
        monkeypatch.syspath_prepend(str(tmp_path / folder))
        importlib.import_module(name)
        assert is_of_script(name) is not theirs
