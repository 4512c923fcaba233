"""docs/what-works-where.md: made from what `validate` says of each promise on each target; tests it names are there."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import UnsupportedError
from hyperpod_ext.submit.contract.capabilities import unused
from hyperpod_ext.submit.contract.resize import get_mover, get_resizer
from hyperpod_ext.submit.contract.targets import TARGETS, get_target
from hyperpod_ext.submit.plan import find_problems

PAGE = "docs/what-works-where.md"
FILES = {"kind": "file-system", "id": "fs-0123456789abcdef0", "directory": "/fsx", "access": "rw"}
LEAST: dict[str, Any] = {
    "name": "a",
    "script": "train.py",
    "nodes": 2,
    "image": "repo/train:1",
    "scheduling": {"queue": "team-localqueue"},
    "sagemaker": {"channels": {"shared": FILES}},
}
"""A job that has what some promises need: a queue, and a directory that its nodes share."""
MEMORY = {"kind": "memory"}
ASKED: dict[str, dict[str, Any]] = {
    "an exception is met in the process": {},
    "a process that dies is replaced, nodes keep theirs": {},
    "a spare node takes the place of a lost one": {"spares": 1},
    "elastic: fewer nodes, or more": {"elastic": {"min_nodes": 1, "max_nodes": 3}},
    "tier: this node's memory": {"checkpoint": {"tiers": [MEMORY]}},
    "tier: a peer's memory": {"checkpoint": {"tiers": [MEMORY, {"kind": "peer"}]}},
    "tier: a shared directory": {"checkpoint": {"tiers": [MEMORY, {"kind": "file", "path": "/x"}]}},
    "tier: S3": {"checkpoint": {"tiers": [MEMORY, {"kind": "s3", "uri": "s3://bucket/a"}]}},
    "AWS's managed tier": {"mode": "aws-managed-tier"},
    "AWS's checkpointless recovery": {"mode": "aws-checkpointless"},
    "faults are rehearsed (`chaos`)": {"chaos": {"faults": [{"rank": 0, "step": 1}]}},
    "numbers for Prometheus (`metrics`)": {"metrics": {"port": 9464}},
    "rules about what is printed (`log_rules`)": {"log_rules": [{"name": "loss", "pattern": "loss", "every_s": 60}]},
}
"""What a job asks for, by the promise."""
_STATE_ALONE = (
    "jobs of target {target} tell their state alone while they run: copy HPX_RUN_DIR, or read the port of `metrics`"
)
NOT_THERE: dict[str, Callable[[str], str]] = {
    "`hp-ext resize` of a job that runs": lambda target: _refusal_of(get_resizer, target),
    "`hp-ext move`: a node's ranks go to a spare, without a fault": lambda target: _refusal_of(get_mover, target),
    "`hp-ext report`: faults, goodput, where the time went": lambda target: (
        _STATE_ALONE.format(target=target) if target in ("kubeflow", "sagemaker") else ""
    ),
    "`hp-ext top`: what each rank does now": lambda target: (
        "its ranks write their events beside the checkpoints, which `hp-ext top` does not follow yet"
        if target == "hyperpod-eks"
        else _STATE_ALONE.format(target=target)
        if target in ("kubeflow", "sagemaker")
        else ""
    ),
    "ranks that hang are found and replaced": lambda target: (
        "our agent looks for hangs, and `hyperpodrun` starts the ranks there: use `log_rules`"
        if target == "hyperpod-eks"
        else ""
    ),
    "the job's secret is read by another user than root": lambda target: "",
}
"""Promises that no field of a spec asks for: why a target does not keep one; empty: it does."""
SHOWN: dict[str, dict[str, str]] = {
    "an exception is met in the process": {
        "local": "tests/faults/test_recovery.py::test_an_exception_on_one_rank_is_recovered_in_process",
        "hyperpod-eks": "tests/faults/test_hyperpodrun.py::test_an_exception_is_met_in_process_at_the_operators_word",
    },
    "a process that dies is replaced, nodes keep theirs": {
        "local": "tests/faults/test_recovery.py::test_a_kill_from_outside_is_seen_without_any_warning",
        "hyperpod-eks": (
            "tests/faults/test_hyperpodrun.py::test_a_killed_rank_costs_its_node_the_processes_and_nobody_a_step"
        ),
        "sagemaker": (
            "tests/runtime/test_training_job.py::"
            "test_a_training_job_recovers_a_killed_worker_in_process_with_the_same_losses"
        ),
    },
    "a spare node takes the place of a lost one": {
        "local": "tests/faults/test_nodes_lost.py::test_a_spare_takes_the_place_of_a_node_that_is_killed",
        "hyperpod-eks": "tests/faults/test_hyperpodrun.py::test_a_lost_node_is_replaced_by_the_spare",
        "hyperpod-slurm": (
            "tests/submit/slurm/test_slurm_real.py::test_a_spare_takes_the_ranks_of_a_node_that_is_lost"
        ),
    },
    "elastic: fewer nodes, or more": {
        "local": "tests/faults/test_resize.py::test_two_four_three_one_four",
        "hyperpod-eks": "tests/faults/test_operator_elastic.py::test_graceful_shrink_and_grow_cost_no_step_and_no_bit",
        "hyperpod-slurm": (
            "tests/submit/slurm/test_slurm_resize_real.py::test_nodes_come_from_another_allocation_and_go_back_to_slurm"
        ),
    },
    "tier: this node's memory": {
        "local": "tests/faults/test_recovery.py::test_state_torn_on_every_rank_comes_back_from_memory",
        "hyperpod-eks": (
            "tests/faults/test_hyperpodrun.py::test_a_killed_rank_costs_its_node_the_processes_and_nobody_a_step"
        ),
        "sagemaker": (
            "tests/runtime/test_training_job.py::"
            "test_a_training_job_recovers_a_killed_worker_in_process_with_the_same_losses"
        ),
    },
    "tier: a peer's memory": {
        "local": (
            "tests/faults/test_nodes_gone.py::"
            "test_copies_in_other_nodes_memory_survive_the_loss_of_a_node_and_are_made_again"
        ),
        "hyperpod-eks": (
            "tests/faults/test_operator_elastic.py::test_shards_of_a_pod_that_leaves_are_in_its_peers_memory"
        ),
    },
    "tier: a shared directory": {
        "local": "tests/faults/test_checkpoint_nodes.py::test_a_lost_pair_is_restored_from_the_durable_tier",
        "hyperpod-eks": "tests/faults/test_hyperpodrun.py::test_an_exception_is_met_in_process_at_the_operators_word",
    },
    "tier: S3": {
        "local": "tests/faults/test_checkpoint_s3.py::test_what_is_drained_and_restored_in_bad_weather_is_whole",
    },
    "`hp-ext resize` of a job that runs": {
        "local": "tests/faults/test_resize.py::test_two_four_three_one_four",
        "hyperpod-eks": (
            "tests/submit/kubernetes/test_eks_resize.py::"
            "test_the_operator_gets_other_bounds_and_it_is_waited_for_its_pods"
        ),
        "hyperpod-slurm": (
            "tests/submit/slurm/test_slurm_resize_real.py::test_nodes_come_from_another_allocation_and_go_back_to_slurm"
        ),
    },
    "`hp-ext move`: a node's ranks go to a spare, without a fault": {
        "local": "tests/faults/test_move.py::test_a_spare_gets_the_ranks_and_the_node_ends_while_the_others_train",
        "hyperpod-slurm": (
            "tests/submit/slurm/test_slurm_resize_real.py::"
            "test_the_ranks_of_a_node_move_to_a_spare_and_slurm_starts_nothing_more_there"
        ),
    },
    "`hp-ext report`: faults, goodput, where the time went": {
        "local": (
            "tests/submit/local/test_local_with_agent.py::"
            "test_a_job_ends_with_its_last_step_in_the_durable_tier_and_all_commands_say_so"
        ),
        "hyperpod-eks": (
            "tests/faults/test_hyperpodrun.py::test_a_killed_rank_costs_its_node_the_processes_and_nobody_a_step"
        ),
    },
    "`hp-ext top`: what each rank does now": {
        "local": "tests/cli/test_top.py::test_what_people_read",
    },
    "ranks that hang are found and replaced": {
        "local": "tests/faults/test_detection.py::test_a_rank_that_hangs_is_replaced_and_no_other_is",
    },
    "the job's secret is read by another user than root": {
        "hyperpod-eks": ("tests/runtime/detection/test_preflight.py::test_a_pod_reads_the_secret_through_its_fs_group"),
        "kubeflow": "tests/runtime/detection/test_preflight.py::test_a_pod_reads_the_secret_through_its_fs_group",
    },
    "faults are rehearsed (`chaos`)": {
        "local": (
            "tests/submit/local/test_local_with_agent.py::"
            "test_the_example_survives_its_fault_and_is_equal_to_the_undisturbed_run"
        ),
    },
    "numbers for Prometheus (`metrics`)": {
        "local": "tests/faults/test_metrics.py::test_a_kill_is_seen_in_the_numbers_of_the_job_that_goes_on",
    },
}
"""The test that shows a promise on a target."""


def test_the_page_says_what_validate_says(golden_part: Callable[[str, str, str], None]) -> None:
    golden_part(PAGE, "table", table())


def test_every_test_it_names_is_there(root: Path) -> None:
    named = {test for row in SHOWN.values() for test in row.values()}
    assert {
        test for test in named if test.partition("::")[2] not in _functions(root / test.partition("::")[0])
    } == set()


def test_what_a_target_cannot_do_no_test_shows() -> None:
    assert [(what, target) for what, row in SHOWN.items() for target in row if refusal(what, target)] == []


def refusal(what: str, target: str) -> str:
    """What `validate` says of a job that asks for it, and not of one that does not; or why it is not there. Empty:
    nothing."""
    if what in NOT_THERE:
        return NOT_THERE[what](target)
    new = [sentence for sentence in _said(LEAST | ASKED[what], target) if sentence not in _said(LEAST, target)]
    return " / ".join(new)


def table() -> str:
    """Rows, and the sentences they refer to."""
    sentences: dict[str, int] = {}
    lines = ["| | " + " | ".join(f"`{target}`" for target in TARGETS) + " |", "|---" * (len(TARGETS) + 1) + "|"]
    for what in (*ASKED, *NOT_THERE):
        cells = []
        for target in TARGETS:
            if said := refusal(what, target):
                cells.append(f"no ({sentences.setdefault(said, len(sentences) + 1)})")
            elif shown := SHOWN.get(what, {}).get(target):
                file, _, name = shown.partition("::")
                cells.append(f'[yes](../{file} "{name}")')
            else:
                cells.append("taken")
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"{number}. {said}" for said, number in sentences.items())]) + "\n"


def _refusal_of(find: Callable[[str], object], target: str) -> str:
    try:
        find(target)
    except UnsupportedError as error:
        return error.problems[0].message
    return ""


def _said(fields: dict[str, Any], target: str) -> list[str]:
    job = JobConfig.model_validate_json(json.dumps(fields))
    problems = [problem.message for problem in find_problems(job, None, target)]
    return problems + list(unused(job, target, get_target(target).capabilities()))


@cache
def _functions(file: Path) -> set[str]:
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}
