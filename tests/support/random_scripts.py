"""Training scripts as people write them, drawn at random, with the faults that strike them.

    python tests/support/random_scripts.py 17 > train.py

prints script 17. A script ends with a file of digests, one of each object that it has, which two runs of it must agree
on. `drawn(seed)` gives a script and its faults; the same seed gives the same.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import random_kinds

STEPS = 12
FIRST_WITH_MORE = 200
"""Scripts from here on may be compiled, and lose nodes; those before are as they were."""
FIRST_OF_STRANGERS = 300
"""Scripts from here on may have what people write without a look at our pages, and forget more."""
FIRST_OF_KINDS = 1000
"""Scripts from here on have one or two of the kinds of state in `random_kinds`, and forget nothing."""
PARALLEL = ("alone", "ddp", "fsdp2", "tp")


@dataclass
class Script:
    """Lines of a script by the place where they stand."""

    seed: int
    parallel: str = "ddp"
    ranks: int = 2
    imports: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    build: list[str] = field(default_factory=list)
    """Lines of the function that `run.keep` is called with; each makes variables that are in `kept`."""
    kept: list[str] = field(default_factory=list)
    handed: list[str] = field(default_factory=list)
    """Of those, and of `made`, what is handed to `run.restore`."""
    made: list[str] = field(default_factory=list)
    """Lines before `run.restore`, in each call of the training function."""
    before: list[str] = field(default_factory=list)
    """Lines between `run.restore` and the loop."""
    sample: list[str] = field(default_factory=list)
    """Lines that give `x` and `wanted` of one micro-batch, for `micro` of `MICRO`."""
    body: list[str] = field(default_factory=list)
    loop: str = "for step in run.steps(STEPS):"
    traits: list[str] = field(default_factory=list)
    """What it has, in words."""
    forgotten: str = ""
    """Object that is not handed to `run.restore`: the job must name it."""
    warned: str = ""
    """What changes from step to step and is handed to nobody, as the job must name it; it may train nevertheless."""
    kinds: list[str] = field(default_factory=list)
    """Names in `random_kinds.KINDS`."""
    refusable: list[str] = field(default_factory=list)
    """What a job may refuse before its third step, as its error must name it."""
    refused: str = ""
    """What a job must refuse, as its error must name it."""
    may_warn: str = ""
    """What may not come back as it was, if a warning names it."""
    is_nested: bool = False
    """Whether the loop is in another one."""
    faults: list[str] = field(default_factory=list)
    """As HPX_CHAOS takes them."""
    lost_node: tuple[int, int] | None = None
    """A node that is lost, and the step in which; a spare takes its place."""
    nodes: int = 1
    every_steps: int = 1
    """Steps between two snapshots in memory."""
    overlap: bool = False
    """Whether snapshots are copied beside the next step."""

    def text(self) -> str:
        """The script."""
        build = [*self.build, f"return {', '.join(self.kept)}"]
        handed = ", ".join(f"{name}={name}" for name in self.handed if name != self.forgotten)
        ends = ", ".join(f'"{name}": {name}' for name in self.handed)
        return _TEMPLATE.format(
            traits="; ".join(self.traits),
            imports="\n".join(self.imports),
            steps=STEPS,
            classes="\n\n".join(self.classes),
            build=_indented(build, 2),
            kept=", ".join(self.kept),
            made=_indented(self.made, 1),
            handed=handed,
            before=_indented(self.before, 1),
            loop=self.loop,
            body=_indented(self.body, 3 if self.is_nested else 2),
            ends=ends,
        )


_TEMPLATE = '''"""{traits}."""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
{imports}
from hyperpod_ext.runtime import Run, resilient

STEPS = {steps}


def digest_of(value):
    """Over all numbers of a state."""
    digest = hashlib.sha256()

    def see(path, part):
        if isinstance(part, torch.Tensor):
            part = part.detach()
            part = (part.to_local() if hasattr(part, "to_local") else part).contiguous()
            digest.update(repr((path, part.shape)).encode() + part.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(part, dict):
            for key, inner in part.items():
                see((*path, key), inner)
        elif isinstance(part, list | tuple):
            for index, inner in enumerate(part):
                see((*path, index), inner)
        else:
            digest.update(repr((path, part)).encode())

    see((), value.state_dict())
    return digest.hexdigest()


{classes}


@resilient
def train(run: Run) -> None:
    def build():
{build}

    {kept} = run.keep(build)
{made}
    run.restore({handed})
{before}
    losses = []
    {loop}
{body}
    ends = {{{ends}}}
    ends = {{name: digest_of(value) for name, value in ends.items()}}
    Path(os.environ["HPX_RUN_DIR"], f"end-{{run.rank}}.json").write_text(json.dumps(ends))


train()
'''


def _indented(lines: Sequence[str], depth: int) -> str:
    return "\n".join("    " * depth + line for entry in lines for line in entry.split("\n"))


def drawn(seed: int, *, ranks: int | None = None, parallel: str | None = None) -> Script:
    """A script, and one to three faults."""
    if seed >= FIRST_OF_KINDS:
        return _of_kinds(seed)
    script = _base(seed, random.Random(seed), ranks, parallel)
    if seed >= FIRST_WITH_MORE:
        _more(script, random.Random(f"more of {seed}"))
    if seed >= FIRST_OF_STRANGERS and not script.forgotten:
        _of_strangers(script, random.Random(f"a stranger's {seed}"))
    return script


def _of_kinds(seed: int) -> Script:
    """A script with one or two kinds of state of `random_kinds`; each kind is the first of as many seeds."""
    kinds = sorted(random_kinds.KINDS)
    for attempt in range(1000):
        draw = random.Random(f"{seed}, {attempt}")
        script = _base(seed, draw, None, draw.choice(("alone", "ddp", "ddp", "ddp", "fsdp2")))
        script.forgotten = ""
        _more(script, draw)
        if random_kinds.add_kinds(script, draw, kinds[(seed - FIRST_OF_KINDS) % len(kinds)]):
            return script
    raise AssertionError(f"no script has a place for the kind of seed {seed}")


def _base(seed: int, draw: random.Random, ranks: int | None, parallel: str | None) -> Script:
    script = Script(seed, parallel or draw.choices(PARALLEL, (2, 6, 3, 1))[0])
    script.ranks = 1 if script.parallel == "alone" else ranks or draw.choice((2, 2, 3))
    if script.parallel == "tp":
        script.ranks = 2
    if script.ranks == 2 and draw.random() < 0.3:
        script.nodes = 2
    script.traits.append(f"{script.parallel} on {script.ranks}, {script.nodes} nodes")
    script.every_steps = draw.choice((1, 1, 2, 4))
    script.traits.append(f"a snapshot every {script.every_steps}")
    _model(script, draw)
    _optimizers(script, draw)
    _schedule(script, draw)
    _data(script, draw)
    _step(script, draw)
    _extras(script, draw)
    if draw.random() < 0.1:
        _forget(script, draw)
    _faults(script, draw)
    return script


def _model(script: Script, draw: random.Random) -> None:
    kinds = ["mlp", "norm", "attention", "gru", "tied"]
    if script.parallel in ("alone", "ddp"):
        kinds += ["batch norm", "convolution"]
    kind = "mlp" if script.parallel == "tp" else draw.choice(kinds)
    dropout = draw.choice((0.0, 0.1, 0.3))
    script.traits.append(f"model: {kind}, dropout {dropout}")
    script.classes.append(_MODELS[kind].replace("DROPOUT", str(dropout)))
    script.build.append("model = Model()")
    script.kept.append("model")
    script.handed.append("model")
    if script.parallel == "fsdp2":
        script.imports.append(
            "from torch.distributed.device_mesh import init_device_mesh\nfrom torch.distributed.fsdp import fully_shard"
        )
        script.build.append('mesh = init_device_mesh("cpu", (run.world_size,))')
        script.build.append("for part in model.parts():\n    fully_shard(part, mesh=mesh)")
        script.build.append("fully_shard(model, mesh=mesh)")
    elif script.parallel == "tp":
        script.imports.append(
            "from torch.distributed.device_mesh import init_device_mesh\n"
            "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module"
        )
        script.build.append('mesh = init_device_mesh("cpu", (run.world_size,))')
        script.build.append(
            'parallelize_module(model, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})'
        )
    if kind == "mlp" and script.parallel in ("alone", "ddp") and draw.random() < 0.4:
        wrapped = draw.choice(("weight_norm", "spectral_norm"))
        script.imports.append(f"from torch.nn.utils.parametrizations import {wrapped}")
        script.build.append(f"{wrapped}(model.first)")
        script.traits.append(wrapped)
    if script.parallel != "tp" and draw.random() < 0.15:
        script.build.append("next(model.parameters()).requires_grad_(False)")
        script.traits.append("a frozen parameter")
    options = []
    if script.parallel == "ddp":
        options = [each for each in ("gradient_as_bucket_view", "find_unused_parameters") if draw.random() < 0.25]
        script.traits += options
    wrap = f"run.data_parallel({', '.join(['model', *(f'{each}=True' for each in options)])})"
    script.before.append(f"parallel = {wrap if script.parallel == 'ddp' else 'model'}")


_MODELS = {
    "mlp": """class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 1)
        self.dropout = nn.Dropout(DROPOUT)

    def parts(self):
        return [self.first, self.second]

    def forward(self, x):
        return self.second(self.dropout(torch.relu(self.first(x)))).squeeze(-1)""",
    "norm": """class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 1, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.dropout = nn.Dropout(DROPOUT)

    def parts(self):
        return [self.first]

    def forward(self, x):
        if self.training:
            self.seen += 1
        return self.scale * self.second(self.dropout(F.gelu(self.norm(self.first(x))))).squeeze(-1)""".replace(
        "nn.Parameter(torch.ones(()))", "nn.Parameter(torch.ones(1))"
    ),
    "attention": """class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=DROPOUT, batch_first=True)
        self.outer = nn.Linear(8, 1)

    def parts(self):
        return [self.inner]

    def forward(self, x):
        x = self.inner(x.view(len(x), 4, 2))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.outer(x.mean(1)).squeeze(-1)""",
    "gru": """class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(2, 12)
        self.head = nn.Linear(12, 1)
        self.dropout = nn.Dropout(DROPOUT)

    def parts(self):
        return [self.head]

    def forward(self, x):
        hidden = torch.zeros(len(x), 12)
        for place in range(4):
            hidden = self.cell(x[:, 2 * place : 2 * place + 2], hidden)
        return self.head(self.dropout(hidden)).squeeze(-1)""",
    "tied": """class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.leave.weight = self.enter.weight
        self.head = nn.Linear(8, 1)
        self.dropout = nn.Dropout(DROPOUT)

    def parts(self):
        return [self.head]

    def forward(self, x):
        return self.head(self.dropout(self.leave(torch.tanh(self.enter(x))))).squeeze(-1)""",
    "batch norm": """class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(DROPOUT), nn.Linear(16, 1)
        )

    def forward(self, x):
        return self.layers(x).squeeze(-1)""",
    "convolution": """class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.SiLU(), nn.Dropout1d(DROPOUT), nn.Flatten()
        )
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.layers(x.unsqueeze(1))).squeeze(-1)""",
}


def _optimizers(script: Script, draw: random.Random) -> None:
    kinds = [
        "torch.optim.SGD({p}, lr=0.05, momentum=0.9, nesterov=True)",
        "torch.optim.AdamW({p}, lr=3e-3)",
        "torch.optim.Adam({p}, lr=3e-3, amsgrad=True)",
        "torch.optim.RMSprop({p}, lr=1e-3, centered=True)",
        "torch.optim.NAdam({p}, lr=3e-3)",
    ]
    if script.parallel in ("alone", "ddp"):
        kinds += [
            "torch.optim.AdamW({p}, lr=3e-3, fused=True)",
            "torch.optim.Adagrad({p}, lr=1e-2)",
            "torch.optim.SGD({p}, lr=0.05, foreach=False)",
        ]
    names = ["optimizer"]
    first = draw.choice(kinds)
    if draw.random() < 0.25:
        second = draw.choice(kinds)
        script.build.append("inner, outer = list(model.parameters())[::2], list(model.parameters())[1::2]")
        script.build.append(f"optimizer = {first.format(p='inner')}\nsecond_optimizer = {second.format(p='outer')}")
        names.append("second_optimizer")
        script.traits.append(f"two optimizers: {first.split('(')[0]}, {second.split('(')[0]}")
    elif draw.random() < 0.3:
        script.build.append(
            "groups = [{'params': [p for p in model.parameters() if p.dim() > 1], 'weight_decay': 0.1},\n"
            "    {'params': [p for p in model.parameters() if p.dim() <= 1], 'weight_decay': 0.0}]"
        )
        script.build.append(f"optimizer = {first.format(p='groups')}")
        script.traits.append(f"two groups: {first.split('(')[0]}")
    else:
        script.build.append(f"optimizer = {first.format(p='model.parameters()')}")
        script.traits.append(first.format(p="…"))
    script.kept += names
    script.handed += names


def _schedule(script: Script, draw: random.Random) -> None:
    schedules = {
        "StepLR": "StepLR(optimizer, step_size=3, gamma=0.7)",
        "OneCycleLR": "OneCycleLR(optimizer, max_lr=0.01, total_steps=STEPS + 1, "
        'cycle_momentum="betas" in optimizer.defaults)',
        "CosineAnnealingWarmRestarts": "CosineAnnealingWarmRestarts(optimizer, T_0=5)",
        "SequentialLR": "SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=4), "
        "ExponentialLR(optimizer, 0.9)], milestones=[4])",
        "LambdaLR": "LambdaLR(optimizer, lambda step: 1 / (1 + step / 4))",
        "ReduceLROnPlateau": "ReduceLROnPlateau(optimizer, patience=1, factor=0.5)",
    }
    name = draw.choice([*schedules, None, None])
    if name is None:
        return
    script.imports.append("from torch.optim.lr_scheduler import *")
    script.build.append(f"schedule = {schedules[name]}")
    script.kept.append("schedule")
    script.handed.append("schedule")
    script.traits.append(name)


def _data(script: Script, draw: random.Random) -> None:
    """Where samples come from."""
    kind = draw.choice(
        [
            *("global", "numpy", "python", "torch generator", "numpy generator", "python generator"),
            *("loader", "loader with workers", "elastic", "elastic with workers"),
        ]
    )
    if script.parallel == "tp" and "elastic" not in kind:
        kind = "same"
    script.traits.append(f"data: {kind}")
    micro = 1 if "elastic" in kind else draw.choice((1, 1, 2, 3))
    script.traits.append(f"{micro} micro-batches")
    script.classes.append(f"MICRO = {micro}")
    samples = {
        "global": ["x = torch.randn(4, 8)"],
        "same": ["x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + micro))"],
        "numpy": ["x = torch.from_numpy(np.random.randn(4, 8)).float()"],
        "python": ["x = torch.tensor([[random.gauss(0, 1) for _ in range(8)] for _ in range(4)])"],
        "torch generator": ["x = torch.randn(4, 8, generator=noise.generator)"],
        "numpy generator": ["x = torch.from_numpy(noise.generator.normal(size=(4, 8))).float()"],
        "python generator": ["x = torch.tensor([[noise.generator.gauss(0, 1) for _ in range(8)] for _ in range(4)])"],
    }
    if kind in ("numpy", "numpy generator"):
        script.imports.append("import numpy as np")
    if kind in ("python", "python generator"):
        script.imports.append("import random")
    if kind.endswith(" generator"):
        # a rank's own, drawn from at each step: each rank sees other data
        script.classes.append(_GENERATORS[kind])
        script.made.append("noise = Noise(run.rank)")
        script.handed.append("noise")
    if "loader" in kind:
        workers = draw.choice((1, 2)) if "workers" in kind else 0
        script.imports.append("from torch.utils.data import DataLoader, Dataset")
        script.classes.append(_DATASET)
        script.before.append("samples = Samples()")
        script.body.append(
            "first = (step * run.world_size + run.rank) * 4 * MICRO\n"
            "chosen = [(first + place) % len(samples) for place in range(4 * MICRO)]\n"
            f"batches = iter(DataLoader(samples, batch_size=4, sampler=chosen, num_workers={workers}))"
        )
        samples[kind] = ["x = next(batches)"]
    if "elastic" in kind:
        workers = draw.choice((1, 2)) if "workers" in kind else 0
        ways = f", workers={workers}, worker_kind={draw.choice(('process', 'thread'))!r}" if workers else ""
        script.imports.append("from hyperpod_ext.runtime.data import ElasticDataLoader")
        script.classes.append(_SOURCE)
        size = "micro_batch_size=4, global_batch_size=4 * run.world_size"
        where = "rank=run.rank, world_size=run.world_size"
        if script.parallel == "tp":
            size, where = "micro_batch_size=4, global_batch_size=4", "rank=0, world_size=1"
        script.made.append(f"data = ElasticDataLoader(Source(), {size}, {where}{ways})")
        script.handed.append("data")
        script.loop = "for step, batch in zip(run.steps(STEPS), data.steps(), strict=False):"
        script.body.append("batches = iter(batch)")
        samples[kind] = ["x, weight = next(batches)"]
    script.body.append("total = torch.zeros(())")
    script.body.append("losses_of_step = []")
    script.sample = [*samples[kind], "wanted = x.sum(1).tanh()"]


_GENERATORS = {
    "torch generator": """class Noise:
    def __init__(self, rank):
        self.generator = torch.Generator().manual_seed(rank + 5)

    def state_dict(self):
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["state"])""",
    "numpy generator": """class Noise:
    def __init__(self, rank):
        self.generator = np.random.default_rng(rank + 5)

    def state_dict(self):
        return self.generator.bit_generator.state

    def load_state_dict(self, state):
        self.generator.bit_generator.state = state""",
    "python generator": """class Noise:
    def __init__(self, rank):
        self.generator = random.Random(rank + 5)

    def state_dict(self):
        version, internal, gauss = self.generator.getstate()
        return {"version": version, "internal": list(internal), "gauss": gauss}

    def load_state_dict(self, state):
        self.generator.setstate((state["version"], tuple(state["internal"]), state["gauss"]))""",
}
_DATASET = """class Samples(Dataset):
    def __len__(self):
        return 97

    def __getitem__(self, index):
        return torch.sin(torch.arange(8.0) * (index + 1)) + 0.1 * torch.randn(8)"""
_SOURCE = """class Source:
    def __len__(self):
        return 200

    def __getitem__(self, index):
        return torch.sin(torch.arange(8.0) * (index + 1))"""


def _step(script: Script, draw: random.Random) -> None:
    optimizers = [name for name in script.handed if name.endswith("optimizer")]
    scaler = script.parallel in ("alone", "ddp") and draw.random() < 0.2
    bf16 = script.parallel in ("alone", "ddp") and draw.random() < 0.25
    clip = not scaler and draw.random() < 0.3
    zero_last = draw.random() < 0.3
    sync = draw.random() < 0.5
    traits = {"GradScaler": scaler, "autocast": bf16, "clipping": clip, "zero_grad last": zero_last}
    script.traits += [name for name, has in traits.items() if has]
    if scaler:
        script.build.append('scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)')
        script.kept.append("scaler")
        script.handed.append("scaler")
    zero = [f"{name}.zero_grad(set_to_none={draw.random() < 0.5})" for name in optimizers]
    if not zero_last:
        script.body += zero
    inside = [*script.sample]
    if script.parallel == "ddp" and sync:
        inside.append("parallel.require_backward_grad_sync = micro == MICRO - 1")
        script.traits.append("no_sync")
    if bf16:
        inside.append('with torch.autocast("cpu", dtype=torch.bfloat16):\n    told = parallel(x)')
        inside.append("loss = F.mse_loss(told.float(), wanted) / MICRO")
    else:
        inside.append("loss = F.mse_loss(parallel(x), wanted) / MICRO")
    inside.append("scaler.scale(loss).backward()" if scaler else "loss.backward()")
    inside.append("total += loss.detach()")
    script.body.append("for micro in range(MICRO):\n" + _indented(inside, 1))
    if clip:
        script.body.append("nn.utils.clip_grad_norm_(model.parameters(), 1.0)")
    if "schedule" not in script.handed and draw.random() < 0.4:
        script.body.append("for group in optimizer.param_groups:\n    group['lr'] = 0.01 / (1 + step)")
        script.traits.append("rate by hand")
    seldom = not scaler and not zero_last and draw.random() < 0.2
    if seldom:  # gradients add up over steps
        script.traits.append("an optimizer's step every other step")
        script.body = [line for line in script.body if line not in zero]
        lines = [f"{name}.step()" for name in optimizers] + zero
        script.body.append("if step % 2 == 0:\n" + _indented(lines, 1))
    for name in () if seldom else optimizers:
        script.body.append(f"scaler.step({name})" if scaler else f"{name}.step()")
    if scaler:
        script.body.append("scaler.update()")
    if "data" in script.handed:
        script.body.append("data.ack(batch)")
    if script.parallel in ("alone", "tp"):
        script.body.append("mean = total.clone()")
    else:
        script.body.append("mean = total / run.world_size\ndist.all_reduce(mean)")
    if "schedule" in script.handed:
        plateau = "ReduceLROnPlateau" in script.traits
        script.body.append("schedule.step(float(mean))" if plateau else "schedule.step()")
    if zero_last:
        script.body += zero


def _extras(script: Script, draw: random.Random) -> None:
    if script.parallel in ("alone", "ddp") and draw.random() < 0.3:
        if draw.random() < 0.5:
            script.imports.append("from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn")
            script.build.append(
                "average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)"
            )
            script.body.append("average.update_parameters(model)")
            script.traits.append("AveragedModel")
        else:
            script.classes.append(_AVERAGE)
            script.build.append("average = Average(model)")
            script.body.append("average.update(model)")
            script.traits.append("EMA by hand")
        script.kept.append("average")
        script.handed.append("average")
    if draw.random() < 0.3:
        script.classes.append(_CURRICULUM)
        script.made.append("curriculum = Curriculum()")
        script.handed.append("curriculum")
        script.body.append("curriculum.see(float(mean))")
        script.traits.append("curriculum")
    if draw.random() < 0.25:
        script.classes.append(_OWN_COUNTER)
        script.made.append("counter = Counter(run.rank)")
        script.handed.append("counter")
        script.body.append("counter.see(x)")
        script.traits.append("a counter of each rank's own")
    if draw.random() < 0.2:
        script.classes.append(_BUFFER)
        script.made.append("buffer = Buffer()")
        script.handed.append("buffer")
        script.body.append("buffer.add(x)")
        script.traits.append("replay buffer")
    if draw.random() < 0.3 and script.parallel != "tp":
        script.body.append(
            "if step % 4 == 0:\n    model.eval()\n    with torch.no_grad():\n"
            "        run.log(held_out=parallel(torch.ones(4, 8)).sum())\n    model.train()"
        )
        script.traits.append("evaluation")
    every = draw.choice((1, 3))
    script.body.append(f"if step % {every} == 0:\n    run.log(loss=mean)")
    if draw.random() < 0.15 and "elastic" not in " ".join(script.traits):
        script.body.append("if step == STEPS - 2:\n    break")
        script.traits.append("early stop")


_AVERAGE = """class Average:
    def __init__(self, model):
        self.shadow = {name: value.detach().clone() for name, value in model.named_parameters()}

    def update(self, model):
        with torch.no_grad():
            for name, value in model.named_parameters():
                self.shadow[name].mul_(0.9).add_(value, alpha=0.1)

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state):
        for name, value in state["shadow"].items():
            self.shadow[name].copy_(value)"""
_CURRICULUM = """class Curriculum:
    def __init__(self):
        self.level, self.best, self.history = 0, None, []

    def see(self, loss):
        if self.best is None or loss < self.best:
            self.best, self.level = loss, self.level + 1
        self.history = [*self.history, round(loss, 3)][-5:]

    def state_dict(self):
        return {"level": self.level, "best": self.best, "history": self.history}

    def load_state_dict(self, state):
        self.level, self.best, self.history = state["level"], state["best"], list(state["history"])"""
_OWN_COUNTER = """class Counter:
    def __init__(self, rank):
        self.positive, self.rank = rank, rank

    def see(self, x):
        self.positive += int((x > 0).sum()) + self.rank

    def state_dict(self):
        return {"positive": self.positive}

    def load_state_dict(self, state):
        self.positive = state["positive"]"""
_BUFFER = """class Buffer:
    def __init__(self):
        self.kept = torch.zeros(6, 8)
        self.place = 0

    def add(self, x):
        self.kept[self.place % 6] = x[0]
        self.place += 1

    def state_dict(self):
        return {"kept": self.kept, "place": self.place}

    def load_state_dict(self, state):
        self.kept.copy_(state["kept"])
        self.place = state["place"]"""


def _forget(script: Script, draw: random.Random) -> None:
    candidates = [name for name in ("schedule", "scaler", "second_optimizer") if name in script.handed]
    if any(
        "second_optimizer = torch.optim.SGD" in line and "momentum" not in line.split("second_")[1]
        for line in script.build
    ):
        candidates.remove("second_optimizer")  # it has no state
    if candidates:
        script.forgotten = draw.choice(candidates)
        script.traits.append(f"forgets {script.forgotten}")


def _faults(script: Script, draw: random.Random) -> None:
    last = STEPS - 3 if "early stop" in script.traits else STEPS
    steps = draw.sample(range(1, last + 1), draw.randint(1, 3))
    for step in sorted(steps):
        seldom = "an optimizer's step every other step" in script.traits  # one phase comes at some steps only
        phase = draw.choice(("data", "forward", "backward", *(() if seldom else ("optimizer", "rest"))))
        if script.parallel == "tp" and phase in ("optimizer", "rest"):
            phase = "backward"
        kind = draw.choice(("sigkill", "sigkill", "exception"))
        script.faults.append(f"{kind}:rank={draw.randrange(script.ranks)},step={step},phase={phase}")
    script.traits.append("faults: " + "; ".join(script.faults))


def _more(script: Script, draw: random.Random) -> None:
    """What came later, drawn apart so that nothing else becomes another script."""
    if script.parallel != "tp" and draw.random() < 0.15:
        script.before = [
            line.replace("parallel = ", "parallel = torch.compile(") + ", backend='aot_eager')"
            if line.startswith("parallel = ")
            else line
            for line in script.before
        ]
        # hooks would break a compiled module's graph: it tells no forward and no backward phase
        script.faults = [re.sub("phase=(forward|backward)", "phase=data", fault) for fault in script.faults]
        script.traits.append("torch.compile")
    if script.nodes == 2 and not script.forgotten and draw.random() < 0.5:
        script.lost_node = draw.randrange(2), draw.randrange(2, STEPS - 3)
        script.traits.append(f"node {script.lost_node[0]} is lost in step {script.lost_node[1]}")


def _of_strangers(script: Script, draw: random.Random) -> None:
    kind = draw.choice(("forgets", "carries", "reads on", "begins there", "two models", "", "", ""))
    if kind == "forgets":
        _forget_more(script, draw)
    elif kind == "carries":
        name, first, then = draw.choice(
            (
                ("baseline", "0.0", "0.9 * baseline + 0.1 * float(mean)"),
                ("drift", "torch.zeros(3)", "drift * 0.5 + mean"),
                ("made", "0", "made + 1"),
            )
        )
        script.before.append(f"{name} = {first}")
        script.body.append(f"{name} = {then}")
        script.warned = rf"{name} \((float|Tensor|int)\)"
    elif kind in ("reads on", "begins there") and "elastic" not in " ".join(script.traits):
        _from_one_loader(script, draw, begins_there=kind == "begins there")
    elif kind == "two models" and script.parallel in ("alone", "ddp"):
        _two_models(script)
    script.traits.append(f"a stranger's: {kind}")


def _forget_more(script: Script, draw: random.Random) -> None:
    """What is state whatever it is used for, or of each rank's own."""
    _forget(script, draw)
    if not script.forgotten and (known := [each for each in ("average", "noise", "buffer") if each in script.handed]):
        script.forgotten = draw.choice(known)
    elif not script.forgotten and "counter" in script.handed:
        script.handed.remove("counter")
        script.warned = r"counter \(Counter\)"


