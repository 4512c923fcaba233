"""A rank's checkpointer and its node's memory server, as they are in a job: a save, a death, a restore."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from served import JOB, SECRET, Served, request, serve

from hyperpod_ext.errors import (
    CorruptSnapshotError,
    JobFailedError,
    MemoryTierFullError,
    NotFoundError,
    StaleGenerationError,
)
from hyperpod_ext.runtime.checkpoint import overlapped_copy as beside
from hyperpod_ext.runtime.checkpoint.checkpointer import Checkpointer
from hyperpod_ext.runtime.checkpoint.staging import Stager
from hyperpod_ext.runtime.memory_server.client.client import MemoryClient
from hyperpod_ext.runtime.snapshot.fast_copy import pieces_of
from hyperpod_ext.runtime.snapshot.tree import Parts, take_apart


@pytest.fixture
def server(tmp_path) -> Iterator[Served]:
    with serve(tmp_path, {"kind": "memory", "budget_mib": 64}) as served:
        yield served


Make = Callable[..., Checkpointer]


@pytest.fixture
def make(server: Served) -> Make:
    """Makes checkpointers, each as a process of its rank would."""

    def make(rank: int = 0, **options: Any) -> Checkpointer:
        return Checkpointer(server.client(), rank, world_size=2, job=JOB, secret=SECRET, **options)

    return make


def parts_of(state: Any) -> Parts:
    return take_apart(state, torch.Tensor)


def save(checkpointer: Checkpointer, step: int, state: Any, **more: Any) -> bool:
    generation = more.pop("generation", 1)
    return checkpointer.save(step, f"g{generation}-s{step}", generation, parts_of(state), **more)


def wait_copied(checkpointer: Checkpointer) -> None:
    """Until nothing is being copied; the copy is not looked at yet."""
    checkpointer._background.wait()


def restored(checkpointer: Checkpointer, step: int, into: Any, owner: int = 0) -> Any:
    """The state of `step`, read into tensors like those of `into`."""
    return checkpointer.restore(parts_of(into), [checkpointer.load(owner, f"g1-s{step}")])


def various(seed: int) -> dict[str, Any]:
    """Every sort of tensor and value that a state may have."""
    torch.manual_seed(seed)
    return {
        "float": torch.rand(100, 30),
        "bfloat16": torch.rand(7).bfloat16(),
        "float8": torch.rand(5).to(torch.float8_e4m3fn),
        "bool": torch.rand(9) > 0.5,
        "scalar": torch.tensor(seed),
        "transposed": torch.rand(4, 6).T,
        "strided": torch.rand(20)[::2],
        "empty": torch.rand(0, 3),
        "large": torch.rand(700_000),
        "parameter": torch.nn.Parameter(torch.rand(3)),
        "frozen": torch.nn.Parameter(torch.rand(40_000), requires_grad=False),
        "frozen, of 3 bytes": torch.nn.Parameter(torch.rand(3).to(torch.float8_e4m3fn), requires_grad=False),
        "deep": [{"lr": 0.1 * seed, "betas": (0.9, 0.99), "foreach": None}, torch.rand(2)],
        "seed": seed,
    }


def equal(one: Any, other: Any) -> bool:
    first, second = parts_of(one), parts_of(other)
    return (first.shape, first.values) == (second.shape, second.values) and all(
        a.dtype == b.dtype and torch.equal(a.detach().float(), b.detach().float())
        for a, b in zip(first.tensors, second.tensors, strict=True)
    )


class Held(torch.Tensor):
    """A tensor that is copied only when the test says so."""

    go: threading.Event
    begun: threading.Event

    @staticmethod
    def of(tensor: torch.Tensor) -> Held:
        held = tensor.as_subclass(Held)
        held.go, held.begun = threading.Event(), threading.Event()
        return held

    def detach(self) -> Held:
        other = super().detach()
        other.go, other.begun = self.go, self.begun
        return other

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.copy_ and isinstance(args[1], Held):
            args[1].begun.set()
            args[1].go.wait()
        return super().__torch_function__(func, types, args, kwargs or {})


# --- there and back -------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_a_state_comes_back_as_it_was(make, overlap):
    saving = make(overlap=overlap)
    assert save(saving, 1, various(1))
    saving.flush()
    into = various(2)
    before = {name: value for name, value in into.items() if isinstance(value, torch.Tensor)}
    state = restored(make(), 1, into)
    assert equal(state, various(1))
    assert all(state[name] is tensor for name, tensor in before.items())  # filled, not replaced


def test_it_comes_back_to_the_process_that_saved_it_too(make):
    checkpointer, live = make(), various(1)
    save(checkpointer, 1, live)
    with torch.no_grad():
        for tensor in parts_of(live).tensors:
            tensor.zero_()
    checkpointer.flush()
    assert equal(restored(checkpointer, 1, live), various(1))


def test_each_save_is_one_of_its_own(make):
    checkpointer, live = make(), various(0)
    for step in range(1, 6):
        live["scalar"].fill_(step)
        live["seed"] = step
        save(checkpointer, step, live)
    checkpointer.flush()
    for step in (4, 5):
        state = restored(make(), step, various(9))
        assert (state["scalar"].item(), state["seed"]) == (step, step)
    with pytest.raises(NotFoundError):
        checkpointer.load(0, "g1-s3")


def test_what_is_noted_beside_the_state_comes_back(make):
    checkpointer = make()
    save(checkpointer, 1, {"t": torch.ones(1)}, extras={"sharing": "same", "buckets": [[1, 2]]})
    snapshot = checkpointer.load(0, "g1-s1")
    assert (snapshot.step, dict(snapshot.extras)) == (1, {"sharing": "same", "buckets": [[1, 2]]})


def test_another_ranks_snapshot_can_be_read(make):
    writer, checkpointer = make(1), make(0)
    save(writer, 1, {"t": torch.full((3,), 7.0)})
    writer.flush()  # another rank's reader is not told to wait for its seal
    assert torch.equal(restored(checkpointer, 1, {"t": torch.zeros(3)}, owner=1)["t"], torch.full((3,), 7.0))


def test_a_flipped_bit_is_found(make):
    checkpointer, live = make(), various(1)
    save(checkpointer, 1, live)
    checkpointer.flush()
    mapping = checkpointer._mapping
    assert mapping is not None
    mapping.memory[1_000_000] ^= 1
    with pytest.raises(CorruptSnapshotError, match="rank 0 at step 1: CRC64-NVME"):
        restored(make(), 1, various(2))


def test_a_state_that_the_memory_tier_has_no_room_for_is_refused(make):
    checkpointer = make()
    save(checkpointer, 1, {"t": torch.ones(1)})
    with pytest.raises(MemoryTierFullError, match="its budget is 64 MiB"):
        save(checkpointer, 2, {"t": torch.ones(10 << 20)})
    assert restored(checkpointer, 1, {"t": torch.zeros(1)})["t"].item() == 1


def test_a_writer_that_is_fenced_off_is_told(make, server):
    checkpointer = make()
    save(checkpointer, 1, {"t": torch.ones(1)})
    checkpointer.flush()
    server.ask("fence", generation=2, step=1)
    save(checkpointer, 2, {"t": torch.ones(1)})
    with pytest.raises(StaleGenerationError):
        checkpointer.flush()
    assert save(checkpointer, 2, {"t": torch.ones(1)}, generation=2)
    checkpointer.flush()
    assert server.held_steps() == [1, 2]


def test_what_was_asked_for_survives_a_kill(make, server):
    live = {"t": torch.ones(3)}  # small: a forked process has none of the threads that large copies are made by
    pid = os.fork()
    if pid == 0:
        try:
            save(make(), 1, live)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert server.held_steps() == [1]
    assert restored(make(), 1, {"t": torch.zeros(3)})["t"].tolist() == [1.0] * 3


def test_a_replacement_writes_on_in_the_memory_of_the_dead(make, server):
    for step in (1, 2, 3):
        checkpointer = make()
        save(checkpointer, step, various(step))
        checkpointer.flush()
    assert server.held_steps() == [2, 3]
    assert equal(restored(make(), 2, various(0)), various(2))


# --- the layout -----------------------------------------------------------------------------------


def test_equal_states_make_equal_images_on_every_rank(make, server):
    for rank in (0, 1):
        checkpointer = make(rank)
        for step in (1, 2, 3):  # other states have been in these slots
            save(checkpointer, step, various(step + rank))
        save(checkpointer, 4, various(4))
        checkpointer.flush()
    contents = {held["content"] for held in server.ask("held")["snapshots"] if held["step"] == 4}
    assert len(contents) == 1


def test_other_tensors_of_the_same_layout_are_what_is_saved(make):
    """An optimizer's load_state_dict makes new ones."""
    checkpointer = make()
    save(checkpointer, 1, {"a": torch.ones(3), "b": torch.ones(2)})
    save(checkpointer, 2, {"a": torch.full((3,), 2.0), "b": torch.full((2,), 2.0)})
    save(checkpointer, 3, {"a": torch.nn.Parameter(torch.full((3,), 3.0)), "b": torch.full((2,), 3.0)})
    checkpointer.flush()
    state = restored(make(), 3, {"a": torch.zeros(3), "b": torch.zeros(2)})
    assert (state["a"].tolist(), state["b"].tolist()) == ([3.0] * 3, [3.0] * 2)


