"""Bytes that are damaged, cut off or gone, in any tier: never loaded, and every rank takes the same next best."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from durable_place import Bucket, Place, flip, folder_of, harmed
from served import JOB, SECRET
from small_job import MEMORY, PEER, REGIONS, SmallJob, place_of, relaunched, trained

from hyperpod_ext.errors import CorruptSnapshotError, NoCheckpointError, NotFoundError
from hyperpod_ext.runtime.storage.checkpoints import Checkpoints
from hyperpod_ext.runtime.storage.file import FileStore
from hyperpod_ext.runtime.storage.names import Found, parse_folder

PLACES = ["file", pytest.param("s3", marks=pytest.mark.thorough)]
"""Both stores keep one contract, tests/runtime/storage/test_tier_contract.py."""


def few(place: Place, most: int = 1) -> int | None:
    """How many of the variants of a test are for S3, where each takes a second; None: all."""
    return most if isinstance(place, Bucket) else None


def plans_in(job: SmallJob) -> dict[int, Any]:
    return {number: rank.layout().plan for number, rank in job.ranks.items()}


# --- a flipped bit --------------------------------------------------------------------------------


@pytest.mark.parametrize("where", REGIONS)
def test_a_flipped_bit_moves_all_ranks_to_the_next_source_and_then_to_an_older_step(make_job, place, where):
    job = trained(make_job(MEMORY, PEER, place.tier()), 5)

    job.image(0, 0, 5).flip(where)
    assert job.resume() == 5
    job.assert_holds(5)
    (refused,) = job.vote.errors
    assert (refused[0], "step 5: CRC64-NVME" in refused[1]) == (0, True)
    assert {e["source"] for e in job.vote.events if e["rank"] == 0} == {"peer"}

    job.image(1, 0, 5, replica=True).flip(where)
    assert job.resume() == 4
    job.assert_holds(4)

    for image in job.images(0):
        image.flip("data" if where == "gap" else "gap")  # twice in one place would mend it
    assert job.resume() == 4
    job.assert_holds(4)
    assert {event["tier"] for event in job.vote.events if event["rank"] == 0} == {"file"}


def test_with_every_copy_damaged_nothing_is_loaded_and_nothing_is_begun_anew(make_job, place):
    job = trained(make_job(MEMORY, PEER, place.tier()), 4)
    with ExitStack() as harms:
        for step in (0, 2, 4):
            name = f"{folder_of(place, step)}/__0_0.distcp"
            harms.enter_context(harmed(place, name, flip(len(place.read(name)) // 2)))
        for image in job.images(0):
            image.flip("data")
        with pytest.raises(NoCheckpointError, match="No step that all 2 ranks can restore") as told:
            job.resume()
    for seen in ("file step 4", "file step 2", "file step 0", "memory step 4 (rank 0)", "CRC64-NVME"):
        assert seen in str(told.value)


def test_a_bit_that_flips_in_every_tier_at_once_costs_one_step_on_all_ranks(make_job, place):
    job = trained(make_job(MEMORY, PEER, place.tier(), nodes=3), 4)
    job.image(0, 0, 4).flip("data")
    job.image(next(n for n in (1, 2) if replica_of(job, n, 0, 4)), 0, 4, replica=True).flip("gap")
    with harmed(place, f"{folder_of(place, 4)}/__0_0.distcp", flip(1)):
        assert job.resume() == 3
    job.assert_holds(3)
    assert [rank for rank, _ in job.vote.errors] == [0, 0, 0]


def replica_of(job: SmallJob, node: int, owner: int, step: int) -> bool:
    held = job.servers[node].ask("held")["snapshots"]
    return any((one["rank"], one["step"], one["replica"]) == (owner, step, True) for one in held)


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_a_flipped_bit_in_an_image_of_a_relaunch_costs_a_step_on_all_ranks(make_job, place):
    job = trained(make_job(MEMORY, place.tier()), 4)
    plan = plans_in(job)[1]
    job = relaunched(make_job, job)
    name = f"{folder_of(place, 4)}/__1_0.distcp"
    for where in REGIONS:
        with harmed(place, name, flip(place_of(plan, where))):
            assert job.resume() == 2, where
            job.assert_holds(2)
            assert job.vote.errors[0][0] == 1
    job = relaunched(make_job, job)
    assert job.resume() == 4  # it was whole but for that bit
    job.assert_holds(4)


def test_no_bit_of_a_manifest_or_a_plan_can_change(make_job, place):
    """Every byte of both. What they stand for is not looked at before they are found whole."""
    job = trained(make_job(MEMORY, place.tier()), 2)
    folder, digest = folder_of(place, 2), plans_in(job)[0].digest
    checkpoints = Checkpoints(FileStore(place.root), job=JOB, secret=SECRET)
    found = parse_folder(folder)
    assert found is not None
    for name, read in (
        (f"{folder}/manifest.json", lambda: checkpoints.read(found)),
        (f"{folder}/plan-{digest[:32]}.json", lambda: checkpoints.read_plan(folder, digest)),
    ):
        whole, undetected = read(), []
        for at in range(len(place.read(name))):
            with harmed(place, name, flip(at)):
                try:
                    if read() != whole:  # the 17th digit of a number may say nothing new
                        undetected.append(at)
                except CorruptSnapshotError:
                    pass
        assert not undetected


@pytest.mark.parametrize("place", PLACES, indirect=True)
@pytest.mark.parametrize("kind", ["manifest.json", "plan"])
def test_a_flipped_bit_in_a_manifest_or_a_plan_moves_all_ranks_to_the_older_step(make_job, place, kind):
    job = relaunched(make_job, trained(make_job(MEMORY, place.tier()), 4))
    folder = folder_of(place, 4)
    names = [name for name in place.names() if name.startswith(f"{folder}/{kind}")]
    assert names
    for name in names:
        nbytes = len(place.read(name))
        for at in (nbytes // 3, 2 * nbytes // 3, 0, nbytes - 1)[: few(place, 2)]:
            with harmed(place, name, flip(at)):
                assert job.resume() == 2, (name, at)
                job.assert_holds(2)


def test_with_every_manifest_damaged_nothing_is_begun_anew(make_job, place):
    job = relaunched(make_job, trained(make_job(MEMORY, place.tier()), 4))
    with ExitStack() as harms:
        for step in (0, 2, 4):
            harms.enter_context(harmed(place, f"{folder_of(place, step)}/manifest.json", flip(50)))
        with pytest.raises(NoCheckpointError) as told:
            job.resume()
    assert "Seen: nothing. Not readable: " in str(told.value)
    for step in (0, 2, 4):
        assert f"step-{step:09d}-g000001/manifest.json" in str(told.value)


# --- cut off, empty, gone -------------------------------------------------------------------------

HARMS: dict[str, Callable[[bytes], bytes | None]] = {
    "half": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "gone": lambda data: None,
    "a byte short": lambda data: data[:-1],
    "a byte more": lambda data: data + b"\0",
}


@pytest.mark.parametrize(
    ("place", "what"),
    [("file", "__0_0.distcp"), ("file", "manifest.json"), ("file", "plan")]
    + [pytest.param("s3", what, marks=pytest.mark.thorough) for what in ("__0_0.distcp", "manifest.json")],
    indirect=["place"],
)
def test_what_is_cut_off_empty_or_gone_moves_all_ranks_to_the_older_step(make_job, place, what):
    job = relaunched(make_job, trained(make_job(MEMORY, place.tier()), 4))
    folder = folder_of(place, 4)
    name = next(name for name in place.names() if name.startswith(f"{folder}/{what}"))
    for how, harm in [*HARMS.items()][: few(place, 3)]:
        if (what, how) == ("__0_0.distcp", "a byte more"):
            continue  # below
        with harmed(place, name, harm):
            assert job.resume() == 2, how
            job.assert_holds(2)
    job = relaunched(make_job, job)
    assert job.resume() == 4
    job.assert_holds(4)


def test_an_old_step_that_is_whole_is_found_behind_many_that_are_not(make_job, place):
    job = trained(make_job(MEMORY, place.tier(every_steps=1, keep=10), nodes=1), 7)
    job = relaunched(make_job, job)
    for step in range(2, 8):
        place.delete(f"{folder_of(place, step)}/__0_0.distcp")
    assert job.resume() == 1
    job.assert_holds(1)


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_bytes_behind_an_image_are_never_loaded(make_job, place):
    """Those that the manifest stands for are all there."""
    job = relaunched(make_job, trained(make_job(MEMORY, place.tier()), 4))
    with harmed(place, f"{folder_of(place, 4)}/__0_0.distcp", HARMS["a byte more"]):
        step = job.resume()
    job.assert_holds(step)


# --- which step -----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_step_0_is_found(make_job, place):
    job = trained(make_job(MEMORY, place.tier(every_steps=100)), 3)
    states = job.states
    job = relaunched(make_job, job)
    assert job.resume() == 0
    assert {event["tier"] for event in job.vote.events} == {place.tier()["kind"]}
    assert states[0].keys() < states[3].keys()  # no optimizer has a state yet
    job.assert_holds(0)


def test_a_shard_that_is_lost_everywhere_moves_all_ranks_to_the_older_step(make_job, place):
    """Rank 1's shard of the newest step: not in its memory, not at a peer, not in the directory."""
    job = trained(make_job(MEMORY, PEER, place.tier()), 4)
    save_partly(job, 5, ranks=[0])
    assert job.servers[0].held_steps(0)[-1] == 5
    assert job.servers[1].held_steps(1)[-1] == 4
    job.image(1, 1, 4).flip("data")
    job.image(0, 1, 4, replica=True).flip("data")
    with harmed(place, f"{folder_of(place, 4)}/__1_0.distcp", HARMS["gone"]):
        assert job.resume() == 3
    job.assert_holds(3)
    assert {rank for rank, _ in job.vote.errors} == {1}


