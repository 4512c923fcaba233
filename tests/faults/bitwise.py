"""A training script with all that recovery must keep bit for bit: dropout, momentum, AdamW, a schedule, gradient
accumulation and loss scaling, under DDP, FSDP2 or HSDP; faults strike anywhere in a step.

HPX_TEST_PARALLEL is `ddp`, `fsdp2` or `hsdp`, and ` compiled` where a block is; with HPX_TEST_REBUILD objects are
built anew after each fault. With HPX_TEST_ZIPPED the loop ends because what it zips the steps with has ended.
HPX_TEST_FAULTS is a JSON list of `{"place": ..., "how": ..., "ranks": [...], "step": S}`. Each strikes once on each of
its ranks. `place` is one of PLACES, or a number: seconds after the step began, whatever is done then. `how` is `kill`
or `raise`; a fault at some moment can only kill. With `together` it waits until all others have made the step before:
one that is cut between its two optimizers has no live state, and where there are no snapshots those are all there is.
"""

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import torch
import torch.distributed as dist
from event_log import events_in
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset

from hyperpod_ext.runtime import Run, resilient
from hyperpod_ext.runtime.state.seeding import seed_of

PLACES = ("data loading", "forward", "backward", "all-reduce", "optimizer", "checkpointing")
STEPS = int(os.environ.get("HPX_TEST_STEPS", "14"))
PARALLEL, _, COMPILED = os.environ.get("HPX_TEST_PARALLEL", "ddp").partition(" ")
REBUILD = "HPX_TEST_REBUILD" in os.environ
ZIPPED = "HPX_TEST_ZIPPED" in os.environ
FAULTS = json.loads(os.environ.get("HPX_TEST_FAULTS", "[]"))
WIDTH = int(os.environ.get("HPX_TEST_WIDTH", "48"))
MICRO_BATCHES = 3
BUCKET_MB = 2 if COMPILED else 0.01
"""Compiled DDP wants buckets that are no smaller than its first one, of a MiB."""
HERE = Path(os.environ["HPX_RUN_DIR"])


class Now:
    """Where this rank is."""

    run: Run
    step = 0
    micro = 0


def strike(place: str, micro: int = 1) -> None:
    """Fail here, where a fault is due; in the middle of the accumulation unless told otherwise."""
    if Now.micro != micro:
        return
    for number, fault in enumerate(FAULTS):
        if fault["place"] == place and fault["step"] == Now.step and spend(number, fault):
            if place == "optimizer":  # the others need nothing more from this rank to make the step
                wait_for_others(fault["ranks"], Now.step)
            elif "together" in fault:
                wait_for_others(fault["ranks"], Now.step - 1)
            if fault["how"] == "kill":
                os.kill(os.getpid(), 9)
            # each of a type of its own: two of one type, from one line, in one step would be the same again
            raise type(f"Fault{number}", (ValueError,), {})(f"at step {Now.step}, in {place}")


def wait_for_others(failing: list[int], step: int) -> None:
    """Until all that do not fail have made this step."""
    others = set(range(Now.run.world_size)) - set(failing)
    while others:
        made = [event for event in events_in(HERE / "events.jsonl") if event["event"] == "step"]
        others -= {event["rank"] for event in made if event["step"] == step}
        time.sleep(0.005)


def spend(number: int, fault: dict) -> bool:
    spent = HERE / f"spent-{number}-{Now.run.rank}"
    if Now.run.rank not in fault["ranks"] or spent.exists():
        return False
    spent.touch()
    return True


def arm_for_a_moment() -> None:
    """Have this process killed at some moment of the step that begins."""
    for number, fault in enumerate(FAULTS):
        if not isinstance(fault["place"], str) and fault["step"] == Now.step and spend(number, fault):
            threading.Timer(fault["place"], os.kill, (os.getpid(), 9)).start()