def test_a_tensor_that_was_given_other_memory_is_saved_from_there(make):
    """`parameter.data = ...`, as Module.to() and swaps of averaged weights do."""
    checkpointer, parameter = make(), torch.nn.Parameter(torch.zeros(3))
    save(checkpointer, 1, {"p": parameter})
    parameter.data = torch.full((3,), 2.0)
    save(checkpointer, 2, {"p": parameter})
    checkpointer.flush()
    assert restored(make(), 2, {"p": torch.zeros(3)})["p"].tolist() == [2.0] * 3


def test_a_tensor_that_was_given_other_memory_is_restored_to_there(make):
    checkpointer, parameter = make(), torch.nn.Parameter(torch.ones(3))
    save(checkpointer, 1, {"p": parameter})
    checkpointer.flush()
    parameter.data = torch.zeros(3)
    restored(checkpointer, 1, {"p": parameter})
    assert parameter.tolist() == [1.0] * 3


def test_a_tensor_that_was_given_another_type_in_place_is_saved_as_that(make):
    checkpointer, model = make(), torch.nn.Linear(3, 2)
    save(checkpointer, 1, dict(model.named_parameters()))
    model.to(torch.bfloat16)
    save(checkpointer, 2, dict(model.named_parameters()))
    checkpointer.flush()
    fresh = torch.nn.Linear(3, 2).to(torch.bfloat16)
    assert {item.dtype for item in make().load(0, "g1-s2").plan.items} == {"bfloat16"}
    state = restored(make(), 2, dict(fresh.named_parameters()))
    assert torch.equal(state["weight"], model.weight)