def save_partly(job: SmallJob, step: int, ranks: list[int]) -> None:
    """Everybody makes the step, but only `ranks` come to save it."""
    for number, rank in job.ranks.items():
        rank.make_step(step)
        if number in ranks:
            rank.commit(step)
            rank.checkpointer.flush()
    for server in job.servers.values():
        server.ask("wait_idle", timeout_s=1.0)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_step_that_one_rank_has_not_saved_is_restored_by_nobody(make_job, place, missing):
    job = trained(make_job(MEMORY, PEER), 4)
    save_partly(job, 5, ranks=[1 - missing])
    assert job.resume() == 4
    job.assert_holds(4)
    assert not job.vote.errors
    job.train(6)  # and what is left of it is in nobody's way
    assert job.resume() == 6
    job.assert_holds(6)


def test_a_durable_step_that_one_node_never_brought_does_not_exist(make_job, place):
    job = trained(make_job(MEMORY, place.tier(every_steps=5)), 4)
    save_partly(job, 5, ranks=[0])
    store = FileStore(place.root)
    assert [found.step for found in Checkpoints(store, job=JOB, secret=SECRET).found()] == [0]
    with pytest.raises(NotFoundError):
        Checkpoints(store, job=JOB, secret=SECRET).read(Found(5, 1))
    job = relaunched(make_job, job)
    assert job.resume() == 0
    job.assert_holds(0)


def test_a_durable_step_that_was_given_up_holds_nobody_up(make_job, place):
    """One node would wait for what the other never sealed, and a job that ends for that node: for ten minutes."""
    job = trained(make_job(MEMORY, place.tier(every_steps=5)), 4)
    save_partly(job, 5, ranks=[0])
    assert job.resume() == 4
    assert job.servers[0].ask("wait_idle", timeout_s=20.0)["idle"]
