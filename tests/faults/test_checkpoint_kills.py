"""kill -9 at every state of a slot, of workers and of memory servers, in jobs whose state nobody holds twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from durable_place import Directory, flip, folder_of
from forged import other_weights, plan_of
from nodes import events, kill_node, memory_pid, socket_of
from stopped import stopped
from waiting import until

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.memory_server.client.client import MemoryClient
from hyperpod_ext.runtime.memory_server.protocol.requests import Status

pytestmark = pytest.mark.slow

overlapped_and_not = pytest.mark.parametrize(
    "overlap", [pytest.param(False, marks=pytest.mark.thorough), True], ids=["synchronous", "overlapped"]
)

MEMORY = {"kind": "memory"}
PEER = {"kind": "peer", "every_steps": 1, "max_slowdown": 1.0}
EVERY_DUE_STEP = {"when_busy": "wait"}  # goes to the durable tier, however fast steps are
STEPS = 12


def assert_same_end(undisturbed_sharded: dict[str, Any], report: dict[str, Any], first: int = 1) -> None:
    """Bit for bit, from step `first` on."""
    assert report["state"] == "succeeded", report["error"]
    assert report["losses"] == {s: loss for s, loss in undisturbed_sharded["losses"].items() if int(s) >= first}
    assert report["weights"] == undisturbed_sharded["weights"]


def digests(job: Any) -> dict[int, float]:
    """What all ranks together held at the start and after each step, as far as the job came."""
    step, digest = restored(job)
    return {step: digest} | {e["step"]: e["digest"] for e in job.events() if e["event"] == "step" and e["rank"] == 0}


def restored(job: Any) -> tuple[int, float]:
    """Step and digest of what the job began with."""
    entry = next(e for e in job.events() if e["event"] == "metric" and e["rank"] == 0)
    return int(entry["restored_step"]), entry["restored_digest"]


def held(job: Any, node: int) -> list[dict[str, Any]]:
    client = MemoryClient(str(socket_of(job, node)))
    try:
        return list(client.ask(Status()).snapshots)
    finally:
        client.close()


def held_of(job: Any, rank: int) -> list[dict[str, Any]]:
    """Snapshots of a rank of node 0; none while its memory server begins."""
    try:
        return [one for one in held(job, 0) if one["rank"] == rank]
    except (FileNotFoundError, ConnectionError, JobFailedError):
        return []


def unfinished(place: Directory) -> bool:
    """Whether node 0 has announced a checkpoint that is not whole yet."""
    names = place.names()
    steps = {name.partition("/")[0] for name in names}
    return any(f"{step}/node-0.json" in names and f"{step}/manifest.json" not in names for step in steps)


class Gate:
    """A FIFO that keeps who opens it to read waiting until it is opened here."""

    def __init__(self, path: Path) -> None:
        self.path, self._end = path, -1
        os.mkfifo(path)

    def open(self) -> None:
        """From now on nobody waits."""
        if self._end < 0:
            self._end = os.open(self.path, os.O_RDWR)

    def close(self) -> None:
        self.open()  # nobody must wait for ever
        os.close(self._end)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.close()


def all_at_the_gate(step: int) -> list[dict[str, Any]]:
    """Before the save of that step."""
    return [{"what": "at the gate", "rank": rank, "step": step} for rank in range(4)]


def until_all_are_at_the_gate(job: Any) -> None:
    """In a job whose other faults have not struck by then."""
    until(lambda: len(list(job.folder.glob("spent-*"))) == 4, job.logs)


# --- workers --------------------------------------------------------------------------------------


@overlapped_and_not
def test_a_worker_killed_at_any_moment_of_its_save_costs_no_number(sharded, undisturbed_sharded, overlap):
    """Before it begins, halfway through the copy, and once the seal was asked for; each time on another rank."""
    moments = [("before begin", 1, 3), ("halfway", 2, 5), ("seal asked", 0, 7), ("halfway", 3, 12)]
    faults = [{"what": what, "rank": rank, "step": step} for what, rank, step in moments]
    report = sharded("job", *faults, policy={"overlap": overlap}).start().wait()
    assert_same_end(undisturbed_sharded, report)
    assert [recovery["fault"]["rank"] for recovery in report["recoveries"]] == [1, 2, 0, 3]
    assert [recovery["fault"]["cause"] for recovery in report["recoveries"]] == ["killed by SIGKILL (9)"] * 4
    # what was not sealed on its rank is restored by nobody; what it had asked to seal is, by all
    assert [recovery["resumed_step"] for recovery in report["recoveries"]] == [2, 4, 7, 11]


@pytest.mark.thorough
def test_a_worker_of_a_replicated_and_sharded_model_is_replaced(sharded):
    """HSDP: its collectives run in groups of their own, which must not keep survivors waiting."""
    env = {"HPX_TEST_REPLICAS": "2"}
    undisturbed_sharded = sharded("undisturbed", env=env).start().wait()
    faults = [{"what": "halfway", "rank": 1, "step": 4}, {"what": "before begin", "rank": 2, "step": 8}]
    running = sharded("job", *faults, env=env).start()
    report = running.wait()
    assert_same_end(undisturbed_sharded, report)
    assert [recovery["fault"]["rank"] for recovery in report["recoveries"]] == [1, 2]
    assert all(recovery["survivor_pids_kept"] for recovery in report["recoveries"])
    assert "stuck" not in {event["event"] for event in running.events()}


def test_a_save_that_fails_or_never_ends_on_one_rank_is_restored_by_nobody(sharded, undisturbed_sharded):
    faults = [{"what": "raises", "rank": 1, "step": 5}, {"what": "hangs", "rank": 1, "step": 9}]
    running = sharded("job", *faults, tiers=[MEMORY, PEER]).start()
    until((running.folder / "hangs-1").exists, running.logs)
    running.until("step", step=9, rank=0)
    os.kill([event["pid"] for event in events(running, "joined") if event["rank"] == 1][-1], signal.SIGKILL)
    report = running.wait()
    assert_same_end(undisturbed_sharded, report)
    failed, hung = report["recoveries"]
    # 5 where every process had made it before it heard: it lives on there, and comes from nobody's save
    assert failed["resumed_step"] == 4 or (failed["resumed_step"], failed["source"]) == (5, "self")
    assert "step 5 cannot be copied" in failed["fault"]["cause"]
    assert hung["resumed_step"] == 8


def test_a_worker_killed_while_its_snapshot_is_replicated_and_drained_costs_no_number(
    sharded, undisturbed_sharded, tmp_path, gate
):
    """The other node's memory server is held up, so that both go on while the worker dies."""
    place = Directory(tmp_path / "checkpoints", "tiny")
    env = {"HPX_TEST_GATE": str(gate.path)}
    running = sharded("job", *all_at_the_gate(4), tiers=[MEMORY, PEER, place.tier(every_steps=1)], env=env).start()
    until_all_are_at_the_gate(running)
    with stopped(memory_pid(running, 1)):
        gate.open()

        def under_way() -> bool:
            newest = max((one for one in held(running, 0) if one["rank"] == 0), key=lambda one: one["step"])
            return newest["state"] == "sealed" and unfinished(place)

        until(under_way, running.logs)
        os.kill(running.until("joined", rank=0)["pid"], signal.SIGKILL)
        running.until("fault", rank=0)
    report = running.wait()
    assert_same_end(undisturbed_sharded, report)
    assert len(report["recoveries"]) == 1
    assert f"{folder_of(place, STEPS)}/manifest.json" in place.names()


