"""What a start, a lost node and a lost coordinator cost in messages and bytes: N log N of the nodes at most."""

from __future__ import annotations

import asyncio
from math import log2
from typing import Any

import pytest
from control_plane_bench import measure

SIZES = (16, 64, 256)
WORKERS = 8


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [asyncio.run(measure(nodes, WORKERS, nodes + 1, 120.0)) for nodes in SIZES]


@pytest.mark.parametrize("unit", ["bytes", "messages"])
@pytest.mark.parametrize("of", ["start", "fault", "takeover"])
def test_costs_grow_with_n_log_n_at_most(rows: list[dict[str, Any]], of: str, unit: str) -> None:
    what = f"{of}_{unit}"
    each = [row[what] / (row["nodes"] * log2(row["nodes"])) for row in rows]
    assert each == sorted(each, reverse=True), f"{what} by N log N of {SIZES} nodes"


@pytest.mark.parametrize("of", ["step", "fault"])
def test_what_it_adds_to_the_log_hardly_grows_from_64_ranks_on(rows: list[dict[str, Any]], of: str) -> None:
    at_128, at_512, at_2048 = (row[f"{of}_log_bytes"] for row in rows)
    assert 0 < at_128 < at_512 < at_2048 < 1.3 * at_128


def test_a_node_hears_and_says_a_few_short_messages_when_another_is_lost(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["fault_messages"] <= 11 * row["nodes"]
        assert row["fault_bytes"] <= 6000 * row["nodes"]
        for kind in ("abort", "begin", "go", "node_join", "restored"):
            assert row["fault_by_kind"][kind][0] <= row["nodes"], kind
        changes = row["fault_by_kind"]["job_state_change"]
        assert changes[0] <= 3 * 17, "only those who may coordinate hear what changes of the job state"
        assert "job_state" not in row["fault_by_kind"]
        assert row["start_by_kind"]["job_state"][0] <= 17
        assert row["takeover_by_kind"]["job_state"][0] <= 17
        assert row["takeover_messages"] <= 8 * row["nodes"] + 17 * 17, "those few hear of each other's coming"