@pytest.mark.parametrize(
    "other",
    [{"a": torch.ones(4)}, {"a": torch.ones(3), "b": torch.ones(1)}, {"a": torch.ones(3).int()}, {"b": torch.ones(3)}],
)
def test_another_layout_is_planned_anew(make, server, other):
    checkpointer = make()
    save(checkpointer, 1, {"a": torch.zeros(3)})
    save(checkpointer, 2, other)
    checkpointer.flush()
    assert server.held_steps() == [1, 2]
    into = {name: torch.zeros_like(tensor) for name, tensor in other.items()}
    assert equal(restored(make(), 2, into), other)
    assert restored(checkpointer, 1, {"a": torch.ones(3)})["a"].tolist() == [0.0] * 3


def test_a_state_that_grows_beyond_its_memory_gets_more_and_keeps_what_was_held(make, server):
    checkpointer = make()
    save(checkpointer, 1, {"a": torch.ones(3)})
    grown = {"a": torch.ones(3), "b": torch.ones(100_000)}
    save(checkpointer, 2, grown)
    checkpointer.flush()
    assert server.held_steps() == [1, 2]
    assert equal(restored(make(), 2, {"a": torch.zeros(3), "b": torch.zeros(100_000)}), grown)


def test_memory_that_was_reserved_is_that_of_the_first_saves(make, server):
    checkpointer = make()
    checkpointer.reserve(1 << 20)
    reserved = checkpointer._mapping
    checkpointer.prepare(parts_of(various(1) | {"large": 0}))
    save(checkpointer, 1, various(1) | {"large": 0})
    save(checkpointer, 2, {"t": torch.ones(200_000)})
    checkpointer.flush()
    assert checkpointer._mapping is reserved
    assert server.held_steps() == [1, 2]


def test_more_than_there_is_cannot_be_reserved(make):
    with pytest.raises(MemoryTierFullError):
        make().reserve(40 << 20)


def test_a_tensor_that_cannot_be_saved_is_named(make):
    with pytest.raises(JobFailedError, match=r"a\.0 is a tensor .*sparse_coo"):
        save(make(), 1, {"a": [torch.eye(2).to_sparse()]})


