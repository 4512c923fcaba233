"""Decisions of rank 0 where no agent of ours decides, what started a process, and the line to AWS's agent."""

from __future__ import annotations

import math
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from hyperpod_ext.config.checkpoint import CheckpointPolicy, MemoryTier, PeerTier
from hyperpod_ext.config.checkpoint.file import FileTier
from hyperpod_ext.config.checkpoint.s3 import S3Tier
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.errors import ConfigError, ConflictError, NoCheckpointError, UnreachableError
from hyperpod_ext.runtime.control_plane.decision import RestoreCoordinator
from hyperpod_ext.runtime.control_plane.hyperpod_socket import HyperpodAgentClient
from hyperpod_ext.runtime.control_plane.launcher import Launcher, find_launcher
from hyperpod_ext.runtime.control_plane.save_at_time import TimedTiers
from hyperpod_ext.runtime.control_plane.settings import name_of, port_base, sized
from hyperpod_ext.runtime.control_plane.torchrun import addresses_of_all, start_of_all
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.snapshot.manifest import save_id_of

NODES = {0: 0, 1: 0, 2: 1, 3: 1}
EMPTY: dict[str, Any] = {"checkpoints": [], "problems": [], "unreachable": [], "generation": 0}


def live(step: int, generation: int = 1, sharing: str = "same") -> dict[str, Any]:
    return {"step": step, "save_id": save_id_of(generation, step), "own_digest": "d", "sharing": sharing}


def held(rank: int, step: int, generation: int = 1, sharing: str = "same") -> dict[str, Any]:
    known = {**live(step, generation, sharing), "rank": rank, "content": "", "world_size": 4}
    return {**known, "generation": generation}


def says(**more: Any) -> dict[str, Any]:
    nothing = {"live": None, "held": [], "committed": 0, "began": {}, "generation": 0, "error": None}
    return nothing | more


def test_with_nothing_anywhere_all_start_fresh_in_generation_1():
    restoring = RestoreCoordinator(NODES)
    assert {sources[0].kind for sources in restoring.begin([says()] * 4).sources.values()} == {"fresh"}
    assert restoring.generation == 1


def test_survivors_keep_their_state_and_serve_joining_node():
    restoring = RestoreCoordinator(NODES)
    survivor = says(live=live(5), committed=5, began={"1": 0}, generation=1)
    decision = restoring.begin([survivor, survivor, says(), says()])
    assert decision.step == 5
    assert [decision.source(rank).kind for rank in NODES] == ["self", "self", "live", "live"]
    assert restoring.generation == 2


def test_a_generation_is_newer_than_any_that_some_memory_holds():
    restoring = RestoreCoordinator(NODES)
    restoring.begin([says(held=[held(0, 3, generation=7), held(1, 3, generation=7)]), says(), says(held=[]), says()])
    assert restoring.generation == 8


def test_what_was_refused_is_not_chosen_again_and_nothing_is_begun_from_scratch():
    restoring = RestoreCoordinator({0: 0})
    assert restoring.begin([says(held=[held(0, 4), held(0, 3)])]).step == 4
    assert restoring.refuse({0: "CRC64-NVME"}).step == 3
    with pytest.raises(NoCheckpointError, match="CRC64-NVME"):
        restoring.refuse({0: "CRC64-NVME"})


def test_a_part_of_the_state_is_not_thrown_away_for_a_fresh_start():
    with pytest.raises(NoCheckpointError, match="memory step 4"):
        RestoreCoordinator(NODES).begin([says(held=[held(0, 4, sharing="shard")]), says(), says(), says()])


def test_a_script_restores_the_step_that_it_wants_and_starts_over_if_only_some_ranks_have_one():
    def shard(rank: int, step: int) -> dict[str, Any]:
        return {**held(rank, step, sharing="shard"), "world_size": 2}

    def restoring(step: int | None = None) -> RestoreCoordinator:
        return RestoreCoordinator({0: 0, 1: 0}, script=True, step=step)

    both = [{"held": [shard(0, 10), shard(1, 10), shard(0, 20)]}, {}]
    newest = restoring()
    assert newest.begin(both).step == 10
    assert restoring(10).begin([{"held": [*both[0]["held"], shard(1, 20)]}, {}]).step == 10
    with pytest.raises(NoCheckpointError, match="Error of the last attempt: CRC64-NVME is wrong"):
        newest.refuse_offers({("memory", 1, 0, save_id_of(1, 10), "")}, "CRC64-NVME is wrong")
    for step in (20, 30):
        with pytest.raises(NoCheckpointError, match=rf"No snapshot of step {step} .* memory step 10 \(rank 0\)"):
            restoring(step).begin(both)
    with pytest.raises(NoCheckpointError, match="No snapshot of step 5"):
        restoring(5).begin([{}, {}])
    on_disk = {**shard(0, 20), "url": "/d", "folder": "f", "began": 10, "run": "", "tier": "disk"}
    for one in ({"held": [shard(0, 20)]}, {"disk": [on_disk]}):
        assert restoring().begin([one, {}]).source(0).kind == "fresh"
        with pytest.raises(NoCheckpointError):
            RestoreCoordinator({0: 0, 1: 0}).begin([one, {}])


