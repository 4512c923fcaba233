"""Nodes that are lost, and memory servers that die while they copy to each other."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from small_job import MEMORY, PEER, SmallJob, replaced, trained

from hyperpod_ext.errors import NoCheckpointError


def sources(job: SmallJob) -> dict[int, str]:
    return {event["rank"]: event["source"] for event in job.vote.events}


def connections_to(job: SmallJob) -> int:
    """TCP connections of this process, which has all ranks, to the memory servers."""
    ports = {port for _, port in job.peers.values()}
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        if descriptor.is_socket():
            with socket.socket(fileno=os.dup(int(descriptor.name))) as sock, contextlib.suppress(OSError):
                found += sock.family == socket.AF_INET and sock.getpeername()[1] in ports
    return found


@pytest.mark.parametrize("node", [0, 1])
def test_the_ranks_of_a_lost_node_are_restored_from_its_peer_on_another_machine(make_job, node):
    job = replaced(trained(make_job(MEMORY, PEER, nodes=2, workers=2), 5), node)
    assert job.resume() == 5
    job.assert_holds(5)
    lost = {2 * node, 2 * node + 1}
    assert sources(job) == {rank: "peer" if rank in lost else "memory" for rank in range(4)}
    assert connections_to(job) == 0  # each would cost the other node a thread for as long as its rank lives
    job.train(7)  # and the new machine is a node as any other
    assert job.resume() == 7
    job.assert_holds(7)


def test_all_go_back_to_the_step_that_has_replicas(make_job):
    """Copies are rare: of the steps since, more than there are slots, the lost node had the only ones."""
    job = trained(make_job(MEMORY, {**PEER, "every_steps": 6}, nodes=2), 11)
    replaced(job, 1)
    assert job.resume() == 6
    job.assert_holds(6)


def test_two_nodes_of_a_pair_lost_is_said(make_job):
    job = trained(make_job(MEMORY, PEER, nodes=2), 3)
    replaced(job, 0, 1)
    with pytest.raises(NoCheckpointError, match=r"No step that all 2 ranks can restore.*Seen: nothing"):
        job.resume(committed=3)


def test_a_lost_pair_is_restored_from_the_durable_tier(make_job, place):
    job = trained(make_job(MEMORY, PEER, place.tier(), nodes=2), 5)
    replaced(job, 0, 1)
    assert job.resume() == 4
    job.assert_holds(4)
    assert set(sources(job).values()) == {"durable"}


def copying(job: SmallJob, node: int) -> dict[str, Any]:
    return next(one for one in job.servers[node].ask("status")["copying"] if one["tier"] == "peer")


def test_a_peer_killed_in_the_middle_of_a_copy_costs_nothing_that_was_whole(make_job):
    job = trained(make_job(MEMORY, PEER, nodes=2), 4)
    os.kill(job.servers[1].pid, signal.SIGSTOP)  # it takes what fits into its sockets, and answers nothing
    rank = job.ranks[0]
    rank.make_step(5)
    rank.commit(5)
    rank.checkpointer.flush()
    assert not job.servers[0].ask("wait_idle", timeout_s=0.2)["idle"]  # it is on its way
    job.lose_node(1)
    assert job.servers[0].ask("wait_idle", timeout_s=30.0)["idle"]
    told = copying(job, 0)
    assert (told["failed"], "peer 127.0.0.1" in told["last_error"]) == (1, True)
    job.start_node(1)
    job.meet()
    assert job.servers[0].ask("wait_idle", timeout_s=30.0)["idle"]
    assert copying(job, 0)["replicated_step"] == 5  # who comes in its place gets the newest at once
    assert job.resume() == 4  # step 5 of rank 1 never was
    job.assert_holds(4)


def test_a_source_killed_in_the_middle_of_a_copy_leaves_nothing_half(make_job):
    """The replica that was on its way does not exist, the one before does."""
    job = trained(make_job(MEMORY, PEER, nodes=2), 4)
    os.kill(job.servers[1].pid, signal.SIGSTOP)
    rank = job.ranks[0]
    rank.make_step(5)
    rank.commit(5)
    rank.checkpointer.flush()
    assert not job.servers[0].ask("wait_idle", timeout_s=0.2)["idle"]
    job.lose_node(0)
    os.kill(job.servers[1].pid, signal.SIGCONT)
    job.start_node(0)
    job.meet()
    replicas = [one["step"] for one in job.servers[1].ask("held")["snapshots"] if one["replica"]]
    assert max(replicas) in (4, 5)  # whole: all of it may have been in the sockets already
    assert job.resume() == 4
    job.assert_holds(4)
