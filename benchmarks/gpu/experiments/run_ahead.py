"""E6: the loop has queued the optimizer of a step whose collective lost a peer. The markers are asked before the
abort, the copy of the committed step is restored, and the job goes on: it ends with the bits of an undisturbed one.

On CPU the queue of `tests/support/async_device.py` stands for that of a GPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from lane import Lane
from rank import Rank
from rank_processes import RankProcesses
from results import Figure, Figures

from hyperpod_ext.runtime.state.device_steps import CudaDevice, DeviceSteps

_STEPS, _FAULT = 12, 7
"""Optimizer steps, and the one in which rank 2 dies."""
_COPIES = 3
_WIDTH = 64


def run(lane: Lane) -> Figures:
    with RankProcesses(lane, "run_ahead:body", 3, fault=False, generation=0) as ranks:
        wanted = ranks.until("ended", 60.0 * lane.patience)
        ranks.end()
    with RankProcesses(lane, "run_ahead:body", 3, fault=True, generation=0) as ranks:
        ranks.until("queued", 60.0 * lane.patience)
        ranks.kill(2)
        ranks.tell("abort")
        ranks.start(2, generation=1)
        restored = ranks.until("restored", 60.0 * lane.patience, [0, 1])
        ended = ranks.until("ended", 60.0 * lane.patience)
        ranks.end()
    committed = {one["committed"] for one in restored.values()}
    assert committed == {_FAULT - 1}, f"committed steps are {sorted(committed)}, and step {_FAULT - 1} was done"
    for rank, one in ended.items():
        for name in ("loss", "weights"):
            assert one[name] == wanted[rank][name], f"rank {rank}: {name} differ from the undisturbed run's"
    return {
        "steps queued at the fault": Figure(_FAULT),
        "steps committed": Figure(_FAULT - 1),
        "live state was changed behind the fault": Figure(all(one["changed"] for one in restored.values())),
        "final loss, equal bits": Figure(float.fromhex(ended[0]["loss"])),
    }


def body(rank: Rank) -> None:
    training = _Training(rank)
    if rank.options["generation"] == 0:
        rank.open()
        last = _STEPS
        if rank.options["fault"]:
            last = _FAULT if rank.rank != 2 else _FAULT - 1
        training.train(1, last)
        if rank.options["fault"]:
            training.wait_for_fault()
    if rank.options["fault"]:
        rank.open(1)
        training.train(training.agree() + 1, _STEPS)
    training.report_end()
    rank.close()


class _Training:
    """A small model whose gradients are summed in one all-reduce, with copies of its newest steps."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._device = _device_of(rank)
        self._steps = DeviceSteps()
        self._steps.enter()
        self._steps.follow(self._device, 0)
        torch.manual_seed(0)
        layers = torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.ReLU(), torch.nn.Linear(_WIDTH, 1)
        self._model = torch.nn.Sequential(*layers).to(rank.device)
        self._weights = [weights.data for weights in self._model.parameters()]
        self._momentum = [torch.zeros_like(weights) for weights in self._weights]
        self._copies = [[tensor.clone() for tensor in self._state] for _ in range(_COPIES)]
        self._loss = torch.zeros((), device=rank.device)
        self._committed = 0

    @property
    def _state(self) -> list[torch.Tensor]:
        return [*self._weights, *self._momentum]

    def train(self, first: int, last: int) -> None:
        """Queue these steps; nothing here waits for the device."""
        for step in range(first, last + 1):
            batch = self._batch(step)
            with self._queued():
                self._make(batch)
                for copy, tensor in zip(self._copies[step % _COPIES], self._state, strict=True):
                    copy.copy_(tensor)
            self._steps.queue(step)

    def _batch(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + self._rank.rank)
        return torch.randn(16, _WIDTH, generator=generator).to(self._rank.device)

    def _make(self, batch: torch.Tensor) -> None:
        loss = (self._model(batch) - batch.mean(dim=1, keepdim=True)).square().mean()
        gradients = torch.autograd.grad(loss, list(self._model.parameters()))
        flat = torch.cat([loss.detach().reshape(1), *(gradient.reshape(-1) for gradient in gradients)])
        dist.all_reduce(flat)
        flat = flat / self._rank.world_size
        self._loss = flat[0]
        parts = torch.split(flat[1:], [weights.numel() for weights in self._weights])
        for weights, momentum, gradient in zip(self._weights, self._momentum, parts, strict=True):
            momentum.mul_(0.9).add_(gradient.view_as(momentum))
            weights.sub_(momentum, alpha=0.1)

    @contextlib.contextmanager
    def _queued(self) -> Iterator[None]:
        with self._device.working() if self._rank.lane.fake else contextlib.nullcontext():
            yield

    def wait_for_fault(self) -> None:
        """Rank 2 dies here, and never joins the sum of the last step; the others abort behind what they queued."""
        while self._steps.finished() < _FAULT - 1:
            time.sleep(0.001)
        self._rank.before_abort = self._freeze
        self._rank.report("queued")
        self._rank.aborted.wait()
        self._device.record().synchronize()
        copy = self._copies[self._committed % _COPIES]
        changed = any(not torch.equal(live, kept) for live, kept in zip(self._state, copy, strict=True))
        self._restore(copy)
        self._rank.report("restored", committed=self._committed, changed=changed)
        self._rank.close()
        self._steps.enter()
        self._device = _device_of(self._rank)

    def _freeze(self) -> None:
        self._steps.freeze()
        self._committed = self._steps.finished()
        if self._rank.lane.fake:
            self._device.abort()

    def _restore(self, copy: list[torch.Tensor]) -> None:
        for live, kept in zip(self._state, copy, strict=True):
            live.copy_(kept)

    def agree(self) -> int:
        """The step that all go on from: survivors have it, and a new process gets it from rank 0."""
        is_new = self._rank.rank == 2
        newest = torch.tensor([float(_STEPS if is_new else self._committed)], device=self._rank.device)
        dist.all_reduce(newest, op=dist.ReduceOp.MIN)
        agreed = int(newest.item())
        if not is_new:
            self._restore(self._copies[agreed % _COPIES])
        for tensor in self._state:
            dist.broadcast(tensor, src=0)
        self._steps.follow(self._device, agreed)
        return agreed

    def report_end(self) -> None:
        self._device.record().synchronize()
        raw = b"".join(bytes(weights.cpu().reshape(-1).view(torch.uint8).tolist()) for weights in self._weights)
        self._rank.report("ended", loss=float(self._loss).hex(), weights=hashlib.sha256(raw).hexdigest())


def _device_of(rank: Rank) -> Any:
    """What works behind the loop."""
    if not rank.lane.fake:
        return CudaDevice()
    from async_device import AsyncDevice

    return AsyncDevice()