@pytest.mark.parametrize("live", [torch.zeros(4), torch.zeros(3, dtype=torch.float64), torch.zeros(1).expand(3)])
def test_a_live_tensor_of_another_shape_type_or_strides_is_replaced(make, live):
    checkpointer = make()
    save(checkpointer, 1, {"a": torch.ones(3)})
    state = restored(checkpointer, 1, {"a": live, "b": torch.full((3,), 7.0)})
    assert state.keys() == {"a"}, "the tree is the one that was saved"
    assert state["a"].dtype == torch.float32
    assert torch.equal(state["a"], torch.ones(3))
    assert state["a"] is not live


def test_state_that_nothing_live_stands_for_comes_as_tensors_of_its_own(make):
    """An optimizer that has made no step yet has no momentum to be filled."""
    checkpointer = make()
    save(checkpointer, 1, {"a": torch.ones(3), "momentum": torch.full((3,), 5.0)})
    state = restored(checkpointer, 1, {"a": torch.zeros(3)})
    assert (state["a"].tolist(), state["momentum"].tolist()) == ([1.0] * 3, [5.0] * 3)
    save(checkpointer, 2, {"a": torch.zeros(3), "momentum": torch.zeros(3)})
    save(checkpointer, 3, {"a": torch.zeros(3), "momentum": torch.zeros(3)})
    checkpointer.flush()
    assert state["momentum"].tolist() == [5.0] * 3  # whatever is written to the slots later


# --- beside training ------------------------------------------------------------------------------


def test_a_save_beside_training_returns_at_once_and_is_waited_for(make, server):
    checkpointer, held = make(overlap=True), Held.of(torch.ones(3))
    assert save(checkpointer, 1, {"t": held})
    assert held.begun.wait(10)
    assert checkpointer.busy()
    assert server.held_steps(owner=9) == []  # not there before it has been copied
    waited = threading.Event()
    threading.Thread(target=lambda: (checkpointer.wait_staged(), waited.set()), daemon=True).start()
    assert not waited.wait(0.1)
    held.go.set()
    assert waited.wait(10)
    checkpointer.flush()
    assert not checkpointer.busy()
    assert server.held_steps() == [1]