def test_a_tier_that_cannot_be_asked_stops_a_start_from_less():
    restoring = RestoreCoordinator(
        {0: 0}, lambda besides: EMPTY | {"problems": ["s3: denied"], "unreachable": ["s3: denied"]}
    )
    with pytest.raises(UnreachableError, match="s3: denied"):
        restoring.begin([says()])


def test_what_keeps_one_rank_out_is_every_ranks_error():
    wrong = says(error=ConflictError("another policy").to_json())
    with pytest.raises(ConflictError, match="another policy"):
        RestoreCoordinator({0: 0, 1: 0}).begin([says(), wrong])


def test_what_started_a_process_is_known_from_its_variables():
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "127.0.0.1"}
    hyperpod = {**torchrun, "HYPERPOD_ELASTICAGENT_SOCKET_SERVER_PATH": "/s"}
    assert find_launcher({}) is None
    assert find_launcher(torchrun) is Launcher.TORCHRUN
    assert find_launcher(hyperpod) is Launcher.HYPERPODRUN
    assert find_launcher({**hyperpod, "HPX_HYPERPODRUN_MODE": "in-process"}) is Launcher.HYPERPODRUN_IN_PROCESS
    assert find_launcher({**hyperpod, "HPX_AGENT_SOCKET": "/a"}) is Launcher.AGENT
    with pytest.raises(ConfigError, match="HPX_HYPERPODRUN_MODE"):
        find_launcher({**hyperpod, "HPX_HYPERPODRUN_MODE": "plr"})


def test_names_and_ports_that_nobody_gave():
    assert name_of("/app/Train_Llama 3.py") == "train-llama-3"
    assert name_of("__main__.py", "0a1b") == "main-0a1b"
    assert port_base({}) == 29600
    with pytest.raises(ConfigError, match="HPX_PORT_BASE"):
        port_base({"HPX_PORT_BASE": "80"})


def test_parity_is_refused_where_no_agent_of_ours_places_it():
    policy = CheckpointPolicy(tiers=(MemoryTier(), PeerTier(parity=4)))
    config = RuntimeConfig(name="a", nodes=4, workers_per_node=1, checkpoint=policy)
    with pytest.raises(ConfigError, match="parity works only if agents of hyperpod_ext"):
        sized(config, 4, 1)


