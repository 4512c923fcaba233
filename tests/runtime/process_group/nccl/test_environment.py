"""What is set for NCCL, and which settings of a user's are refused."""

from __future__ import annotations

import pytest

from hyperpod_ext.errors import ConfigError
from hyperpod_ext.runtime.process_group.nccl.environment import (
    VARIABLES,
    Engine,
    engine_of,
    engines_used,
    nccl_environment,
    without_reconfigure,
)


def refused(engine: Engine, **given: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        nccl_environment((engine,), given)
    return [problem.path for problem in caught.value.problems]


def test_the_legacy_engine_gets_all_that_keeps_its_threads_from_ending_the_process():
    assert nccl_environment(("nccl",), {"PATH": "/bin"}) == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
        "TORCH_NCCL_PROPAGATE_ERROR": "0",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": "30",
        "NCCL_NVLS_ENABLE": "0",
    }


def test_nccl2_gets_what_it_reads():
    assert nccl_environment(("nccl2",), {}) == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_FR_DUMP_ON_TIMEOUT": "0",
        "TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC": "1",
        "NCCL_NVLS_ENABLE": "0",
    }


def test_all_contradictions_are_told_at_once_with_what_to_do():
    given = {"TORCH_NCCL_ENABLE_MONITORING": "1", "CUDA_LAUNCH_BLOCKING": "1", "TORCH_NCCL_PROPAGATE_ERROR": "0"}
    with pytest.raises(ConfigError) as caught:
        nccl_environment(("nccl",), given)
    monitoring, blocking = str(caught.value).splitlines()
    assert monitoring.startswith(
        "the environment: TORCH_NCCL_ENABLE_MONITORING: is '1', but recovery with NCCL needs 0"
    )
    assert monitoring.endswith("(Set TORCH_NCCL_ENABLE_MONITORING=0.)")
    assert blocking.startswith("the environment: CUDA_LAUNCH_BLOCKING: is '1'")
    assert blocking.endswith("(Remove CUDA_LAUNCH_BLOCKING from the environment.)")


@pytest.mark.parametrize(
    "given",
    [
        {"CUDA_LAUNCH_BLOCKING": "1"},
        {"TORCH_NCCL_BLOCKING_WAIT": "1"},
        {"NCCL_BLOCKING_WAIT": "1"},
        {"OFI_NCCL_ABORT_ON_ERROR": "1"},
    ],
    ids=str,
)
@pytest.mark.parametrize("engine", ["nccl", "nccl2"])
def test_what_cannot_go_with_recovery_is_refused_for_both(engine: Engine, given: dict[str, str]):
    assert refused(engine, **given) == list(given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_ASYNC_ERROR_HANDLING", "3"),  # a former name
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"),  # the watchdog would abort before steps are looked at
        ("TORCH_NCCL_RETHROW_CUDA_ERRORS", "Yes"),
        ("TORCH_NCCL_PROPAGATE_ERROR", "on"),  # torch does not know this word, and would raise
        ("TORCH_NCCL_NONBLOCKING_TIMEOUT", "1800"),
        ("TORCH_NCCL_NONBLOCKING_TIMEOUT", "0"),
        ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "15000"),
        ("TORCH_NCCL_TEARDOWN_ON_TIMEOUT", "1"),
        ("NCCL_DESYNC_DEBUG", "t"),
        ("TORCH_DISTRIBUTED_DEBUG", "detail"),
        ("NCCL_NVLS_ENABLE", "2"),
    ],
)
def test_a_value_that_contradicts_is_refused_by_the_name_that_the_user_gave(name: str, value: str):
    assert refused("nccl", **{name: value}) == [name]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCH_NCCL_ENABLE_MONITORING", "False"),
        ("TORCH_NCCL_RETHROW_CUDA_ERRORS", "N"),
        ("NCCL_ASYNC_ERROR_HANDLING", "0"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", " +0 "),  # as std::stoi reads it
        ("TORCH_NCCL_NONBLOCKING_TIMEOUT", "60s"),
        ("NCCL_NVLS_ENABLE", "0"),
    ],
)
def test_a_value_that_means_the_same_is_left_alone(name: str, value: str):
    variable = next(variable for variable in VARIABLES if name in variable.names)
    assert variable.name in nccl_environment(("nccl",), {})
    assert variable.name not in nccl_environment(("nccl",), {name: value})