@pytest.mark.parametrize("waited_for", ["at once", "halfway", "when it is done"])
def test_a_checksum_taken_on_the_way_is_that_of_a_plain_save(make, server, monkeypatch, waited_for):
    monkeypatch.setattr(beside, "has_room", lambda *_: True)
    saving, plain, taken = make(overlap=True), make(1), 0
    copy_pieces, run = beside.copy_pieces_checked, beside.OverlappedCopy.run

    def count(*args: Any) -> beside.CopyProgress:
        nonlocal taken
        copied = run(*args)
        taken += copied.nbytes
        return copied

    monkeypatch.setattr(beside.OverlappedCopy, "run", count)
    if waited_for == "halfway":

        def half(pieces: Any, *rest: Any) -> tuple[int, int]:
            kept = pieces[: len(pieces) // 2]
            return copy_pieces(pieces_of([(piece.to, piece.source, piece.nbytes) for piece in kept]), *rest)

        monkeypatch.setattr(beside, "copy_pieces_checked", half)
    live = various(0)
    for step in (1, 2, 3, 4):
        live["scalar"].fill_(step)
        for checkpointer in (saving, plain):
            save(checkpointer, step, live, changing=lambda tensor: tensor is live["bool"])
        if waited_for != "at once":
            wait_copied(saving)
        saving.wait_staged()
    saving.flush()
    plain.flush()
    whole = 3 * saving.own_slots()[2] - 3000 < taken
    assert {"at once": True, "halfway": taken > 0 and not whole, "when it is done": whole}[waited_for], taken
    contents = {held["content"] for held in server.ask("held")["snapshots"] if held["step"] == 4}
    assert len(contents) == 1
    for step in (3, 4):
        assert restored(make(), step, various(9))["scalar"].item() == step


def test_a_tensor_changed_while_it_is_copied_is_never_a_snapshot(make, server):
    checkpointer, held, other = make(overlap=True), Held.of(torch.ones(3)), torch.ones(2)
    save(checkpointer, 1, {"other": other, "slow": held})
    assert held.begun.wait(10)
    other.add_(1)
    held.go.set()
    with pytest.warns(RuntimeWarning, match="other was changed while step 1 was being copied"):
        checkpointer.wait_staged()
    checkpointer.flush()
    assert server.held_steps() == []


def test_after_that_saves_are_made_at_once(make, server):
    checkpointer, held, other = make(overlap=True), Held.of(torch.ones(3)), torch.ones(2)
    save(checkpointer, 1, {"other": other, "slow": held})
    assert held.begun.wait(10)
    other.add_(1)
    held.go.set()
    with pytest.warns(RuntimeWarning):
        checkpointer.wait_staged()
    for step in (2, 3, 4):
        save(checkpointer, step, {"other": other, "slow": held})
        other.add_(1)  # too early for a copy beside training; not for one that is made at once
    checkpointer.flush()
    assert server.held_steps() == [3, 4]
    state = restored(make(), 4, {"other": torch.zeros(2), "slow": torch.zeros(3)})
    assert state["other"].tolist() == [4.0, 4.0]


def test_what_no_counter_tells_of_is_seen_and_the_snapshot_taken_back(make, server):
    checkpointer, weights = make(overlap=True), torch.ones(4)
    save(checkpointer, 1, {"weights": weights})
    checkpointer.flush()
    save(checkpointer, 2, {"weights": weights})
    wait_copied(checkpointer)
    weights.data.copy_(torch.zeros(4))  # as averaged weights are put in for an evaluation
    with pytest.warns(RuntimeWarning, match="weights was changed while step 2 was being copied"):
        checkpointer.flush()
    assert server.held_steps() == [1]
    for step in (3, 4):
        save(checkpointer, step, {"weights": weights})
        checkpointer.flush()
    assert server.held_steps() == [3, 4]
    assert restored(make(), 4, {"weights": torch.ones(4)})["weights"].tolist() == [0.0] * 4


def test_weights_swapped_in_while_they_are_copied_are_never_a_snapshot_though_they_were_swapped_back(make, server):
    checkpointer, held, weights = make(overlap=True), Held.of(torch.ones(3)), torch.ones(4)
    save(checkpointer, 1, {"slow": held, "weights": weights})
    assert held.begun.wait(10)
    weights.numpy()[...] = 0  # raises no counter
    held.go.set()
    wait_copied(checkpointer)
    weights.numpy()[...] = 1
    with pytest.warns(RuntimeWarning, match="weights was changed while step 1 was being copied"):
        checkpointer.wait_staged()
    checkpointer.flush()
    assert server.held_steps() == []


def test_a_state_that_differs_from_its_snapshot_is_named(make):
    checkpointer, weights = make(), torch.ones(4)
    save(checkpointer, 1, {"weights": weights})
    assert checkpointer.differing("g1-s1") is None
    weights.numpy()[...] = 0
    assert checkpointer.differing("g1-s1") == "weights"
    assert checkpointer.differing("g1-s2") is None


def test_a_copy_that_failed_says_nothing_about_the_live_state(make, monkeypatch):
    checkpointer, weights = make(), torch.ones(4)
    for step in (1, 2):
        save(checkpointer, step, {"weights": weights})
        weights += 1
    monkeypatch.setattr(Stager, "copy", mock.Mock(side_effect=OSError("planted")))
    with pytest.raises(OSError, match="planted"):
        save(checkpointer, 3, {"weights": weights})
    assert checkpointer.differing("g1-s3") is None, "its slot holds the state of step 1"


def test_what_may_change_is_copied_before_the_save_returns(make):
    checkpointer, held, buffer = make(overlap=True), Held.of(torch.ones(3)), torch.ones(2)
    save(checkpointer, 1, {"buffer": buffer, "slow": held}, changing=lambda tensor: tensor is buffer)
    buffer.add_(1)  # as a forward pass does
    held.go.set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpointer.flush()
    state = restored(make(), 1, {"buffer": torch.zeros(2), "slow": torch.zeros(3)})
    assert state["buffer"].tolist() == [1.0, 1.0]


def test_each_slot_is_pinned_before_it_is_used(make, monkeypatch):
    pinned: list[tuple[int, int]] = []
    monkeypatch.setattr(Stager, "register", lambda self, memory, nbytes, start: pinned.append((start, nbytes)))
    checkpointer = make()
    for step in range(3):
        save(checkpointer, step, {"x": torch.full((5000,), step)})
    _, slot_bytes, _ = checkpointer.own_slots()
    assert len(set(pinned)) > 1, "one slot after the other"
    assert all(nbytes == slot_bytes and start % slot_bytes == 0 for start, nbytes in pinned)


def test_the_next_save_waits_for_the_copy_before(make, server):
    checkpointer, held = make(overlap=True), Held.of(torch.ones(3))
    save(checkpointer, 1, {"t": held})
    saved = threading.Event()
    threading.Thread(target=lambda: (save(checkpointer, 2, {"t": held}), saved.set()), daemon=True).start()
    assert not saved.wait(0.1)
    held.go.set()
    assert saved.wait(10)
    checkpointer.flush()
    assert server.held_steps() == [1, 2]


def test_a_copy_is_waited_for_though_the_one_before_was_not(make, server):
    checkpointer, held = make(overlap=True), Held.of(torch.ones(3))
    held.go.set()
    save(checkpointer, 1, {"t": held})
    wait_copied(checkpointer)
    held.go.clear()
    save(checkpointer, 2, {"t": held})
    staged = threading.Event()
    threading.Thread(target=lambda: (checkpointer.wait_staged(), staged.set()), daemon=True).start()
    assert not staged.wait(0.3)
    held.go.set()
    assert staged.wait(10)
    checkpointer.flush()
    assert server.held_steps() == [1, 2]


class Behind:
    """A device that has done what is queued when the test says so; its only marker."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def record(self) -> Behind:
        return self

    def query(self) -> bool:
        return self.reached.is_set()

    def synchronize(self) -> None:
        assert self.reached.wait(60)


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_snapshot_gives_way_to_a_step_only_once_the_device_has_made_that(make, server, at_once, counts):
    """Until then other ranks may have to go back to it: see `Checkpointer._begin`."""
    checkpointer, device, aborted = make(overlap=True), Behind(), set()
    checkpointer.follow(device, lambda step: step not in aborted)
    device.reached.set()
    for step in (1, 2):
        assert save(checkpointer, step, {"t": torch.ones(3)})
        checkpointer.flush()
    device.reached.clear()
    saving = threading.Thread(target=save, args=(checkpointer, 3, {"t": torch.ones(3)}), kwargs={"at_once": at_once})
    saving.start()
    if not at_once:  # the loop runs ahead
        saving.join()
    assert checkpointer._client.ask(request("held", owner=9, pid=os.getpid())) is not None  # all that was sent is done
    assert server.held_steps() == [1, 2]
    if not counts:
        aborted.add(3)
    device.reached.set()
    saving.join()
    assert checkpointer.wait_staged() is (counts or at_once)
    checkpointer.flush()
    assert server.held_steps() == ([2, 3] if counts else [1, 2])


def test_a_copy_that_fails_is_told_at_the_next_moment(make, server):
    checkpointer = make(overlap=True)
    save(checkpointer, 1, {"t": torch.ones(1)})
    checkpointer.flush()
    server.kill()
    save_failed = False
    try:
        save(checkpointer, 2, {"t": torch.ones(1)})
        checkpointer.flush()
    except (JobFailedError, ConnectionError):
        save_failed = True
    assert save_failed


@pytest.mark.parametrize("overlap", [False, True])
def test_what_was_saved_with_a_server_that_ended_is_saved_anew_with_the_next(tmp_path, overlap):
    """Whatever call meets the end, none fails; with no other server to come, it says so."""
    place = {"kind": "memory", "budget_mib": 64}
    with serve(tmp_path, place) as first:
        client = MemoryClient(str(first.path), another=True)
        checkpointer = Checkpointer(client, 0, world_size=1, job=JOB, secret=SECRET, overlap=overlap)
        assert save(checkpointer, 1, various(1))
        first.kill()
        checkpointer.stepped()  # waits for nobody
        first.path.unlink()
        with serve(tmp_path, place) as second:
            assert not checkpointer.flush()
            assert second.held_steps() == []
            with pytest.raises(NotFoundError):
                checkpointer.load(0, "g1-s1")
            assert save(checkpointer, 2, state := various(2))
            assert checkpointer.flush()
            assert second.held_steps() == [2]
            assert equal(restored(checkpointer, 2, various(3)), state)
        client.close()


def test_a_server_after_which_none_comes_is_missed_at_once(server, make):
    checkpointer = make()
    server.kill()
    with pytest.raises(JobFailedError, match="memory server of this node is gone"):
        save(checkpointer, 1, various(1))


def test_what_is_lost_with_its_server_while_it_is_restored_is_said_to_be(tmp_path):
    place = {"kind": "memory", "budget_mib": 64}
    with serve(tmp_path, place) as first:
        client = MemoryClient(str(first.path), another=True)
        checkpointer = Checkpointer(client, 0, world_size=1, job=JOB, secret=SECRET)
        assert save(checkpointer, 1, various(1))
        assert checkpointer.flush()
        first.kill()
        first.path.unlink()
        with serve(tmp_path, place), pytest.raises(NotFoundError, match="memory server of this node ended"):
            checkpointer.load(0, "g1-s1")
        client.close()
