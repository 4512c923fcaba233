"""Objects that hold process groups, through the end of their groups: one rank, in a process of its own."""

from __future__ import annotations

import textwrap

import pytest
import warm_code

from hyperpod_ext.runtime.torch_requirements.private_names import Feature, missing

PRELUDE = """
import torch, torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.state import meshes
from hyperpod_ext.runtime.state.training_state import raw_bytes

def open_groups():
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)

def close_groups():
    places = meshes.let_go()
    dist.destroy_process_group()
    dist.distributed_c10d._world.group_count = 0
    return places

open_groups()
"""


def run(body: str) -> str:
    """What `body` prints."""
    done = warm_code.run(PRELUDE + textwrap.dedent(body))
    assert done.returncode == 0, done.stderr
    return done.stdout


def needs_kept_modules() -> None:
    if missing(Feature.KEPT_MESHES) + missing(Feature.KEPT_FSDP2):
        pytest.skip("with this torch what run.keep returned is built anew after a fault")


@pytest.fixture(scope="module")
def kept() -> str:
    needs_kept_modules()
    return run("""
        def build():
            mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
            model = fully_shard(nn.Linear(4, 4), mesh=mesh)
            return model, mesh, dist.new_group([0])

        with meshes.recording() as made:
            model, mesh, group = build()
        print("made", [name for _, _, name in made.calls], "talked", made.talked)
        before = model(torch.ones(2, 4)).sum()
        old = group
        model(torch.ones(2, 4)).sum()  # a forward that no backward follows
        places = close_groups()
        info = model._get_fsdp_state()._fsdp_param_groups[0].mesh_info
        try:
            info.shard_process_group.size()
        except JobFailedError as error:
            print("gone", error)
        open_groups()
        meshes.repeat(made)
        print("missing", len(meshes.give_back(places)))
        group = meshes.of_now(group)
        print("another group", group is not old, group.group_name == old.group_name)
        print("equal", torch.equal(before, model(torch.ones(2, 4)).sum()))
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        print("gradients", model.weight.grad.full_tensor().sum().item())
        print("mesh", mesh.get_group("shard").size(), mesh["shard"].get_group().size())

        print("bytes", bytes(raw_bytes(model.weight)) == bytes(raw_bytes(model.weight.full_tensor())))

        close_groups()
        open_groups()
        dist.new_group([0])  # one more than before
        try:
            meshes.repeat(made)
        except JobFailedError as error:
            print("order", error)

        with meshes.recording() as made:
            dist.all_reduce(torch.ones(1))
        print("talked", made.talked)

        kept = {"history": [1, 2], "pair": (dist.group.WORLD, 3)}
        history = kept["history"]
        same = meshes.of_now(kept)
        print("same", same is kept, same["history"] is history, same["pair"][0] is dist.group.WORLD)
    """)


def test_what_a_build_made_is_recorded(kept):
    assert "made ['1'] talked False" in kept


def test_a_group_that_is_gone_says_so(kept):
    assert "gone process group 0 was not created again after the fault" in kept


def test_model_mesh_and_group_are_whole_again(kept):
    assert "missing 0" in kept
    assert "another group True True" in kept
    assert "equal True" in kept
    assert "gradients 32.0" in kept
    assert "mesh 1 1" in kept


def test_groups_made_in_another_order_are_refused(kept):
    assert "order process group 1 was created as 2 after the fault" in kept


def test_a_build_that_communicates_is_seen(kept):
    assert "talked True" in kept


def test_lists_and_dicts_that_are_kept_stay_the_same_objects(kept):
    assert "same True True True" in kept


def test_the_bytes_of_a_dtensor_are_those_of_its_part(kept):
    assert "bytes True" in kept


def test_a_mesh_that_is_named_in_its_call_is_counted():
    found = run("""
        from torch.distributed.device_mesh import DeviceMesh

        with meshes.recording() as made:
            DeviceMesh(device_type="cpu", mesh=torch.arange(1))
        print("meshes", made.meshes)
    """)
    assert "meshes 1" in found


