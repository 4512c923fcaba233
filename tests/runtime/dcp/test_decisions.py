"""What is decided without any process: steps, generations, nodes, trees, and words for what is missing."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_disk import fill, mounted
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from hyperpod_ext.config.checkpoint.by_time import DueByTime
from hyperpod_ext.errors import ConfigError, HyperpodExtError, JobFailedError
from hyperpod_ext.runtime.dcp.policy import policy_of
from hyperpod_ext.runtime.dcp.state import contents_of, parts_of
from hyperpod_ext.runtime.dcp.steps import Entry, Save, SaveHistory, names_step, step_of
from hyperpod_ext.runtime.dcp.tiers import Tiers
from hyperpod_ext.runtime.membership.node_map import Nodes
from hyperpod_ext.runtime.memory_server.client.start import ServerFiles, runtime_dir, secret_file_of
from hyperpod_ext.runtime.snapshot.image import Layout
from hyperpod_ext.runtime.snapshot.tree import put_together


@pytest.mark.parametrize("name", ["7", "step_7", "step-7", "step7", "/a/b3/step_7", "s3://b/run-2/step_000007/"])
def test_a_checkpoint_id_names_its_step(name: str) -> None:
    assert step_of(name) == 7
    assert names_step(name)


@pytest.mark.parametrize("name", ["", "latest", "step_", "7b", "step_7/x"])
def test_a_checkpoint_id_without_a_step_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="does not end with a step number"):
        step_of(name)
    assert not names_step(name)


def test_each_tier_that_goes_by_time_goes_by_its_own() -> None:
    """S3 was given the file tier's every minute, and kept none that was older."""
    kinds = [
        {"kind": "file", "path": "/f", "every_seconds": 60},
        {"kind": "s3", "uri": "s3://bucket/c", "every_seconds": 3600},
    ]
    tiers: Any = object.__new__(Tiers)
    tiers.policy = policy_of("j", {"tiers": [{"kind": "memory"}, *kinds]})
    asked: list[Any] = []
    history = SaveHistory()
    history.enter(1)
    history.saved(1, True)
    tiers._history, tiers._client = history, SimpleNamespace(ask=asked.append)
    tiers._ranks = SimpleNamespace(all_gather=lambda what, mine: [mine, [mine[0], []]])
    tiers._node = SimpleNamespace(for_node=lambda what, work: work())
    tiers._timer = DueByTime(time.monotonic() - 61)
    tiers.begin_save(2)
    assert [(one.step, one.kind) for one in asked] == [(2, "file")]
    tiers.begin_save(3)
    assert len(asked) == 1, "a minute has not passed"
    assert not tiers._timer.due("file", 60, time.monotonic())
    assert tiers._timer.due("s3", 61, time.monotonic())


def test_a_run_that_saves_on_is_one_generation() -> None:
    history = SaveHistory()
    assert history.needs_new(10)
    assert history.entry(10) == Entry(0, None)
    history.enter(1)
    assert [history.saved(step, True) for step in (10, 20)] == [1, 2]
    assert not history.needs_new(30)


def test_after_a_save_that_failed_its_step_is_given_up() -> None:
    history = SaveHistory()
    history.enter(1)
    history.saved(10, True)
    history.saved(20, False)
    assert history.needs_new(20)
    assert history.entry(20) == Entry(10, 10)


def test_what_follows_a_load_begins_where_the_load_was() -> None:
    history = SaveHistory()
    history.loaded(50)
    assert history.needs_new(60)
    assert history.entry(60) == Entry(50, 50)


def test_a_step_saved_again_does_not_drop_the_first_before_it_is_whole() -> None:
    history = SaveHistory()
    history.enter(1)
    history.saved(10, True)
    assert history.needs_new(10)
    assert history.entry(10) == Entry(9, None)


def test_nodes_on_one_machine_are_told_apart_and_a_node_of_its_own_is_always_the_first() -> None:
    said = [{"place": "a", "node": "1"}, {"place": "a", "node": "1"}, {"place": "b", "node": "0"}]
    nodes = Nodes.of(said)
    assert (nodes.node_of, nodes.machines) == ({0: 0, 1: 0, 2: 1}, 2)
    assert [nodes.index(node) for node in (0, 1)] == [0, 0]
    assert nodes.leader(1) == 2
    rehearsal = Nodes.of([{"place": "a", "node": "0"}, {"place": "a", "node": "1"}])
    assert [rehearsal.index(node) for node in (0, 1)] == [0, 1]
    assert (rehearsal.count, rehearsal.machines) == (2, 1)


TREES = [
    {"model": {"a.b": torch.ones(2), "n": 3}, "list": [{"lr": 0.1, "p": torch.zeros(1)}, {"lr": 0.2}], "t": (1, 2)},
    {"x": torch.ones(2), "nested": [[1, 2], [3]], "empty": [], "text": "é", "none": None, "deep": [[torch.ones(1)]]},
]


@pytest.mark.parametrize("tree", TREES)
def test_what_is_saved_has_the_names_and_values_that_torch_knows(tree: dict[str, object]) -> None:
    planner = DefaultSavePlanner()
    planner.set_up_planner(tree, is_coordinator=True)
    plan = planner.create_local_plan()
    parts = parts_of(plan.items, planner, plan.planner_data)
    layout = Layout(parts)
    contents = contents_of({0: (layout.plan, parts.values)})
    flat, paths = flatten_state_dict(tree)
    assert set(contents.metadata.state_dict_metadata) == set(flat)
    assert contents.metadata.planner_data == paths
    for name, value in flat.items():
        if isinstance(value, torch.Tensor):
            assert contents.metadata.state_dict_metadata[name].size == value.shape
        else:
            assert contents.value(name, 0) == value
            assert type(contents.value(name, 0)) is type(value)
    assert put_together(parts.shape, parts.tensors, parts.values).keys() == tree.keys()