@pytest.mark.parametrize("state", ["replicated", pytest.param("durable", marks=pytest.mark.thorough)])
def test_a_worker_killed_once_its_snapshot_is_safe_elsewhere_costs_no_number(
    sharded, undisturbed_sharded, tmp_path, state, gate
):
    """All wait before their next save, so that the last one comes as far as it can."""
    place = Directory(tmp_path / "checkpoints", "tiny")
    tiers = [MEMORY, PEER if state == "replicated" else place.tier(every_steps=1)]
    running = sharded("job", *all_at_the_gate(8), tiers=tiers, env={"HPX_TEST_GATE": str(gate.path)}).start()
    until_all_are_at_the_gate(running)
    until(lambda: (7, state) in [(one["step"], one["state"]) for one in held_of(running, 0)], running.logs)
    os.kill(running.until("joined", rank=0)["pid"], signal.SIGKILL)
    running.until("fault", rank=0)
    gate.open()
    report = running.wait()
    assert_same_end(undisturbed_sharded, report)
    (recovery,) = report["recoveries"]
    assert recovery["resumed_step"] == 7


# --- memory servers -------------------------------------------------------------------------------


@overlapped_and_not
def test_a_memory_server_killed_in_a_step_in_a_save_and_in_a_restore_is_started_again(
    sharded, undisturbed_sharded, overlap, gate
):
    """Its ranks keep their processes and their state; what only it held comes from the copy on the other node."""
    faults = [
        {"what": "memory server in step", "rank": 0, "step": 3},
        {"what": "memory server in save", "rank": 3, "step": 5},
        *all_at_the_gate(9),
        {"what": "before begin", "rank": 2, "step": 9},
        {"what": "memory server in restore", "rank": 2, "step": 8},
    ]
    env, policy = {"HPX_TEST_GATE": str(gate.path)}, {"overlap": overlap, "when_busy": "wait"}
    running = sharded("job", *faults, tiers=[MEMORY, PEER], policy=policy, env=env).start()
    until(lambda: all(8 in [one["step"] for one in held_of(running, rank)] for rank in (2, 3)), running.logs)
    gate.open()
    report = running.wait()
    assert_same_end(undisturbed_sharded, report)
    (recovery,) = report["recoveries"]
    assert (recovery["fault"]["rank"], recovery["source"]) == (2, "peer")
    lost = [event for event in running.events() if event["event"] == "memory_lost"]
    assert [(event["node"], event["cause"]) for event in lost] == [
        (node, "the memory server ended: killed by SIGKILL (9)") for node in (0, 1, 1)
    ]


