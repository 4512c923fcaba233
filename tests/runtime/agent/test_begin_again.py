"""An elastic job that is started again on other nodes than at first; and orders that wait for nodes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hyperpod_ext.config.job.runtime import ENV_RUNTIME, RuntimeConfig
from hyperpod_ext.config.resize import ResizeOrder
from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.agent.settings import parse, read_settings
from hyperpod_ext.runtime.coordinator.resize_orders import orders_due, orders_overtaken, read_orders


def begun_with(there: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **more: object) -> int:
    """Nodes that a job of three begins with."""
    (tmp_path / "train.py").touch()
    (tmp_path / "secret").write_text("x" * 32)
    (tmp_path / "secret").chmod(0o600)
    fields = {"name": "a", "nodes": 3, "workers_per_node": 1, "elastic": {"min_nodes": 2, "max_nodes": 8}, **more}
    monkeypatch.setenv(ENV_RUNTIME, RuntimeConfig.model_validate_json(json.dumps(fields)).model_dump_json())
    monkeypatch.setenv("HPX_SECRET_FILE", str(tmp_path / "secret"))
    arguments = parse(["--nnodes", str(there), "--", str(tmp_path / "train.py")])
    return read_settings(arguments, tmp_path, tmp_path).config.nodes


@pytest.mark.parametrize(
    ("there", "spares", "nodes"),
    [(3, 0, 3), (2, 0, 2), (5, 0, 5), (9, 0, 8), (3, 1, 3), (2, 1, 2), (5, 1, 4)],
)
def test_it_begins_with_as_many_as_it_can_and_the_rest_are_spares(
    there: int, spares: int, nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert begun_with(there, tmp_path, monkeypatch, spares=spares) == nodes


def test_only_its_sizes_count_and_too_few_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"min_nodes": 3, "max_nodes": 6, "sizes": [3, 6]}
    assert begun_with(5, tmp_path, monkeypatch, elastic=sizes) == 3
    with pytest.raises(JobFailedError, match=r"a cannot start on 2 nodes \(--nnodes\): it needs 3 or 6"):
        begun_with(2, tmp_path, monkeypatch, elastic=sizes)
    with pytest.raises(JobFailedError, match="contradicts"):
        begun_with(2, tmp_path, monkeypatch, elastic=None)


def test_orders_are_read_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    (tmp_path / "resizes").mkdir()
    (tmp_path / "resizes" / "2.json").write_text('{"nodes": 4, "joining": [2, 3]}')
    (tmp_path / "resizes" / "1.json").write_text('{"nodes": 1}')
    (tmp_path / "resizes" / "3.json").write_text('{"nodes": 1, "joining": [-1]}')
    os.mkfifo(tmp_path / "resizes" / "000.json")  # reading it would never end
    assert [(name, order.nodes, order.joining) for name, order in read_orders(tmp_path).items()] == [
        ("1", 1, ()),
        ("2", 4, (2, 3)),
    ]


@pytest.mark.parametrize(
    ("taken", "members", "due"),
    [
        (set(), {0, 1}, ["002"]),  # 001 waits for its nodes
        (set(), {0, 1, 2}, ["001", "002"]),
        ({"001"}, {0, 1, 2}, ["002"]),
        ({"002"}, {0, 1, 2}, []),  # 001 was overtaken
    ],
)
def test_an_order_that_was_overtaken_is_dropped(taken: set[str], members: set[int], due: list[str]) -> None:
    orders = {"001": ResizeOrder(nodes=3, joining=(2,)), "002": ResizeOrder(nodes=1)}
    assert [name for name, _ in orders_due(orders, taken, members)] == due
    assert [name for name, _ in orders_overtaken(orders, taken)] == (["001"] if taken == {"002"} else [])
