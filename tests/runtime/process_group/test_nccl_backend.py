"""Communicators of NCCL groups are aborted all at once, and waited for; no GPU is needed to see in which order."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import Member, Ranks
from torch._C._distributed_c10d import Backend

from hyperpod_ext.errors import ConfigError, JobFailedError
from hyperpod_ext.runtime.process_group import groups, lasting_groups, nccl_backend
from hyperpod_ext.runtime.process_group import torch_private as torch_names
from hyperpod_ext.runtime.process_group.backend import AbortStuckError
from hyperpod_ext.runtime.process_group.gloo_backend import LAZY
from hyperpod_ext.runtime.process_group.nccl import versions
from hyperpod_ext.runtime.process_group.nccl.environment import engines_used, nccl_environment, variables_of
from hyperpod_ext.runtime.process_group.nccl.versions import Component
from hyperpod_ext.runtime.process_group.nccl_backend import Nccl
from hyperpod_ext.runtime.torch_requirements.private_names import Feature, missing


class Communicators:
    """Of a group: their abort takes what `call` takes."""

    def __init__(self, call=lambda: None) -> None:
        self.aborts, self._call = 0, call

    def abort(self) -> None:
        self._call()
        self.aborts += 1


class Job:
    """Groups of a rank, and how often its GPU was waited for."""

    def __init__(self, **communicators: Communicators) -> None:
        self.communicators, self.synchronized = communicators, 0
        self.nccl = Nccl(lambda: dict(self.communicators), self._synchronize)
        self.nccl.enter(4, lasting=False)

    def _synchronize(self) -> None:
        assert all(one.aborts == 1 for one in self.communicators.values()), "kernels of these still wait"
        self.synchronized += 1


def test_no_abort_is_waited_for_before_all_have_begun():
    together = threading.Barrier(3)
    job = Job(**{name: Communicators(together.wait) for name in ("default", "replicate", "shard")})
    job.nccl.abort()
    with job.nccl.ending():
        assert [one.aborts for one in job.communicators.values()] == [1, 1, 1]
    assert job.synchronized == 1


def test_each_is_aborted_once_however_often_it_is_said():
    job = Job(default=Communicators())
    job.nccl.abort()
    job.communicators["late"] = Communicators()
    job.nccl.abort()
    job.nccl.abort()
    with job.nccl.ending():
        assert [one.aborts for one in job.communicators.values()] == [1, 1]


def test_an_abort_that_came_before_the_groups_were_known_comes_again():
    job = Job()
    job.nccl.abort()
    job.communicators["default"] = Communicators()
    job.nccl.opened()
    with job.nccl.ending():
        assert job.communicators["default"].aborts == 1


def test_the_next_generation_is_not_aborted():
    job = Job(default=Communicators())
    job.nccl.abort()
    with job.nccl.ending():
        pass
    job.communicators["default"] = Communicators()
    job.nccl.enter(4, lasting=False)
    job.nccl.opened()
    with job.nccl.ending():
        assert job.communicators["default"].aborts == 0
    assert job.synchronized == 1, "a job that ends well is not waited for here"


def test_an_abort_that_does_not_end_is_named(monkeypatch):
    monkeypatch.setattr(nccl_backend, "_LIMIT_S", 0.05)
    for_ever = threading.Event()
    job = Job(default=Communicators(), shard=Communicators(for_ever.wait))
    job.nccl.abort()
    with pytest.raises(AbortStuckError, match="the abort of group shard: not done after"), job.nccl.ending():
        raise AssertionError("the groups are destroyed")
    for_ever.set()


def test_an_abort_that_fails_is_named():
    def fail() -> None:
        raise RuntimeError("unhandled system error")

    job = Job(default=Communicators(fail))
    job.nccl.abort()
    with pytest.raises(AbortStuckError, match="the abort of group default failed: unhandled system error"):
        job.nccl.ending().__enter__()


def test_a_gpu_that_does_not_end_is_named(monkeypatch):
    monkeypatch.setattr(nccl_backend, "_LIMIT_S", 0.05)
    for_ever = threading.Event()
    nccl = Nccl(lambda: {"default": Communicators()}, for_ever.wait)
    nccl.abort()
    with pytest.raises(AbortStuckError, match="the work queued on the GPU: not done"):
        nccl.ending().__enter__()
    for_ever.set()


# --- in process groups ------------------------------------------------------------------------------


@pytest.fixture
def gloo_for_nccl(monkeypatch):
    """Groups have gloo for tensors of GPUs, too, and what aborts NCCL's communicators aborts those of gloo."""
    monkeypatch.setitem(groups.TORCH_NAMES, "nccl", "cpu:gloo,cuda:gloo")
    found = Nccl(lambda: torch_names.backends_of("cuda"), lambda: None)
    monkeypatch.setattr(groups.Nccl, "prepare", lambda: found)