def test_a_list_of_which_a_rank_holds_a_part_keeps_its_names() -> None:
    planner = DefaultSavePlanner()
    planner.set_up_planner({"l": [torch.ones(1), torch.ones(2)]}, is_coordinator=True)
    plan = planner.create_local_plan()
    second = [item for item in plan.items if item.index.fqn == "l.1"]
    parts = parts_of(second, planner, plan.planner_data)
    assert [item.fqn for item in Layout(parts).plan.items] == ["l.1"]


def test_a_value_that_is_no_json_is_named() -> None:
    planner = DefaultSavePlanner()
    planner.set_up_planner({"a": {"b": object()}}, is_coordinator=True)
    plan = planner.create_local_plan()
    with pytest.raises(JobFailedError, match=r"a\.b is a value of type object"):
        parts_of(plan.items, planner, plan.planner_data)


def test_a_policy_is_given_as_a_dict_a_file_or_not_at_all(root) -> None:
    assert [tier.kind for tier in policy_of("j", {"tiers": [{"kind": "memory"}, {"kind": "peer"}]}).tiers] == [
        "memory",
        "peer",
    ]
    assert policy_of("j", root / "examples" / "01-local" / "job.yaml").memory() is not None
    assert [tier.kind for tier in policy_of("j", None, {}).tiers] == ["memory"]
    with pytest.raises(ConfigError, match=r"Tiers: tiers\.0\.every: is not a known field \(did you mean `every_steps`"):
        policy_of("j", {"tiers": [{"kind": "memory", "every": 2}]})
    with pytest.raises(ConfigError, match="parity works only if agents of hyperpod_ext"):
        policy_of("j", {"tiers": [{"kind": "memory"}, {"kind": "peer", "parity": 4}]})
    with pytest.raises(ConfigError, match=r"`memroy` is not a valid kind \(did you mean `memory`"):
        policy_of("j", {"tiers": [{"kind": "memroy"}]})
    assert policy_of("j", {"tiers": [{"kind": "file", "path": root}]}).durable()[0].path == str(root)
    with pytest.raises(ConfigError, match="name: `Not A Name` does not have the right form"):
        policy_of("Not A Name", None, {})


def test_sockets_lie_where_nobody_else_can_reach_them(tmp_path) -> None:
    path = runtime_dir({"HPX_SOCKET_DIR": str(tmp_path / "s")})
    assert path.stat().st_mode & 0o777 == 0o700
    path.chmod(0o755)
    with pytest.raises(HyperpodExtError, match="not a directory of this user alone"):
        runtime_dir({"HPX_SOCKET_DIR": str(path)})
    with pytest.raises(HyperpodExtError, match="too long for a socket"):
        _ = ServerFiles(tmp_path / ("x" * 100), "j", 0).socket


def test_a_secret_is_made_once(tmp_path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    path = secret_file_of("j", environ)
    assert (path.stat().st_mode & 0o777, len(path.read_text())) == (0o600, 64)
    assert secret_file_of("j", environ).read_text() == path.read_text()
    assert secret_file_of("k", environ).read_text() != path.read_text()


def test_a_secret_that_a_full_disk_does_not_take_names_its_file(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "64k") as disk:
        fill(disk)
        with pytest.raises(HyperpodExtError, match=rf"cannot be kept .*No space left on device: '{disk}/hyperpod_ext/"):
            secret_file_of("j", {"XDG_STATE_HOME": str(disk)}, durable=True)
        assert [path.name for path in disk.rglob("*") if path.is_file()] == ["others"]


@pytest.mark.parametrize("environ", [{}, {"HOME": "/proc/nowhere"}])
def test_a_user_without_a_home_folder_has_the_secret_next_to_the_socket_if_nothing_is_durable(
    tmp_path, monkeypatch, environ
) -> None:
    """Containers run as a user id without an entry in /etc/passwd, with HOME=/ or without HOME."""
    monkeypatch.setattr(Path, "home", _no_home)
    sockets = {"HPX_SOCKET_DIR": str(tmp_path / "sockets"), **environ}
    assert secret_file_of("j", sockets).parent == tmp_path / "sockets" / "secrets"
    with pytest.raises(HyperpodExtError, match="which its durable checkpoints need, cannot be kept") as refused:
        secret_file_of("j", sockets, durable=True)
    assert "HPX_SECRET_FILE" in refused.value.hint


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_the_memory_server_is_told_that_the_step_that_was_loaded_is_not_saved_again() -> None:
    """Its upload may be under way yet: it was given up."""
    tiers: Any = object.__new__(Tiers)
    asked: list[Any] = []
    tiers._history, tiers._client = SaveHistory(), SimpleNamespace(ask=asked.append)
    tiers._history.loaded(500)
    tiers._entry, tiers._run = tiers._history.entry(550), "this run"
    tiers._ranks = SimpleNamespace(vote=lambda what, error: None)
    tiers._node = SimpleNamespace(leads=True, ours=False, node=0)
    tiers._tell_generation(2)
    tiers._history.enter(2)
    tiers.end_save(Save(550, 2), None)
    assert [(one.step, one.again) for one in asked] == [(500, False)] * 2
