"""Checks that need several fields, as the pure functions they are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pydantic import ValidationError

from hyperpod_ext.config.checkpoint import CheckpointPolicy, MemoryTier, PeerTier
from hyperpod_ext.config.fault_injection import Chaos, KillFault
from hyperpod_ext.config.files import checks
from hyperpod_ext.config.job.job import JobConfig


def job(**fields: object) -> JobConfig:
    return JobConfig.model_validate({"name": "a", "script": "train.py"} | fields)


def hints(found: Iterator[checks.Finding]) -> list[str]:
    return [finding.hint for finding in found]


@pytest.mark.parametrize(
    ("batch", "hint"),
    [
        (15, ["write 12 or 16"]),
        (3, ["write 4"]),
        (17, ["write 16 or 20"]),
        (14, ["write 12 or 16"]),
        (16, []),
        (None, []),
    ],
)
def test_the_batch_divides_among_all_ranks(batch: int | None, hint: list[str]) -> None:
    spec = job(nodes=2, workers_per_node=2, global_batch_size=batch)
    found = list(checks.batch_divides_among_ranks(spec, None))
    assert [finding.hint for finding in found] == hint
    assert all("2 nodes x 2 workers_per_node = 4 ranks" in finding.message for finding in found)


def test_the_script_is_looked_for_in_its_own_folder() -> None:
    asked: list[str] = []

    def files(folder: str) -> list[str]:
        asked.append(folder)
        return ["train.py", "job.yaml"]

    assert hints(checks.script_is_in_spec_folder(job(script="src/trian.py"), files)) == ["did you mean `src/train.py`?"]
    assert not hints(checks.script_is_in_spec_folder(job(script="src/train.py"), files))
    assert asked == ["src", "src"]


@pytest.mark.parametrize("script", ["/abs/train.py", "../train.py"])
def test_a_script_outside_the_folder_is_refused(script: str) -> None:
    assert "below" in hints(checks.script_is_in_spec_folder(job(script=script), None))[0]


@pytest.mark.parametrize("script", ["/abs/train.py", "../train.py"])
def test_a_plain_script_may_be_on_a_file_system_of_all_nodes(script: str) -> None:
    assert not hints(checks.script_is_in_spec_folder(job(script=script, mode="plain"), None))


def test_a_script_that_is_not_python_is_refused() -> None:
    assert hints(checks.script_is_python(job(script="train.sh"), None)) == ["name a file that ends in .py"]


def test_a_tier_kind_comes_once() -> None:
    policy = CheckpointPolicy(tiers=(MemoryTier(), PeerTier(), MemoryTier()))
    assert [finding.path for finding in checks.each_tier_once(job(checkpoint=policy), None)] == [
        ("checkpoint", "tiers", 2)
    ]


@pytest.mark.parametrize(("nodes", "replicas", "count"), [(1, 1, 1), (2, 1, 0), (2, 2, 1), (4, 3, 0)])
def test_peer_copies_need_other_nodes(nodes: int, replicas: int, count: int) -> None:
    spec = job(nodes=nodes, checkpoint=CheckpointPolicy(tiers=(PeerTier(replicas=replicas),)))
    assert len(list(checks.peer_copies_fit_the_nodes(spec, None))) == count


@pytest.mark.parametrize(
    ("nodes", "hint"), [(2, "use `replicas` instead, or more nodes"), (3, "write 3, or use more nodes")]
)
def test_parity_needs_a_group_of_nodes(nodes: int, hint: str) -> None:
    policy = CheckpointPolicy(tiers=(PeerTier(parity=4),))
    assert hints(checks.parity_fits_the_nodes(job(nodes=nodes, checkpoint=policy), None)) == [hint]
    assert list(checks.peer_copies_fit_the_nodes(job(nodes=nodes, checkpoint=policy), None)) == []
    assert list(checks.parity_fits_the_nodes(job(nodes=4, checkpoint=policy), None)) == []


def test_elastic_jobs_keep_copies() -> None:
    policy = CheckpointPolicy(tiers=(PeerTier(parity=3),))
    (finding,) = checks.parity_fits_the_nodes(
        job(nodes=4, checkpoint=policy, elastic={"min_nodes": 3, "max_nodes": 8}), None
    )
    assert finding.path == ("checkpoint", "tiers", 0, "parity")
    assert "an elastic job cannot use parity" in finding.message


def test_copies_and_parity_contradict_each_other() -> None:
    with pytest.raises(ValidationError, match="replicas and parity exclude each other"):
        PeerTier(parity=4, replicas=2)
    assert PeerTier.model_validate(PeerTier(parity=4).model_dump()).parity == 4
    assert "parity" not in PeerTier().model_dump()
    with pytest.raises(ValidationError, match="greater than or equal to 3"):
        PeerTier(parity=2)


def test_nixl_does_not_go_with_tls() -> None:
    policy = CheckpointPolicy(tiers=(PeerTier(transport="nixl"),))
    (finding,) = checks.nixl_is_not_encrypted(job(checkpoint=policy, network={"tls": True}), None)
    assert finding.path == ("checkpoint", "tiers", 0, "transport")
    assert list(checks.nixl_is_not_encrypted(job(checkpoint=policy, network={"tls": False}), None)) == []
    tcp = CheckpointPolicy(tiers=(PeerTier(),))
    assert list(checks.nixl_is_not_encrypted(job(checkpoint=tcp, network={"tls": True}), None)) == []


def test_nixl_carries_copies_alone() -> None:
    with pytest.raises(ValidationError, match="parity works only over TCP"):
        PeerTier(parity=4, transport="nixl")
    assert PeerTier.model_validate(PeerTier(transport="nixl").model_dump()).transport == "nixl"
    assert "transport" not in PeerTier().model_dump()


def test_faults_hit_ranks_that_exist() -> None:
    chaos = Chaos(faults=(KillFault(rank=3, step=1), KillFault(rank=4, step=1)))
    spec = job(nodes=2, workers_per_node=2, chaos=chaos)
    found = list(checks.faults_hit_ranks_that_exist(spec, None))
    assert [(one.path, one.hint) for one in found] == [(("chaos", "faults", 1, "rank"), "the job's ranks are 0 to 3")]


def test_variables_of_the_launcher_cannot_be_set() -> None:
    found = list(checks.own_variables_are_left_alone(job(env={"HPX_RUNTIME": "x", "A": "b"}), None))
    assert [finding.path for finding in found] == [("env", "HPX_RUNTIME")]


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("HPX_PORT_BASE", "30000", "80"),
        ("HPX_PORT_BASE", "1024", "many"),
        ("HPX_HYPERPODRUN_MODE", "in-process", "inprocess"),
        ("HPX_SOCKET_DIR", "/tmp/sockets", "sockets"),
        ("HPX_TERMINATION_LOG", "/dev/other-log", "log"),
    ],
)
def test_settings_of_the_runtime_that_the_pages_name_can_be_set(name: str, right: str, wrong: str) -> None:
    assert list(checks.own_variables_are_left_alone(job(env={name: right}), None)) == []
    (found,) = checks.own_variables_are_left_alone(job(env={name: wrong}), None)
    assert found.path == ("env", name)
    assert f"`{wrong}` is not a" in found.message
    assert found.hint


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mode": "plain"}, "mode plain restarts all ranks"),
        ({"elastic": {"min_nodes": 1, "max_nodes": 8}}, "two different ways to continue with fewer nodes"),
        ({"parallelism": {"tensor": 2}}, "2 ranks share one copy of the model"),
        ({"nodes": 1}, "the job has only one rank"),
        ({"checkpoint": CheckpointPolicy(tiers=(PeerTier(parity=3),))}, "cannot be combined with parity"),
    ],
)
def test_ranks_continue_only_without_what_they_need_each_other_for(fields: dict[str, object], words: str) -> None:
    known: dict[str, object] = {"nodes": 4, "restart": {"policy": "continue"}}
    assert list(checks.ranks_can_be_done_without(job(**known), None)) == []
    (finding,) = checks.ranks_can_be_done_without(job(**known | fields), None)
    assert finding.path == ("restart", "policy")
    assert words in finding.message


def test_only_ranks_that_continue_make_steps_with_fewer_samples() -> None:
    (finding,) = checks.ranks_can_be_done_without(job(nodes=2, restart={"samples": "fewer"}), None)
    assert finding.path == ("restart", "samples")


def test_packages_are_replaced_only_in_workers_of_ours() -> None:
    for mode in ("ours", "run"):
        assert list(checks.compat_has_our_workers(job(mode=mode, compat="aws"), None)) == []
    for mode in ("plain", "aws-checkpointless", "aws-managed-tier"):
        (finding,) = checks.compat_has_our_workers(job(mode=mode, compat="aws"), None)
        assert (finding.path, finding.hint) == (("compat",), "write `mode: ours` or `mode: run`, or remove compat")
