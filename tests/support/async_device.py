"""A device whose work is queued, made of ordinary CPU tensors: what a GPU's stream does to a training loop.

Inside of `AsyncDevice.working()` operations return at once and are done later, in order, by one thread. So the loop
runs ahead; a collective that was called is not one that is done; and what is queued behind one that is aborted runs
on garbage, with no exception. As with NCCL, a collective whose peer died keeps waiting until this process aborts it.

torch's dispatcher hands over every operation, those of C++ too (DDP's reducer, autograd, fused optimizers). Not
queued are views, what makes tensors from nothing, and integers, which decide what the loop does next. Reading a
number waits for the queue. Random operations on tensors (dropout) would draw at another time, and are refused.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.futures import Future
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hyperpod_ext.runtime.process_group import groups
from hyperpod_ext.runtime.process_group.nccl_backend import Nccl
from hyperpod_ext.runtime.state import ddp_buckets, device_steps

GARBAGE = float("nan")
_WAITS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero"}


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.data`, as a device has it: no script asks for it, so nobody is called."""
    alias: torch.Tensor = torch.Tensor.data.__get__(tensor)  # type: ignore[attr-defined]  # torch's own descriptor
    return alias


class QueueMarker:
    """A place in the queue."""

    def __init__(self, device: AsyncDevice) -> None:
        self._device, self._reached = device, threading.Event()
        device.put(self._reached.set)

    def query(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        self._device.open_gates()
        self._reached.wait()


class QueuedWork(Work):
    """Of a collective. As with NCCL, to wait for it is the queue's affair, not the caller's."""

    def __init__(self, tensors: list[Any], marker: QueueMarker) -> None:
        super().__init__()
        self._marker, self._future = marker, Future()
        self._future.set_result(tensors)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Future:
        return self._future

    def is_completed(self) -> bool:
        return self._marker.query()


class AsyncDevice:
    """The queue and its thread.

    Args:
        ahead: steps that the loop may be ahead; the queue stands still until it is, or somebody waits for it.
    """

    def __init__(self, ahead: int = 0) -> None:
        self.ahead = ahead
        self.most_ahead = 0
        """Steps that the loop was ahead at most."""
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._gates: deque[threading.Event] = deque()
        self._steps: deque[QueueMarker] = deque()
        self._aborted = threading.Event()
        self._works: deque[QueuedWork] = deque(maxlen=10_000)
        """Python's part of each has to outlive what C++ asks of it."""
        threading.Thread(target=self._run, name="async-device", daemon=True).start()

    def install(self) -> None:
        """Have the product take CPU tensors for those of this device, and its collectives for those of NCCL."""
        device_steps.DEVICES["cpu"] = lambda: self
        device = self

        class AsyncNccl(Nccl):
            """Whose one communicator is this device's."""

            @classmethod
            def prepare(cls) -> Nccl:
                return cls(lambda: {"all": device}, lambda: device.record().synchronize())

            def enter(self, world_size: int, *, lasting: bool) -> None:
                device._aborted.clear()
                super().enter(world_size, lasting=lasting)

        groups.TORCH_NAMES["nccl"], groups.Nccl = "gloo", AsyncNccl  # type: ignore[misc]
        groups._no_nccl = lambda: ""
        layout_of = ddp_buckets.layout_of

        def layout_in_turn(ddp: Any) -> Any:
            """DDP tells the others its layout, in a collective: not before those that are queued."""
            self.record().synchronize()
            return layout_of(ddp)

        ddp_buckets.layout_of = layout_in_turn
        keep = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            """FSDP2 frees what the queue still needs: a GPU's allocator would give it to nobody before its turn."""
            return storage if size == 0 else keep(storage, size)

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """One step: what is called meanwhile is queued."""
        gate = threading.Event()
        self._gates.append(gate)
        self.put(gate.wait)
        while len(self._gates) > self.ahead:
            self._gates.popleft().set()
        with _Queued(self):
            yield
        self._steps.append(self.record())
        while self._steps and self._steps[0].query():
            self._steps.popleft()
        self.most_ahead = max(self.most_ahead, len(self._steps))

    def abort(self) -> None:
        """Whatever waits for a lost peer stops doing so, and leaves garbage."""
        self._aborted.set()
        self.open_gates()

    def put(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def record(self) -> QueueMarker:
        return QueueMarker(self)

    def open_gates(self) -> None:
        """Somebody waits for the queue."""
        while self._gates:
            self._gates.popleft().set()

    def collective(self, call: Callable[[], Any], tensors: list[torch.Tensor]) -> QueuedWork:
        """Queue a collective that changes these tensors."""

        def work() -> None:
            if not self._aborted.is_set():
                try:
                    call().wait()
                    return
                except RuntimeError:  # a peer has died, or this process was aborted: NCCL's kernel waits for the latter
                    self._aborted.wait()
            for tensor in tensors:
                tensor.fill_(GARBAGE)

        self.put(work)
        self._works.append(QueuedWork(tensors, self.record()))
        return self._works[-1]

    def _run(self) -> None:
        while True:
            self._work.get()()


class _Queued(TorchDispatchMode):
    """Puts operations into the queue."""

    def __init__(self, device: AsyncDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it comes again with each rank's part
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        name = func._schema.name.partition("::")[2]
        if _is_immediate(func, tensors):
            return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotImplementedError(f"{name} would draw its random numbers later")
        if name in _WAITS or (func.namespace == "c10d" and not _any_floats(tensors)):
            self._device.record().synchronize()
            return func(*args, **kwargs)
        plain = tree_map_only(torch.Tensor, _alias, (args, kwargs))
        if func.namespace == "c10d":
            return self._collective(func, args, plain)
        written = _written(func, args, kwargs)
        if written:
            self._device.put(lambda: func(*plain[0], **plain[1]))
            torch.autograd.graph.increment_version([one for one in tree_leaves(written) if one is not None])
            returned = len(func._schema.returns)
            return None if not returned else written[0] if returned == 1 else tuple(written[:returned])
        results = _like_results(func, plain)
        into = [_alias(result) for result in tree_leaves(results) if isinstance(result, torch.Tensor)]
        self._device.put(lambda: _fill(into, func(*plain[0], **plain[1])))
        return results

    def _collective(self, func: Any, args: Any, plain: Any) -> Any:
        def call() -> Any:
            result = func(*plain[0], **plain[1])
            return result[-1] if isinstance(result, tuple | list) else result

        changed = [value for value in tree_leaves(plain[0][0]) if isinstance(value, torch.Tensor)]
        boxed = self._device.collective(call, changed).boxed()
        return boxed if len(func._schema.returns) == 1 else (args[0], boxed)


def _is_immediate(func: Any, tensors: list[torch.Tensor]) -> bool:
    if any(tensor.device.type != "cpu" or type(tensor).__name__ == "FakeTensor" for tensor in tensors):
        return True  # torch only asks what shape a result would have
    if func.namespace == "c10d":
        return False
    views = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
    return views or func._schema.name == "aten::detach" or not _any_floats(tensors)


def _any_floats(tensors: list[torch.Tensor]) -> bool:
    return any(tensor.is_floating_point() for tensor in tensors)


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Arguments that an operation changes."""
    found = []
    for index, declared in enumerate(func._schema.arguments):
        if declared.alias_info is not None and declared.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(declared.name)
            found += [value] if value is not None else []
    return found


def _like_results(func: Any, plain: Any) -> Any:
    """Memory for the results of an operation, which is not done."""
    on_meta = tree_map_only(torch.Tensor, lambda each: _empty_like(each, "meta"), plain)
    options = {**on_meta[1], "device": torch.device("meta")} if "device" in on_meta[1] else on_meta[1]
    return tree_map_only(torch.Tensor, lambda each: _empty_like(each, "cpu"), func(*on_meta[0], **options))


def _empty_like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _fill(into: list[torch.Tensor], results: Any) -> None:
    with torch.no_grad():
        found = [result for result in tree_leaves(results) if isinstance(result, torch.Tensor)]
        for to, result in zip(into, found, strict=True):
            to.copy_(result)