def _from_one_loader(script: Script, draw: random.Random, *, begins_there: bool) -> None:
    """Samples come from a loader that is gone through by all steps together."""
    workers = draw.choice((0, 0, 1, 2))
    ways = f", num_workers={workers}{', persistent_workers=True' if workers else ''}"
    script.imports.append("from torch.utils.data import DataLoader, TensorDataset")
    script.classes.append("rows = TensorDataset(torch.sin(torch.arange(1600.0)).view(200, 8))")
    first = "run.step * 4" if begins_there else "0"
    script.before.append(f"through = DataLoader(rows, batch_size=4, sampler=range({first}, 200){ways})")
    if begins_there:
        script.before.append("run.leave_out(through)")
    else:
        script.warned = r"(DataLoaderIter|read) (\(\w+\)|iterated with run.steps)"
    if draw.random() < 0.5:
        script.before.append("read = iter(through)")
        script.body.append("(row,) = next(read)")
    else:
        script.loop = "for step, (row,) in zip(run.steps(STEPS), through, strict=False):"
    script.body.append("run.log(row=row.sum())")


def _two_models(script: Script) -> None:
    """A critic of the first one's output."""
    script.build.append("critic = nn.Linear(1, 1)\ncritic_optimizer = torch.optim.Adam(critic.parameters(), lr=0.01)")
    script.kept += ["critic", "critic_optimizer"]
    script.handed += ["critic", "critic_optimizer"]
    script.before.append(f"judge = {'run.data_parallel(critic)' if script.parallel == 'ddp' else 'critic'}")
    script.body.append("critic_optimizer.zero_grad()\njudge(mean.view(1, 1)).square().sum().backward()")
    script.body.append("critic_optimizer.step()")


def main() -> int:
    script = drawn(int(sys.argv[1]))
    sys.stdout.write(script.text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