@pytest.mark.parametrize("when_busy", ["wait", pytest.param("supersede", marks=pytest.mark.thorough)])
def test_a_memory_server_killed_in_the_middle_of_a_drain_goes_on_with_the_next_due_step(
    sharded, undisturbed_sharded, tmp_path, when_busy, gate
):
    place = Directory(tmp_path / "checkpoints", "tiny")
    tiers = [MEMORY, place.tier(every_steps=3)]
    policy, env = {"grace_s": 2.0, "when_busy": when_busy}, {"HPX_TEST_GATE": str(gate.path)}
    first = sharded("first", *all_at_the_gate(6), tiers=tiers, policy=policy, env=env).start()
    until_all_are_at_the_gate(first)
    with stopped(memory_pid(first, 1)):  # so node 0 waits for it with a step that is not whole
        gate.open()
        until(lambda: unfinished(place), first.logs)
        os.kill(memory_pid(first, 0), signal.SIGKILL)
        first.until("memory_back", node=0)
    assert_same_end(undisturbed_sharded, first.wait())
    whole = [int(name[5:14]) for name in place.names() if name.endswith("/manifest.json")]
    assert max(whole) == STEPS


@pytest.mark.thorough
def test_a_memory_server_that_ends_again_and_again_ends_the_job_and_a_relaunch_goes_on(
    sharded, undisturbed_sharded, tmp_path
):
    place = Directory(tmp_path / "checkpoints", "tiny")
    tiers = [MEMORY, place.tier(every_steps=3)]
    faults = [{"what": "memory server in step", "rank": rank, "step": 6 + rank} for rank in (0, 1)]
    faults += [{"what": "memory server halfway", "rank": rank, "step": 8 + rank} for rank in (0, 1)]
    first = sharded("first", *faults, tiers=tiers, policy={"grace_s": 2.0}).start()
    report = first.wait()
    assert report["state"] == "failed"
    assert report["error"]["message"] == (
        "node 0: the memory server ended: killed by SIGKILL (9); 4 times in a row, "
        "and the limit is 3 (restart.max_on_node)"
    )
    assert first.codes() == [7, 7]
    assert resumes_whole(sharded, undisturbed_sharded, first, tiers)[1] % 3 == 0


def resumes_whole(sharded: Any, undisturbed_sharded: dict[str, Any], first: Any, tiers: Any) -> tuple[Any, int]:
    """Relaunch a job; returns it and the step it went on from, once it has ended as if nothing had been."""
    second = sharded("second", tiers=tiers).start()
    report = second.wait()
    step, digest = restored(second)
    assert digest == digests(first)[step]
    assert_same_end(undisturbed_sharded, report, first=step + 1)
    return second, step


# --- the durable tier -----------------------------------------------------------------------------