class Samples(Dataset):
    """Sums to learn."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        strike("data loading")
        words = torch.arange(8) * (index + 3) % 61
        return words, words.float().mean().unsqueeze(0) / 61


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.outer(torch.relu(self.inner(self.norm(x)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(61, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        if x.requires_grad:  # its gradient comes last: those of later layers are being added up meanwhile
            x.register_hook(lambda _: strike("all-reduce", MICRO_BATCHES - 1))
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                strike("forward")
        if x.requires_grad:
            x.register_hook(lambda _: strike("backward"))
        return self.head(x.mean(1))


def build() -> tuple[nn.Module, dict]:
    model = Model()
    if PARALLEL != "ddp":
        from torch.distributed.fsdp import fully_shard

        if PARALLEL == "hsdp":
            mesh = init_device_mesh("cpu", (2, Now.run.world_size // 2), mesh_dim_names=("replicate", "shard"))
        else:
            mesh = init_device_mesh("cpu", (Now.run.world_size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if COMPILED:
        model.blocks[0].compile()  # seconds of CPU for each
    momentum = torch.optim.SGD([*model.words.parameters(), *model.head.parameters()], lr=0.05, momentum=0.9)
    adamw = torch.optim.AdamW(model.blocks.parameters(), lr=3e-3)
    return model, {
        "momentum": momentum,
        "adamw": adamw,
        "warm_up": torch.optim.lr_scheduler.LinearLR(momentum, 0.1, total_iters=6),
        "cosine": torch.optim.lr_scheduler.CosineAnnealingLR(adamw, T_max=STEPS),
        "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=4),
    }


def arm_saves() -> None:
    """Have faults strike in the middle of a save, on its thread or the main one."""
    stager = Now.run._checkpointer._stager
    copy = stager.copy

    def copy_or_strike(sources, destinations):
        copy(sources[:2], destinations[:2])
        strike("checkpointing", MICRO_BATCHES)
        copy(sources[2:], destinations[2:])

    stager.copy = copy_or_strike


def batches(step: int) -> DataLoader:
    """The micro-batches of this rank's share of a step."""
    size = 4
    first = (step * Now.run.world_size + Now.run.rank) * size * MICRO_BATCHES
    return DataLoader(Samples(), batch_size=size, sampler=[(first + i) % 512 for i in range(size * MICRO_BATCHES)])


def steps_and_another(run: Run) -> list[Iterable[int]]:
    """What `zip` draws from, in this order."""
    return [range(run.step, STEPS), run.steps(STEPS)] if ZIPPED else [itertools.count(), run.steps(STEPS)]


def accumulate_only(model: nn.Module, parallel: nn.Module, yes: bool) -> None:
    """Whether the next backward leaves gradients where they are, instead of adding them up over ranks."""
    if PARALLEL == "ddp":
        parallel.require_backward_grad_sync = not yes
    else:
        model.set_requires_gradient_sync(not yes)


@resilient
def train(run: Run) -> None:
    if not hasattr(Now, "run"):
        Now.run = run
        arm_saves()
    if REBUILD:
        torch.manual_seed(seed_of(0, 0, -1))  # as run.keep does
        model, others = build()
    else:
        model, others = run.keep(build)
    run.restore(model=model, **others)
    parallel = run.data_parallel(model, bucket_cap_mb=BUCKET_MB) if PARALLEL == "ddp" else model
    momentum, adamw, scaler = others["momentum"], others["adamw"], others["scaler"]
    for _, step in zip(*steps_and_another(run), strict=False):
        Now.step, Now.micro = step, 0
        arm_for_a_moment()
        total = torch.zeros(())
        momentum.zero_grad()
        adamw.zero_grad()
        for Now.micro, (words, wanted) in enumerate(batches(step)):
            accumulate_only(model, parallel, Now.micro < MICRO_BATCHES - 1)
            loss = (parallel(words) - wanted).square().mean() / MICRO_BATCHES
            scaler.scale(loss).backward()
            total += loss.detach()
        mean = total / run.world_size
        dist.all_reduce(mean)
        scaler.step(momentum)
        strike("optimizer", MICRO_BATCHES - 1)
        scaler.step(adamw)
        scaler.update()
        others["warm_up"].step()
        others["cosine"].step()
        Now.micro = MICRO_BATCHES
        run.log(loss=mean, rate=others["cosine"].get_last_lr()[0], scale=scaler.get_scale())


train()