def _all_groups(member: Member) -> None:
    while member.join():
        with member.faults():
            pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
            lone = dist.new_group([1], backend="gloo")
            aborted = sorted(torch_names.backends_of("cuda"))
            wanted = sorted(torch_names.open_groups())
            del lone
            member.send("groups", dist.get_backend_config(), aborted == wanted, len(aborted))
            while True:
                dist.barrier(pairs[member.rank // 2])


@pytest.mark.skipif(not hasattr(Backend, "abort"), reason="in this torch only NCCL's groups can be aborted")
@pytest.mark.usefixtures("gloo_for_nccl")
def test_groups_of_two_backends_go_through_faults():
    with Ranks(4, _all_groups, kind=lambda rank: "nccl") as ranks:
        for target in (2, 0):
            ranks.begin()
            heard = ranks.hear("groups")
            assert {config for config, _, _ in heard.values()} == {"cpu:gloo,cuda:gloo"}
            assert all(same for _, same, _ in heard.values())
            assert [number for _, (_, _, number) in sorted(heard.items())] == [2, 3, 2, 2]
            ranks.kill(target)
            ranks.abort(target)
            ranks.hear("freed", target)
            ranks.start(target)
        ranks.begin()
        ranks.hear("groups")


def _say_its_backends(member: Member) -> None:
    while member.join():
        with member.faults():
            member.send("backends", dist.get_backend_config())
            dist.barrier()


def test_groups_that_are_not_reconfigured_have_another_implementation_where_several_cannot_be_aborted(
    gloo_for_nccl, monkeypatch
):
    monkeypatch.setitem(groups.TORCH_NAMES, "nccl", "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(groups, "without_reconfigure", lambda torch, given: "gloo")
    monkeypatch.setenv(LAZY, "1")
    with Ranks(2, _say_its_backends, kind=lambda rank: "nccl") as ranks:
        ranks.begin()
        assert set(ranks.hear("backends").values()) == {("cpu:gloo,cuda:gloo",)}


def _a_second_gloo(options, _):
    return dist.ProcessGroupGloo(
        options.store, options.group_rank, options.group_size, timeout=options.timeout,
        enable_reconfigure=options.enable_reconfigure,
    )  # fmt: skip


def _hold_on(member: Member) -> None:
    """What was made in the first generation is used in all, each of its backends."""
    held: list[dist.ProcessGroup] = []
    while member.join():
        with member.faults():
            now = [dist.group.WORLD, [dist.new_group([0, 1]), dist.new_group([2, 3])][member.rank // 2]]
            held = held or now
            same = all(mine is its for mine, its in zip(held, now, strict=True))
            sums = {}
            for number, group in enumerate(held):
                for device, backend in torch_names.parts_of(group).items():
                    number_of_rank = torch.tensor([member.rank + 1.0])
                    backend.allreduce([number_of_rank]).wait()
                    sums[number, device] = int(number_of_rank)
            member.send("sums", same, sums)
            while True:
                torch_names.parts_of(held[0])["cuda"].allreduce([torch.ones(1)]).wait()


@pytest.mark.skipif(bool(missing(Feature.LASTING_GROUPS)), reason="this torch cannot give an open group other ranks")
def test_a_group_of_two_backends_is_kept_with_both_of_them(gloo_for_nccl, monkeypatch):
    dist.Backend.register_backend("hpx_gloo", _a_second_gloo, extended_api=True, devices=["cuda"])
    monkeypatch.setitem(groups.TORCH_NAMES, "nccl", "cpu:gloo,cuda:hpx_gloo")
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", "1")
    with Ranks(4, _hold_on, kind=lambda rank: "nccl") as ranks:
        for target in (2, 0, 3, None):
            ranks.begin()
            for rank, (same, sums) in ranks.hear("sums").items():
                pair = 3 if rank < 2 else 7
                assert same
                assert sums == {(0, "cpu"): 10, (0, "cuda"): 10, (1, "cpu"): pair, (1, "cuda"): pair}
            if target is not None:
                ranks.kill(target)
                ranks.abort(target)
                ranks.hear("freed", target)
                ranks.start(target)


@pytest.mark.parametrize(
    ("version", "given", "hook", "lasts"),
    [
        ("2.15.0", {}, "register_abort_hook", True),
        ("2.15.0", {"TORCH_DIST_USE_NCCL2": "0"}, "register_abort_hook", False),
        ("2.14.1", {}, "register_abort_hook", False),
        ("3.0.0", {}, "of_another_name", False),
    ],
)
def test_groups_with_nccl_last_where_its_second_implementation_is_used_and_heard(
    version, given, hook, lasts, monkeypatch
):
    monkeypatch.setattr(lasting_groups, "Backend", SimpleNamespace(**{hook: None}))
    monkeypatch.setattr(lasting_groups, "missing", lambda feature: ())
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert lasting_groups.can_last(4, nccl=True) is lasts
    assert lasting_groups.can_last(4)


def _say_what_is_raised(member: Member) -> None:
    try:
        member.join()
        member.send("opened")
    except JobFailedError as error:
        member.send("refused", str(error).splitlines()[0])
    member.inbox.get()  # the others ask this rank's store


@pytest.mark.usefixtures("gloo_for_nccl")
def test_a_rank_without_a_gpu_is_named():
    with Ranks(3, _say_what_is_raised, kind=lambda rank: "gloo" if rank == 1 else "nccl") as ranks:
        ranks.begin()
        heard = ranks.hear("refused", 1)
    assert {rank: message for rank, (message,) in heard.items()} == {
        rank: f"rank {rank} opens process groups with nccl, but rank 1 with gloo" for rank in (0, 2)
    }


# --- before the first group -------------------------------------------------------------------------


@pytest.fixture
def two_gpus(monkeypatch):
    """What torch says on a node with two of them; which one is used is in the list."""
    used: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    for variable in variables_of("nccl"):
        for name in variable.names:
            monkeypatch.delenv(name, raising=False)
    return used


def test_the_environment_is_set_and_a_gpu_is_chosen(two_gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    Nccl.prepare()
    assert two_gpus == [1]
    wanted = nccl_environment(engines_used(torch.__version__, {}), {})
    assert {name: os.environ.pop(name) for name in wanted} == wanted


def test_a_variable_and_a_library_that_do_not_allow_it_are_refused(two_gpus, monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with pytest.raises(ConfigError, match="CUDA_LAUNCH_BLOCKING"):
        Nccl.prepare()
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(versions, "installed", lambda environ, built_in: [Component("NCCL", (2, 28, 3))])
    with pytest.raises(ConfigError, match=r"NCCL.*2\.28\.3.*Good: 2\.28\.9 or newer"):
        Nccl.prepare()
    assert not two_gpus


def test_a_library_that_only_needs_a_word_is_told(two_gpus, monkeypatch, capfd):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(versions, "installed", lambda environ, built_in: [Component("aws-ofi-nccl", (1, 17, 0))])
    Nccl.prepare()
    assert "sometimes crashes the process" in capfd.readouterr().err


# --- what is raised ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [  # as ranks on an H200 raised it, whose peer was killed: torch 2.11 with NCCL 2.28.9, torch 2.15 with 2.30.7
        "NCCL communicator was aborted on rank 0. ",
        "NCCL timeout in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:197",
        "NCCL AllGather failed: remote process exited or there was a network error \n"
        "NCCL Last Error: socketProgress: Connection closed by remote peer localhost<57540>",
        "failed to get async error: invalid argument (run with NCCL_DEBUG=WARN for details) \n"
        "NCCL Last Error: Error: corrupted comm object detected",
    ],
)
def test_what_a_lost_peer_makes_of_a_collective_is_not_taken_for_the_cause(text):
    nccl = Nccl(dict, lambda: None)
    assert nccl.is_broken(RuntimeError(text))
    assert not nccl.is_broken(ValueError(text))


def test_an_error_of_its_own_is_one():
    unhandled = (
        "NCCL commInitRankConfig failed during reconfigure: unhandled cuda error (run with NCCL_DEBUG=INFO for ...)"
    )
    assert not Nccl(dict, lambda: None).is_broken(RuntimeError(unhandled))


# --- which backend ------------------------------------------------------------------------------------


def test_the_backend_follows_from_the_job_and_the_process(monkeypatch):
    monkeypatch.setattr(groups, "_no_nccl", lambda: "")
    assert [groups.choose(wanted) for wanted in (None, "nccl", "gloo")] == ["nccl", "nccl", "gloo"]
    monkeypatch.setattr(groups, "_no_nccl", lambda: "this process sees no GPU")
    assert [groups.choose(wanted) for wanted in (None, "gloo")] == ["gloo", "gloo"]
    with pytest.raises(JobFailedError, match="process_group_backend is 'nccl', and this process sees no GPU"):
        groups.choose("nccl")
