"""Write a worker's heartbeat: step, phase and number of collectives. Dump the worker's stacks on a signal.

Hooks on the registered modules and optimizers report the phase of a step. The hooks return None, so they do not change
the results of modules. A compiled module reports no forward phase, because hooks would break its graph.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from hyperpod_ext.config.fault_injection import ORDERS
from hyperpod_ext.runtime.detection.heartbeat import ENV_HEARTBEAT, HeartbeatPage, Phase
from hyperpod_ext.runtime.detection.stacks import DUMP_SIGNAL
from hyperpod_ext.runtime.ipc.environment import ENV_RUN_DIR
from hyperpod_ext.runtime.process_group.torch_private import collectives_begun

_BEATS_A_SECOND = 4


class PhaseListener(Protocol):
    """An object that is called at each phase of a step. The injector of rehearsed faults implements this protocol."""

    def at(self, phase: Phase, step: int) -> None: ...


class Progress:
    """Reports the progress of this process in its heartbeat. A process has only one such object."""

    def __init__(self) -> None:
        self._heartbeat = HeartbeatPage.of(os.environ.get(ENV_HEARTBEAT))
        self._hooks: list[RemovableHandle] = []
        self._orders = 0
        folder = os.environ.get(ENV_RUN_DIR)
        self._orders_folder = Path(folder) / ORDERS if folder is not None else None
        self._step_began: float | None = None
        self.data_s = 0.0
        """Seconds from the start of the current step to its first forward pass; 0 if unknown."""
        self.listener: PhaseListener | None = None
        """The injector of rehearsed faults; None if no faults are rehearsed."""
        if ENV_HEARTBEAT in os.environ:
            self._heartbeat.beat(0)
            faulthandler.register(DUMP_SIGNAL, file=sys.stderr, all_threads=True)
            faulthandler.enable(file=sys.stderr)  # log the Python stack after a crash in native code
            threading.Thread(target=self._beat, name="hpx-heartbeat", daemon=True).start()

    @property
    def step(self) -> int:
        """The current step."""
        return self._heartbeat.step

    def enter(self, generation: int) -> None:
        """Begin a generation."""
        self._heartbeat.generation = generation
        self.mark(Phase.START)

    def begin_step(self, step: int) -> None:
        self._heartbeat.step = step
        self._step_began, self.data_s = time.monotonic(), 0.0
        self.mark(Phase.DATA)

    def mark(self, phase: Phase) -> None:
        """Report that this rank has reached `phase` of its present step."""
        self._heartbeat.mark(phase)
        if self.listener is not None:
            self.listener.at(phase, self._heartbeat.step)

    @property
    def has_orders(self) -> bool:
        """Whether new orders to inject a fault have arrived since the last call.

        A worker with a heartbeat page reads the agent's counter in the page. A worker without a heartbeat page looks at
        the orders' folder.
        """
        orders = self._heartbeat.orders if ENV_HEARTBEAT in os.environ else self._orders_left()
        changed, self._orders = orders != self._orders, orders
        return changed

    def _orders_left(self) -> int:
        """Return a number that increases with new files in the orders' folder; 0 without a folder.

        The method is called once in each step, and takes two microseconds.
        """
        if self._orders_folder is None:
            return 0
        try:
            return self._orders_folder.stat().st_mtime_ns
        except OSError:
            return 0

    def follow(self, objects: Iterable[object]) -> None:
        """Report the phases of the modules and optimizers in `objects`, and no longer of the objects of an earlier
        call."""
        global _following
        self.forget()
        _following = self
        for value in objects:
            if isinstance(value, torch.nn.Module):
                self._hooks.append(value.register_forward_pre_hook(_before_forward))
                self._hooks.append(value.register_forward_hook(_after_forward))
            elif isinstance(value, torch.optim.Optimizer):
                self._hooks.append(value.register_step_pre_hook(lambda *_: self.mark(Phase.OPTIMIZER)))
                self._hooks.append(value.register_step_post_hook(lambda *_: self.mark(Phase.REST)))

    def forget(self) -> None:
        """Remove this object's hooks from all modules and optimizers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _forward_begins(self) -> None:
        if self._step_began is not None:
            self.data_s, self._step_began = time.monotonic() - self._step_began, None
        self.mark(Phase.FORWARD)

    def _forward_ended(self, output: Any) -> None:
        result = _first_with_gradient(output)
        if result is not None:
            result.register_hook(self._backward_came)

    def _backward_came(self, _gradient: torch.Tensor) -> None:
        self.mark(Phase.BACKWARD)

    def _beat(self) -> None:
        pause = threading.Event()
        while not pause.wait(1 / _BEATS_A_SECOND):
            self._heartbeat.beat(collectives_begun())


_following: Progress | None = None
"""The `Progress` whose `follow` was called last. A module is copied and pickled together with its hooks, so the hooks
are plain functions of this file that do not refer to a `Progress`."""


def _before_forward(*_: Any) -> None:
    if _following is not None and not torch.compiler.is_compiling():
        _following._forward_begins()


def _after_forward(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
    if _following is not None and not torch.compiler.is_compiling():
        _following._forward_ended(output)


def _first_with_gradient(output: Any) -> torch.Tensor | None:
    """Return the first tensor in a module's output that gets a gradient in the backward pass."""
    if isinstance(output, torch.Tensor):
        return output if output.requires_grad and not output.is_leaf else None
    values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ()
    return next((found for value in values if (found := _first_with_gradient(value)) is not None), None)
