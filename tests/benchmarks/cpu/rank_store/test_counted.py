"""What groups ask of the ranks' store, counted: as much a rank in a large job as in a small one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_store.measure import PHASES, measure_here
from rank_store.pattern import default_group, mesh_groups
from ranks import Member, Ranks
from torch.distributed.device_mesh import init_device_mesh

from hyperpod_ext.runtime.process_group.store import PartitionedStore

SIZES = (40, 80, 160)
WORKERS = 2
OWN_KEYS = {"default": 2, "mesh": 3}
"""Which each rank sets, in its own server."""


@pytest.fixture(scope="module")
def rows() -> dict[int, dict[str, dict[str, float]]]:
    return {ranks: measure_here(ranks, WORKERS) for ranks in SIZES}


def test_a_start_costs_a_rank_the_same_in_a_job_of_any_size(rows):
    for ranks, row in rows.items():
        asked = {which: row[f"start_{which}"]["requests"] / ranks - own for which, own in OWN_KEYS.items()}
        assert asked == {"default": 2, "mesh": 5}, "one for each neighbour in each ring"
        assert row["start_mesh"]["lines"] == 6 * ranks


def test_after_a_lost_node_only_its_ranks_and_their_neighbours_ask_again(rows):
    for which, own in OWN_KEYS.items():
        again = {row[f"lost_{which}"]["requests"] - own * ranks for ranks, row in rows.items()}
        assert len(again) == 1, "however many ranks there are"
        assert again.pop() <= 8 * WORKERS * own


@pytest.mark.parametrize("phase", PHASES)
def test_no_rank_serves_more_in_a_larger_job(rows, phase):
    assert len({row[phase]["busiest"] for row in rows.values()}) == 1
    each = [row[phase]["bytes"] / ranks for ranks, row in rows.items()]
    assert max(each) <= 1.1 * each[0]


def test_agents_look_up_as_many_nodes_in_a_larger_job(rows):
    small, middle, large = (row for row in rows.values())
    for phase in PHASES:
        assert small[phase]["agent_look_ups"] == 0, "all are told all addresses"
        assert middle[phase]["agent_look_ups"] * WORKERS <= 3 * SIZES[1]
        assert large[phase]["agent_look_ups"] <= 2 * middle[phase]["agent_look_ups"]
        assert large[phase]["worker_look_ups"] <= 2 * middle[phase]["worker_look_ups"]


def _traced(member: Member) -> None:
    """What a job with a device mesh asks of its store, two generations long."""
    asked: list[tuple[str, str]] = []
    for name in ("set", "wait", "get"):
        setattr(PartitionedStore, name, _noting(asked, name, getattr(PartitionedStore, name)))
    while member.join():
        dist.all_reduce(torch.ones(1))
        mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "pp", "tp"))
        for dimension in mesh.mesh_dim_names:
            dist.all_reduce(torch.ones(1), group=mesh[dimension].get_group())
        member.send("asked", list(asked))
        asked.clear()
        member.groups.leave()


def _noting(asked: list[tuple[str, str]], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def noting(store: PartitionedStore, key: Any, *rest: Any) -> Any:
        asked.append((name, key if isinstance(key, str) else key[0]))
        return call(store, key, *rest)

    return noting


def _expected(rank: int) -> set[tuple[str, str]]:
    groups = [default_group(rank, 4), *mesh_groups(rank, (2, 2, 1))]
    own = {("set", f"backend/{rank}")} | {("set", group.own_key) for group in groups}
    return own | {(call, key) for group in groups for key in group.neighbour_keys for call in ("wait", "get")}


def test_the_benchmark_asks_what_real_groups_ask():
    with Ranks(4, _traced) as ranks:
        for _ in range(2):
            ranks.begin()
            for rank, (asked,) in ranks.hear("asked").items():
                assert sorted(asked) == sorted(_expected(rank)), "each once"
        ranks.end()