def test_a_relaunch_passes_a_forged_step_and_a_damaged_one_and_ends_bit_for_bit_the_same(
    sharded, undisturbed_sharded, tmp_path
):
    """Of the newest step a shard is forged, with the right CRC; of the one before, another is damaged."""
    place = Directory(tmp_path / "checkpoints", "tiny")
    tiers = [MEMORY, place.tier(every_steps=2)]
    first = sharded("first", tiers=tiers, steps=6, policy=EVERY_DUE_STEP).start()
    assert first.wait()["state"] == "succeeded"
    forged, damaged = (f"{folder_of(place, step)}/__{rank}_0.distcp" for step, rank in ((6, 3), (4, 1)))
    place.write(forged, other_weights(plan_of(place, 6, 3))(place.read(forged)))
    place.write(damaged, flip(len(place.read(damaged)) // 2)(place.read(damaged)))
    second, step = resumes_whole(sharded, undisturbed_sharded, first, tiers)
    assert step == 2
    told = [json.dumps(event) for event in second.events()]
    assert any(f"{forged}: its CRC64-NVME is right, but not its MAC" in event for event in told), second.logs()
    assert any(damaged in event for event in told), second.logs()


@pytest.mark.thorough
def test_with_every_step_damaged_a_relaunch_says_what_it_has_seen(sharded, tmp_path):
    place = Directory(tmp_path / "checkpoints", "tiny")
    tiers = [MEMORY, place.tier(every_steps=2)]
    assert sharded("first", tiers=tiers, steps=4, policy=EVERY_DUE_STEP).start().wait()["state"] == "succeeded"
    for step in (0, 2, 4):
        name = f"{folder_of(place, step)}/__1_0.distcp"
        place.write(name, place.read(name)[:-1])
    before = place.names()
    report = sharded("second", tiers=tiers).start().wait()
    assert report["state"] == "failed"
    assert report["error"]["code"] == "NoCheckpointError"
    for seen in ("file step 4", "file step 2", "file step 0"):
        assert seen in report["error"]["message"]
    assert report["steps"] == 0
    assert place.names() == before


@pytest.mark.thorough
def test_a_relaunch_with_other_numbers_of_nodes_and_workers_begins_with_the_same_state(sharded, tmp_path):
    """4 ranks on 2 nodes, then 2 on 1, then 3 on 3: the shards are cut anew each time."""
    place = Directory(tmp_path / "checkpoints", "tiny")
    tiers = [MEMORY, place.tier(every_steps=1)]
    last: dict[int, float] = {}
    for steps, nodes, workers in ((4, 2, 2), (7, 1, 2), (9, 3, 1)):
        running = sharded(f"{nodes}x{workers}", tiers=tiers, steps=steps, nodes=nodes, workers_per_node=workers).start()
        report = running.wait()
        assert report["state"] == "succeeded", report["error"]
        if last:
            assert restored(running) == (max(last), last[max(last)])
        last = digests(running)
        assert max(last) == steps


# --- no room --------------------------------------------------------------------------------------

SMALL = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"', "sh"]
"""A machine with a /dev/shm that is soon full."""


@pytest.fixture
def small_shared_memory() -> None:
    if subprocess.run([*SMALL, "true"], capture_output=True, check=False).returncode != 0:
        assert not os.environ.get("CI"), "mount namespaces need root"
        pytest.skip("mount namespaces need root")


def fill_shared_memory(job: Any) -> None:
    for agent in job.agents:
        with pytest.raises(OSError, match="No space left"):
            Path(f"/proc/{agent.pid}/root/dev/shm/others").write_bytes(bytes(1 << 17))


@pytest.mark.thorough
@pytest.mark.usefixtures("small_shared_memory")
def test_a_dev_shm_that_runs_full_costs_no_snapshot(sharded, undisturbed_sharded, gate):
    """Slots are shared memory of no file system."""
    env = {"HPX_TEST_GATE": str(gate.path)}
    running = sharded("job", *all_at_the_gate(2), tiers=[MEMORY, PEER], env=env, elsewhere={0: SMALL, 1: SMALL}).start()
    until_all_are_at_the_gate(running)
    fill_shared_memory(running)
    gate.open()
    assert_same_end(undisturbed_sharded, running.wait())


@pytest.mark.thorough
@pytest.mark.usefixtures("small_shared_memory")
def test_a_full_dev_shm_is_said_with_its_node_and_the_last_checkpoint_stays_loadable(
    sharded, undisturbed_sharded, tmp_path
):
    place = Directory(tmp_path / "checkpoints", "tiny")
    tiers = [MEMORY, place.tier(every_steps=1)]
    first = sharded("first", tiers=tiers, steps=4, elsewhere={0: SMALL, 1: SMALL}).start()
    assert first.wait()["state"] == "succeeded"
    full = [*SMALL[:-2], SMALL[-2].replace("&& exec", "&& ! head -c 128k /dev/zero >/dev/shm/others && exec"), "sh"]
    before = place.names()
    report = sharded("full", tiers=tiers, elsewhere={0: full, 1: full}).start().wait()
    assert report["state"] == "failed"
    assert "it cannot run a worker: shared-memory: /dev/shm is full" in report["error"]["message"]
    assert (report["steps"], place.names()) == (0, before)
    assert resumes_whole(sharded, undisturbed_sharded, first, tiers)[1] == 4


# --- the end --------------------------------------------------------------------------------------


@overlapped_and_not
def test_a_job_that_is_told_to_end_loses_no_step_that_all_ranks_have(sharded, undisturbed_sharded, tmp_path, overlap):
    """The regular checkpoints are far apart; one rank is in the middle of its next save when the signal comes."""
    place = Directory(tmp_path / "checkpoints", "tiny")
    tiers = [MEMORY, place.tier(every_steps=100)]
    fault = {"what": "hangs", "rank": 1, "step": 8}
    first = sharded("first", fault, tiers=tiers, policy={"overlap": overlap}).start()
    until((first.folder / "hangs-1").exists, first.logs)
    first.until("step", step=8 if overlap else 7, rank=1)
    for agent in first.agents:
        agent.send_signal(signal.SIGTERM)
    assert first.wait()["state"] == "cancelled"
    assert resumes_whole(sharded, undisturbed_sharded, first, tiers)[1] == 7


@pytest.mark.thorough
def test_a_job_that_is_told_to_end_while_it_recovers_loses_no_step(sharded, undisturbed_sharded, tmp_path):
    place = Directory(tmp_path / "checkpoints", "tiny")
    tiers = [MEMORY, place.tier(every_steps=100)]
    fault = {"what": "before begin", "rank": 1, "step": 8}
    first = sharded("first", fault, tiers=tiers).start()
    first.until("fault", rank=1)
    for agent in first.agents:
        agent.send_signal(signal.SIGTERM)
    assert first.wait()["state"] == "cancelled"
    assert resumes_whole(sharded, undisturbed_sharded, first, tiers)[1] == 7


# --- nodes that keep parity of each other ---------------------------------------------------------


def with_parity(sharded, gate, spares: int, *tiers: dict[str, Any]) -> Any:
    """A job of four nodes with a rank each, in one group, that has parity of step 6 and waits before its save of 7."""
    parity = {"kind": "peer", "parity": 4, "every_steps": 6, "max_slowdown": 1.0}
    nodes = {"nodes": 4, "workers_per_node": 1, "spares": spares}
    env = {"HPX_TEST_GATE": str(gate.path)}
    policy = {"when_busy": "wait"}
    running = sharded("job", *all_at_the_gate(7), tiers=[MEMORY, parity, *tiers], policy=policy, env=env, **nodes)
    running.start()
    for node in range(4, 4 + spares):
        running.until("node_joined", node=node)
    until_all_are_at_the_gate(running)
    for node in range(4):
        running.until("copying", node=node, tier="peer", newest_step=6)
    return running


def test_a_node_that_is_lost_is_rebuilt_from_the_others_of_its_group(sharded, undisturbed_sharded, gate):
    running = with_parity(sharded, gate, 1)
    kill_node(running, 2)
    gate.open()
    report = running.wait()
    assert_same_end(undisturbed_sharded, report)
    (recovery,) = report["recoveries"]
    assert (recovery["source"], recovery["resumed_step"], report["nodes_lost"]) == ("parity", 6, [2])
    assert recovery["survivor_pids_kept"]
    assert report["warnings"] == []


@pytest.mark.thorough
def test_two_nodes_of_a_group_lost_at_once_take_all_to_the_durable_tier_which_is_said(
    sharded, undisturbed_sharded, gate, tmp_path
):
    place = Directory(tmp_path / "checkpoints", "tiny")
    running = with_parity(sharded, gate, 2, place.tier(every_steps=4))
    until(lambda: any(name.endswith("/manifest.json") for name in place.names()), running.logs)
    for node in (1, 2):
        kill_node(running, node)
    gate.open()
    report = running.wait()
    assert_same_end(undisturbed_sharded, report)
    assert report["nodes_lost"] == [1, 2]
    said = events(running, "parity_short")
    assert [(event["step"], event["ranks"], event["restored_step"]) for event in said] == [(6, [1, 2], 4)]
    assert "the snapshots of ranks 1, 2 are missing" in report["warnings"][-1]