def test_a_mesh_that_is_built_anew_is_flattened_anew():
    """Torch remembers what was flattened by the mesh, and the new one equals the former."""
    found = run("""
        def flattened():
            mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
            return mesh._flatten("ab").get_group()

        before = flattened()
        close_groups()
        open_groups()
        after = flattened()
        dist.all_reduce(torch.ones(1), group=after)
        print("anew", after is not before)
    """)
    assert "anew True" in found


def test_a_process_that_is_another_rank_finds_its_own_place_in_a_mesh_that_equals_the_former():
    found = run("""
        from torch.distributed.tensor import DTensor, Shard
        from torch.testing._internal.distributed.fake_pg import FakeStore
        from hyperpod_ext.runtime.snapshot.image import chunk_of

        def cut(rank):
            dist.destroy_process_group()
            dist.init_process_group("fake", rank=rank, world_size=3, store=FakeStore())
            whole, mesh = torch.arange(8.0).view(4, 2), init_device_mesh("cpu", (3,))
            part = list(torch.chunk(whole, 3))[rank] if rank < 2 else whole[4:]
            sharded = DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=(4, 2), stride=(2, 1))
            return chunk_of(sharded.detach(), "sharded")

        first = cut(2)
        meshes.forget_meshes()
        second = cut(1)
        print(first, second.offsets, second.local.tolist())
    """)
    assert "None (2, 0) [[4.0, 5.0], [6.0, 7.0]]\n" in found


def test_a_move_to_another_number_of_ranks_that_is_taken_back_at_once_costs_nothing():
    """The node that came dies before the training function is called with it."""
    needs_kept_modules()
    found = run("""
        from hyperpod_ext.config.job.runtime import RuntimeConfig
        from hyperpod_ext.runtime.training.restore import SoloLink
        from hyperpod_ext.runtime.training.run import Run

        built = []

        def build():
            built.append(training.world_size)
            return fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))

        def next_generation(world_size):
            training.leave()
            dist.destroy_process_group()
            dist.distributed_c10d._world.group_count = 0
            training.move(0, world_size)
            open_groups()
            training.enter(training.generation + 1, fresh=False)

        config = RuntimeConfig(name="a", nodes=1, workers_per_node=1)
        training = Run(config, 0, 0, SoloLink(), None)
        model = training.keep(build)
        before = model(torch.ones(2, 4)).sum()
        next_generation(2)
        next_generation(1)
        print("kept", training.keep(build) is model, torch.equal(before, model(torch.ones(2, 4)).sum()))
        next_generation(2)
        training.keep(build)(torch.ones(2, 4))
        print("built for", built)
        try:
            model(torch.ones(2, 4))
        except JobFailedError as error:
            print("former", error)
        next_generation(1)
        training.keep(build)(torch.ones(2, 4))
        print("left", training._held)
    """)
    assert "kept True True" in found
    assert "built for [1, 2]" in found
    assert "former process group 0 was not created again" in found
    assert "left {(0, 1): []}" in found


@pytest.mark.parametrize("build", ["training.keep(build)", "build()"], ids=["kept", "not kept"])
def test_tensors_that_are_built_again_have_the_new_mesh_and_none_that_equals_it(build):
    """FSDP2 of torch 2.15 refuses a tensor on an equal mesh that is another object."""
    found = run(
        """
        from torch.distributed.tensor import distribute_tensor
        from hyperpod_ext.config.job.runtime import RuntimeConfig
        from hyperpod_ext.runtime.training.restore import SoloLink
        from hyperpod_ext.runtime.training.run import Run

        def build():
            dist.all_reduce(torch.ones(1))
            mesh = init_device_mesh("cpu", (1,))
            return mesh, distribute_tensor(torch.ones(4, 4), mesh) * 2

        training = Run(RuntimeConfig(name="a", nodes=1, workers_per_node=1), 0, 0, SoloLink(), None)
        for generation in (1, 2):
            mesh, tensor = BUILD
            print("its own mesh", tensor.device_mesh is mesh)
            training.leave()
            close_groups()
            open_groups()
            training.enter(generation, fresh=False)
    """.replace("BUILD", build)
    )
    assert found.count("its own mesh True") == 2