def test_a_debug_level_that_changes_nothing_is_accepted():
    assert nccl_environment(("nccl",), {"TORCH_DISTRIBUTED_DEBUG": "info"}) == nccl_environment(("nccl",), {})


def test_of_two_names_the_newer_one_counts():
    given = {"TORCH_NCCL_BLOCKING_WAIT": "0", "NCCL_BLOCKING_WAIT": "1"}  # torch reads it so, too
    assert nccl_environment(("nccl",), given) == nccl_environment(("nccl",), {})


def test_what_is_empty_is_not_set():
    assert nccl_environment(("nccl",), {"TORCH_NCCL_ENABLE_MONITORING": ""}) == nccl_environment(("nccl",), {})


def test_nccl2_is_asked_by_its_own_names_and_torchs_former_ones():
    assert refused("nccl2", TORCH_NCCL_DUMP_ON_TIMEOUT="1") == ["TORCH_NCCL_DUMP_ON_TIMEOUT"]
    assert "TORCH_FR_DUMP_ON_TIMEOUT" not in nccl_environment(("nccl2",), {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"})
    unread = {"TORCH_NCCL_ENABLE_MONITORING": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}  # of the legacy engine alone
    assert nccl_environment(("nccl2",), unread) == nccl_environment(("nccl2",), {})


def test_what_is_set_is_accepted():
    for engine in ("nccl", "nccl2"):
        assert nccl_environment((engine,), nccl_environment((engine,), {})) == {}


@pytest.mark.parametrize(
    ("torch", "chosen", "engine"),
    [
        ("2.6.0", None, "nccl"),
        ("2.13.0+cu130", "1", "nccl"),
        ("2.14.1", None, "nccl"),
        ("2.14.1", "1", "nccl2"),
        ("2.15.0+cu132", None, "nccl2"),
        ("2.15.0", "0", "nccl"),
        ("3.0.0.dev20270101", None, "nccl2"),
    ],
)
def test_what_torch_makes_of_nccl(torch: str, chosen: str | None, engine: Engine):
    assert engine_of(torch, {} if chosen is None else {"TORCH_DIST_USE_NCCL2": chosen}) == engine


@pytest.mark.parametrize(
    ("torch", "chosen", "backend", "engines"),
    [
        ("2.11.0+cu130", None, "nccl", ("nccl",)),
        ("2.14.1", "1", "nccl", ("nccl2",)),  # which has no name for the first implementation
        ("2.15.0+cu132", None, "nccl-legacy", ("nccl2", "nccl")),
        ("2.15.0", "0", "nccl", ("nccl",)),
    ],
)
def test_groups_that_are_not_reconfigured_are_of_the_implementation_that_can_abort_several(
    torch: str, chosen: str | None, backend: str, engines: tuple[Engine, ...]
):
    given = {} if chosen is None else {"TORCH_DIST_USE_NCCL2": chosen}
    assert without_reconfigure(torch, given) == backend
    assert engines_used(torch, given) == engines


def test_what_both_implementations_read_is_set_for_both():
    both = nccl_environment(("nccl2", "nccl"), {})
    assert both == nccl_environment(("nccl",), {}) | nccl_environment(("nccl2",), {})
    given = {"TORCH_NCCL_ENABLE_MONITORING": "1", "TORCH_FR_DUMP_ON_TIMEOUT": "1", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    with pytest.raises(ConfigError) as caught:
        nccl_environment(("nccl2", "nccl"), given)
    assert {problem.path for problem in caught.value.problems} == set(given), "all at once"