def test_a_rank_that_is_stopped_at_the_barrier_says_again_that_it_is_there(tmp_path: Path):
    """AWS's agent counts its workers anew when a job is stopped before it has started."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "agent"))
    listener.listen()
    faults: list[str] = []
    gone = threading.Event()
    fault = {"on_fault": lambda: faults.append("fault"), "on_gone": gone.set}
    line = HyperpodAgentClient(str(tmp_path / "agent"), 1, on_start=lambda message: None, **fault)
    agent, _ = listener.accept()
    started: list[wire.Message] = []
    waiting = threading.Thread(target=lambda: started.append(line.barrier()))
    waiting.start()
    said = [wire.receive(agent), wire.receive(agent)]
    assert [each["type"] for each in said if each] == ["init", "at_rcb_barrier"]
    assert {each["local_rank"] for each in said if each} == {1}
    wire.send(agent, {"type": "job_fault", "restart_count": 0, "client_id": "x"})
    again = wire.receive(agent)
    assert again is not None
    assert again["type"] == "at_rcb_barrier"
    wire.send(agent, {"type": "job_start", "worker_envs": {"RANK": "3"}, "client_id": "x"})
    waiting.join(10)
    assert started[0]["worker_envs"] == {"RANK": "3"}
    assert faults == ["fault"]
    agent.close()
    assert gone.wait(10)


def timed_job(step_s: float, steps: int, clock_apart: float) -> list[dict[int, dict[str, int]]]:
    """Two nodes of one rank each that make steps together: of each, what it was asked for after which step."""
    tiers = FileTier(path="/x", every_seconds=10), S3Tier(uri="s3://bucket/x", every_seconds=25)
    store, rng = HashStore(), random.Random(1)
    ranks = [TimedTiers(CheckpointPolicy(tiers=(MemoryTier(every_steps=2), *tiers)), clock_apart * r) for r in (0, 1)]
    asked: list[dict[int, dict[str, int]]] = [{}, {}]
    for step in range(1, steps + 1):
        for rank in rng.sample((0, 1), 2):  # no step begins before the other rank has made the one before
            now = step * step_s + clock_apart * rank
            if due := ranks[rank].made(step, now, store, names=rank == 0, hears=True):
                asked[rank][step] = due
    return asked


@pytest.mark.parametrize("step_s", [0.1, 1.0, 4.0, 30.0])
def test_tiers_that_go_by_time_get_the_same_steps_from_every_node_which_hear_of_them_ahead(step_s: float):
    first, second = timed_job(step_s, 400, clock_apart=1000.0)
    for kind, every in (("file", 10), ("s3", 25)):
        steps = [due[kind] for due in first.values() if kind in due]
        assert [step for step in steps if step <= 400] == [
            due[kind] for due in second.values() if due.get(kind, 401) <= 400
        ]
        apart = max(math.ceil(every / step_s), 2)  # only each second step is saved at all
        assert len(steps) == pytest.approx(400 / apart, abs=1)
        assert len(set(steps)) == len(steps)
    assert all(step > at and step % 2 == 0 for at, due in second.items() for step in due.values())


def test_in_another_generation_another_rank_names_the_steps_and_all_hear_of_the_first():
    policy = CheckpointPolicy(tiers=(MemoryTier(), FileTier(path="/x", every_seconds=10)))
    ranks = [TimedTiers(policy, 0.0) for _ in range(2)]

    def made(step: int, now: float, store: HashStore, rank_0: int) -> list[dict[str, int]]:
        turns = sorted((0, 1), key=lambda rank: rank != rank_0)
        return [ranks[rank].made(step, now, store, names=rank == rank_0, hears=True) for rank in turns]

    store = HashStore()
    assert [made(step, 3.0 * step, store, 0)[1] for step in range(1, 6)] == [{}, {}, {}, {"file": 6}, {}]
    for rank in ranks:
        rank.enter()
    store = HashStore()  # rank 1 has heard at 12 s when the last one was, and knows when the next one is
    assert [made(step, 3.0 * step, store, 1) for step in range(6, 9)] == [[{}, {}], [{}, {}], [{"file": 10}] * 2]


def stored(step: int) -> dict[str, Any]:
    return {"tier": "file", "step": step, "save_id": save_id_of(1, step), "world_size": 1, "url": "/d", "folder": "f"}


def test_durable_checkpoints_that_are_all_refused_are_not_given_up_for_a_fresh_start():
    asked: list[list[tuple[str, str]]] = []

    def ask(exclude: Any) -> Any:
        asked.append(list(exclude))
        return EMPTY | {"checkpoints": [] if exclude else [stored(8)], "generation": 3}

    restoring = RestoreCoordinator({0: 0}, ask)
    assert restoring.begin([says()]).step == 8
    assert restoring.generation == 4
    with pytest.raises(NoCheckpointError, match="Error of the last attempt: rank 0: CRC64-NVME"):
        restoring.refuse({0: "CRC64-NVME"})
    assert asked == [[], [("/d", save_id_of(1, 8))]], "the second time for what else is there"


def tell_addresses(ranks: int, limit_s: float, but: tuple[int, ...] = ()) -> list[Any]:
    """What each rank but some learns of all, or the error that it ends with."""
    store = HashStore()  # the launcher's

    def one(rank: int) -> Any:
        try:
            return addresses_of_all(store, rank, ranks, ("10.0.0.1", 7000 + rank), timedelta(seconds=limit_s))
        except UnreachableError as error:
            return error.message

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, [rank for rank in range(ranks) if rank not in but]))


def test_a_start_is_that_of_a_rank_0_that_runs():
    store, limit = HashStore(), timedelta(seconds=60)
    with socket.create_server(("127.0.0.1", 0)) as ended:
        earlier = start_of_all(store, 0, ended.getsockname(), limit)
        assert start_of_all(store, 1, ("10.0.0.1", 7001), limit) == earlier
    with pytest.raises(UnreachableError, match="rank 0 has not started within"):
        start_of_all(store, 1, ("10.0.0.1", 7001), timedelta(seconds=0.1))
    with socket.create_server(("127.0.0.1", 0)) as running:
        now = start_of_all(store, 0, running.getsockname(), limit)
        assert start_of_all(store, 1, ("10.0.0.1", 7001), limit) == now != earlier


def test_ranks_learn_all_addresses_from_what_rank_0_has_collected():
    assert tell_addresses(5, 60.0) == [tuple(("10.0.0.1", 7000 + rank) for rank in range(5))] * 5


def test_all_say_which_ranks_have_not_told_their_address():
    assert tell_addresses(5, 0.1, but=(2, 4)) == ["ranks 2, 4 have not sent their address in 0.1 s"] * 3
