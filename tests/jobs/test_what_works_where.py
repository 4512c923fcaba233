"""docs/what-works-where.md: made from what `validate` says of each promise on each target; tests it names are there."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import UnsupportedError
from hyperpod_ext.jobs.contract import targets
from hyperpod_ext.jobs.contract.capabilities import unused
from hyperpod_ext.jobs.contract.targets import TARGETS, get_target
from hyperpod_ext.jobs.plan import find_problems

PAGE = "docs/what-works-where.md"
FILES = {"kind": "file-system", "id": "fs-0123456789abcdef0", "directory": "/fsx", "access": "rw"}
LEAST: dict[str, Any] = {
    "name": "a",
    "script": "train.py",
    "nodes": 2,
    "image": "repo/train:1",
    "scheduling": {"queue": "team-localqueue"},
    "volumes": [{"kind": "host", "path": "/x", "host_path": "/x"}],
    "sagemaker": {"channels": {"shared": FILES}},
}
"""A job that has what some promises need: a queue, and a directory that its nodes share."""


@dataclass(frozen=True)
class Column:
    """A target, and what starts the ranks there."""

    head: str
    target: str
    """Empty: no target renders it; a person starts it."""
    launcher: str
    """What starts the ranks, as the page says it."""
    test: str
    """That shows the launcher at work there."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Of a spec that is sent there with this launcher."""


COLUMNS = {
    "local": Column(
        "`local`",
        "local",
        "our agent",
        "tests/jobs/local/test_local_with_agent.py::"
        "test_the_example_survives_its_fault_and_is_equal_to_the_undisturbed_run",
    ),
    "hyperpodrun": Column(
        "`hyperpod-eks`, `hyperpodrun`",
        "hyperpod-eks",
        "AWS's real `hyperpodrun` 1.1.3, under a stand-in for the operator",
        "tests/faults/test_hyperpodrun.py::test_an_exception_is_met_in_process_at_the_operators_word",
        {"kubernetes": {"launcher": "hyperpodrun"}},
    ),
    "ours": Column(
        "`hyperpod-eks`, `ours`",
        "hyperpod-eks",
        "our agent, which serves the operator's calls, under the same stand-in",
        "tests/faults/test_operator_our_agent.py::"
        "test_what_a_rank_can_meet_is_mended_in_place_and_the_operator_sees_a_job_that_runs",
        {"kubernetes": {"launcher": "ours"}},
    ),
    "kubeflow": Column(
        "`kubeflow`",
        "kubeflow",
        "our agent, from the rendered pod",
        "tests/jobs/kubernetes/test_kubeflow_starts.py::test_two_nodes_start_all_ranks",
    ),
    "hyperpod-slurm": Column(
        "`hyperpod-slurm`",
        "hyperpod-slurm",
        "our agent, from the rendered file, on a real Slurm",
        "tests/jobs/slurm/test_slurm_real.py::"
        "test_a_job_runs_to_its_end_and_again_through_a_killed_step_with_the_same_losses",
    ),
    "sagemaker": Column(
        "`sagemaker`",
        "sagemaker",
        "our agent, as SageMaker starts a container",
        "tests/runtime/test_training_job.py::"
        "test_a_training_job_recovers_a_killed_worker_in_process_with_the_same_losses",
    ),
    "torchrun": Column(
        "`torchrun`, by hand",
        "",
        "torchrun, with `HPX_RUNTIME` and `HPX_SECRET_FILE` set; in mode `plain` targets set neither",
        "tests/faults/test_torchrun.py::"
        "test_an_exception_in_the_first_step_ends_no_process_and_the_last_one_is_durable",
    ),
}

EXCEPTION = "an exception is handled in the process"
DEATH = "a dead process is replaced, and other nodes keep their processes"
SPARE = "a spare node replaces a lost node"
BACK = "a node that replaces a lost node gets its ranks, and other nodes stay"
CONTINUES = "healthy ranks continue to train while a lost rank is replaced (`restart.policy: continue`)"
IN_PLACE = "elastic: fewer or more nodes, without a new process"
RESTARTED = "elastic: fewer or more nodes, with new processes"
MEMORY, PEER = "tier: this node's memory", "tier: a peer's memory"
PARITY = "tier: parity of a group of nodes"
FILE, S3, DISK = "tier: a shared directory", "tier: S3", "tier: the node's own disk"
MANAGED, CHECKPOINTLESS = "AWS's managed tier", "AWS's checkpointless recovery"
CHAOS, REPLAY = "rehearsed faults (`chaos`)", "faults of an earlier run are repeated (replay)"
ORDERED = "`hp-ext chaos`: a fault in a running job"
METRICS, LOG_RULES = "metrics for Prometheus (`metrics`)", "rules on the output (`log_rules`)"
RESIZE, MOVE = "`hp-ext resize` of a running job", "`hp-ext move`: moves a node's ranks to a spare, without a fault"
REPORT = "`hp-ext report`: faults, goodput, time by phase"
TOP = "`hp-ext top`: the current activity of each rank"
HANGS = "hanging ranks are found and replaced"
SECRET = "the job's secret can be read by a user other than root"

_MEMORY = {"kind": "memory"}
_ELASTIC = {"elastic": {"min_nodes": 1, "max_nodes": 3}}
ASKED: dict[str, dict[str, Any]] = {
    EXCEPTION: {},
    DEATH: {},
    SPARE: {"spares": 1},
    BACK: {},
    CONTINUES: {"restart": {"policy": "continue"}},
    IN_PLACE: _ELASTIC,
    RESTARTED: _ELASTIC,
    MEMORY: {"checkpoint": {"tiers": [_MEMORY]}},
    PEER: {"checkpoint": {"tiers": [_MEMORY, {"kind": "peer"}]}},
    PARITY: {"nodes": 3, "checkpoint": {"tiers": [_MEMORY, {"kind": "peer", "parity": 3}]}},
    FILE: {"checkpoint": {"tiers": [_MEMORY, {"kind": "file", "path": "/x"}]}},
    S3: {"checkpoint": {"tiers": [_MEMORY, {"kind": "s3", "uri": "s3://bucket/a"}]}},
    DISK: {"checkpoint": {"tiers": [_MEMORY, {"kind": "disk", "path": "/nvme"}]}},
    MANAGED: {"mode": "aws-managed-tier"},
    CHECKPOINTLESS: {"mode": "aws-checkpointless"},
    CHAOS: {"chaos": {"inject": [{"kind": "sigkill", "rank": 0, "step": 1}], "on_clusters": True}},
    ORDERED: {},
    REPLAY: {},
    METRICS: {"metrics": {"port": 9464}},
    LOG_RULES: {"log_rules": [{"name": "loss", "pattern": "loss", "every_s": 60}]},
    RESIZE: {},
    MOVE: {},
    REPORT: {},
    TOP: {},
    HANGS: {},
    SECRET: {},
}
"""What a job asks for, by the promise; nothing: no field of a spec asks for it."""

_IN_PLACE_ALREADY = "our agent keeps the processes when the number of nodes changes"
_NO_AGENT = "torchrun starts the ranks, without an agent of this project"
_NO_JOB = "hp-ext cannot find jobs that were started with torchrun by hand"
WHY_NOT: dict[str, dict[str, str]] = {
    DEATH: {"torchrun": "after a rank's death, torchrun restarts all processes, at most `--max-restarts` times"},
    SPARE: {"torchrun": "torchrun has no spare nodes that import the script's packages in advance"},
    BACK: {
        "sagemaker": "SageMaker does not replace a single node",
        "torchrun": "torchrun starts all processes again when a node leaves or joins",
    },
    CONTINUES: {"torchrun": "after a rank's death, torchrun restarts all processes, at most `--max-restarts` times"},
    IN_PLACE: {
        "hyperpodrun": "for a resize, `hyperpodrun` ends all processes and starts new ones",
        "torchrun": "torchrun starts all processes again when a node leaves or joins",
    },
    RESTARTED: {
        "local": _IN_PLACE_ALREADY,
        "ours": _IN_PLACE_ALREADY,
        "hyperpod-slurm": _IN_PLACE_ALREADY,
        "torchrun": "the job's settings fix the number of nodes: start the job again with other settings",
    },
    PARITY: {"torchrun": _NO_AGENT},
    CHAOS: {"torchrun": _NO_AGENT},
    ORDERED: {"torchrun": _NO_JOB},
    MANAGED: {"torchrun": "AWS offers this mode only on HyperPod with EKS"},
    CHECKPOINTLESS: {"torchrun": "AWS offers this mode only on HyperPod with EKS"},
    REPLAY: dict.fromkeys(COLUMNS, "no command repeats faults: write the faults of the report as `chaos.faults`"),
    LOG_RULES: {"torchrun": _NO_AGENT},
    RESIZE: {"torchrun": _NO_JOB},
    MOVE: {"torchrun": _NO_JOB},
    HANGS: {
        "hyperpodrun": "hangs are not detected, because `hyperpodrun` starts the ranks, not our agent: use `log_rules`",
        "torchrun": _NO_AGENT,
    },
}
"""Why not, where `validate` has nothing to say: no field of a spec asks for it, or it depends on the launcher."""


@dataclass(frozen=True)
class As:
    """What another column's test shows holds here too: the same code runs."""

    column: str


@dataclass(frozen=True)
class Rendered:
    """What is sent is held by a test; what AWS's own software makes of it was never run."""

    test: str


Shown = str | As | Rendered
_HYPERPODRUN = "tests/faults/test_hyperpodrun.py::"
_OUR_AGENT = "tests/faults/test_operator_our_agent.py::"
_TORCHRUN = "tests/faults/test_torchrun.py::"
_MENDED = f"{_OUR_AGENT}test_what_a_rank_can_meet_is_mended_in_place_and_the_operator_sees_a_job_that_runs"
_COMES_BACK = f"{_OUR_AGENT}test_a_lost_pod_comes_back_as_a_spare_into_the_generation_that_waits"
_KILLED = f"{_HYPERPODRUN}test_a_killed_rank_costs_its_node_the_processes_and_nobody_a_step"
_LAST_DURABLE = f"{_TORCHRUN}test_an_exception_in_the_first_step_ends_no_process_and_the_last_one_is_durable"
_OURS_ELASTIC = (
    "tests/faults/test_operator_ours_elastic.py::"
    "test_the_operator_stops_and_starts_and_resizes_a_job_whose_processes_stay"
)
_SLURM_ELASTIC = (
    "tests/jobs/slurm/test_slurm_resize_real.py::test_nodes_come_from_another_allocation_and_go_back_to_slurm"
)
_RENDERED = Rendered(
    "tests/jobs/kubernetes/test_hyperpod_eks.py::test_what_is_rendered_for_the_examples_is_what_the_repository_shows"
)
_EKS_RESIZE = (
    "tests/jobs/kubernetes/test_eks_resize.py::test_the_operator_gets_other_bounds_and_it_is_waited_for_its_pods"
)
_FROM_OUTSIDE = (
    "tests/jobs/kubernetes/test_life_of_pods.py::"
    "test_what_is_told_of_a_job_while_its_pods_live_and_after_they_are_deleted"
)
_NUMBERS = "tests/jobs/kubernetes/test_job_numbers.py::"
_KEPT = f"{_NUMBERS}test_places_do_without_any_cluster"
_LOCAL = As("local")
_BY_AGENT: dict[str, Shown] = {"ours": _LOCAL, "kubeflow": _LOCAL, "hyperpod-slurm": _LOCAL, "sagemaker": _LOCAL}
"""What our agent does by itself, whatever has started it."""
_EVERYWHERE: dict[str, Shown] = {**_BY_AGENT, "hyperpodrun": _LOCAL, "torchrun": _LOCAL}
"""What the memory server of a node does by itself."""
SHOWN: dict[str, dict[str, Shown]] = {
    EXCEPTION: {
        **_BY_AGENT,
        "local": "tests/faults/test_recovery.py::test_an_exception_on_one_rank_is_recovered_in_process",
        "hyperpodrun": COLUMNS["hyperpodrun"].test,
        "ours": _MENDED,
        "torchrun": _LAST_DURABLE,
    },
    DEATH: {
        **_BY_AGENT,
        "local": "tests/faults/test_recovery.py::test_a_rank_killed_by_its_agent_is_replaced_and_no_other_process_is",
        "hyperpodrun": _KILLED,
        "ours": _MENDED,
        "sagemaker": COLUMNS["sagemaker"].test,
    },
    SPARE: {
        "local": "tests/faults/test_nodes_lost.py::test_a_spare_takes_the_place_of_a_node_that_is_killed",
        "hyperpodrun": f"{_HYPERPODRUN}test_a_lost_node_is_replaced_by_the_spare",
        "ours": _COMES_BACK,
        "hyperpod-slurm": ("tests/jobs/slurm/test_slurm_real.py::test_a_spare_takes_the_ranks_of_a_node_that_is_lost"),
    },
    BACK: {
        "local": (
            "tests/faults/test_nodes_gone.py::test_an_agent_that_is_started_again_takes_the_place_of_the_lost_node"
        ),
        "hyperpodrun": f"{_HYPERPODRUN}test_a_lost_node_is_replaced_by_the_spare",
        "ours": _COMES_BACK,
        "kubeflow": (
            "tests/jobs/kubernetes/test_kubeflow_pod_back.py::"
            "test_a_pod_that_is_started_again_gets_its_ranks_and_the_others_stay"
        ),
        "hyperpod-slurm": _SLURM_ELASTIC,
    },
    CONTINUES: {
        "local": (
            "tests/faults/test_continue.py::test_three_of_four_ranks_make_the_next_steps_and_the_fourth_joins_them"
        ),
        "ours": (
            "tests/faults/test_operator_continue.py::"
            "test_the_other_pods_train_on_while_the_operator_replaces_a_lost_one"
        ),
        **dict.fromkeys(("kubeflow", "hyperpod-slurm", "sagemaker"), _LOCAL),
    },
    IN_PLACE: {
        "local": "tests/faults/test_resize.py::test_two_four_three_one_four",
        "ours": _OURS_ELASTIC,
        "hyperpod-slurm": _SLURM_ELASTIC,
    },
    RESTARTED: {
        "hyperpodrun": "tests/faults/test_operator_elastic.py::test_graceful_shrink_and_grow_cost_no_step_and_no_bit",
    },
    MEMORY: {
        **_BY_AGENT,
        "local": "tests/faults/test_recovery.py::test_state_torn_on_every_rank_comes_back_from_memory",
        "hyperpodrun": _KILLED,
        "ours": _OURS_ELASTIC,
        "sagemaker": COLUMNS["sagemaker"].test,
        "torchrun": f"{_TORCHRUN}test_a_death_is_torchruns_and_state_comes_from_the_nodes_memory",
    },
    PEER: {
        **_BY_AGENT,
        "local": (
            "tests/faults/test_nodes_gone.py::"
            "test_copies_in_other_nodes_memory_survive_the_loss_of_a_node_and_are_made_again"
        ),
        "hyperpodrun": (
            "tests/faults/test_operator_elastic.py::test_shards_of_a_pod_that_leaves_are_in_its_peers_memory"
        ),
        "ours": _COMES_BACK,
        "torchrun": As("hyperpodrun"),
    },
    PARITY: {
        **_BY_AGENT,
        "local": (
            "tests/faults/test_nodes_gone.py::"
            "test_a_lost_node_of_a_parity_group_is_rebuilt_at_a_spare_and_so_is_the_next"
        ),
    },
    FILE: {
        **_BY_AGENT,
        "local": "tests/faults/test_checkpoint_nodes.py::test_a_lost_pair_is_restored_from_the_durable_tier",
        "hyperpodrun": COLUMNS["hyperpodrun"].test,
        "torchrun": _LAST_DURABLE,
    },
    DISK: {
        "local": "tests/faults/test_disk.py::test_shards_come_back_from_the_disks_bit_for_bit",
        "ours": _LOCAL,
        "kubeflow": _LOCAL,
        "hyperpod-slurm": _LOCAL,
        "torchrun": f"{_TORCHRUN}test_a_job_whose_processes_have_all_ended_resumes_from_the_nodes_disk",
        "hyperpodrun": As("torchrun"),
    },
    S3: {
        **_EVERYWHERE,
        "local": "tests/faults/test_checkpoint_s3.py::test_what_is_drained_and_restored_in_bad_weather_is_whole",
    },
    MANAGED: {"hyperpodrun": _RENDERED},
    CHECKPOINTLESS: {"hyperpodrun": _RENDERED},
    CHAOS: {**_BY_AGENT, "local": COLUMNS["local"].test, "hyperpodrun": _FROM_OUTSIDE, "ours": _FROM_OUTSIDE},
    ORDERED: {
        "local": "tests/cli/test_chaos.py::test_faults_are_inflicted_while_the_job_runs_and_told_afterwards",
        "hyperpodrun": _FROM_OUTSIDE,
        "ours": _FROM_OUTSIDE,
    },
    METRICS: {
        **_BY_AGENT,
        "local": "tests/faults/test_metrics.py::test_a_kill_is_seen_in_the_numbers_of_the_job_that_goes_on",
        "hyperpodrun": _FROM_OUTSIDE,
        "ours": _FROM_OUTSIDE,
        "torchrun": As("hyperpodrun"),
    },
    LOG_RULES: {
        **_BY_AGENT,
        "local": (
            "tests/faults/test_detection.py::"
            "test_a_rank_0_that_breaks_a_rule_on_what_it_prints_is_replaced_and_no_other_is"
        ),
        "hyperpodrun": (
            "tests/runtime/log_rules/test_log_rules.py::test_aws_agent_finds_the_same_wrong_at_the_same_line"
        ),
        "ours": f"{_OUR_AGENT}test_a_rank_that_breaks_a_log_rule_of_the_operator_is_replaced_in_place",
    },
    RESIZE: {
        "local": "tests/faults/test_resize.py::test_two_four_three_one_four",
        "hyperpodrun": _EKS_RESIZE,
        "ours": _EKS_RESIZE,
        "hyperpod-slurm": _SLURM_ELASTIC,
    },
    MOVE: {
        "local": "tests/faults/test_move.py::test_a_spare_gets_the_ranks_and_the_node_ends_while_the_others_train",
        "hyperpod-slurm": (
            "tests/jobs/slurm/test_slurm_resize_real.py::"
            "test_the_ranks_of_a_node_move_to_a_spare_and_slurm_starts_nothing_more_there"
        ),
    },
    REPORT: {
        "local": (
            "tests/jobs/local/test_local_with_agent.py::"
            "test_a_job_ends_with_its_last_step_in_the_durable_tier_and_all_commands_say_so"
        ),
        "hyperpodrun": _FROM_OUTSIDE,
        "ours": _FROM_OUTSIDE,
        "kubeflow": COLUMNS["kubeflow"].test,
        "hyperpod-slurm": _LOCAL,
        "sagemaker": As("ours"),
        "torchrun": As("hyperpodrun"),
    },
    TOP: {
        "local": "tests/cli/test_top.py::test_what_people_read",
        "hyperpodrun": _FROM_OUTSIDE,
        "ours": _FROM_OUTSIDE,
        "kubeflow": As("ours"),
        "hyperpod-slurm": _LOCAL,
        "sagemaker": _KEPT,
        "torchrun": _KEPT,
    },
    HANGS: {
        **_BY_AGENT,
        "local": "tests/faults/test_detection.py::test_a_rank_that_hangs_is_replaced_and_no_other_is",
        "ours": _MENDED,
    },
    SECRET: {
        "local": "tests/jobs/local/test_local_secret.py::test_only_its_owner_may_read_it_and_it_is_long_enough",
        "hyperpodrun": "tests/faults/test_pods_of_users.py::test_a_pod_of_the_operator_trains_as_user_1000",
        "ours": "tests/faults/test_pods_of_users.py::test_a_pod_of_the_operator_trains_as_user_1000",
        "kubeflow": "tests/faults/test_pods_of_users.py::test_our_agent_trains_as_user_1000_in_a_pod_of_kubeflow",
        "hyperpod-slurm": _LOCAL,
        "sagemaker": COLUMNS["sagemaker"].test,
        "torchrun": _LOCAL,
    },
}
"""What shows a promise in a column."""


_FOUND_BY: dict[str, Callable[[str], object]] = {
    RESIZE: targets.RESIZE.of,
    MOVE: targets.MOVE.of,
    ORDERED: targets.FAULTS.of,
}
"""Promises that a command keeps, and what it finds for a target, or refuses."""


def test_the_page_says_what_validate_says(golden_part: Callable[[str, str, str], None]) -> None:
    golden_part(PAGE, "columns", columns())
    golden_part(PAGE, "table", table())


def test_every_target_and_launcher_has_a_column() -> None:
    launchers = JobConfig.model_fields["kubernetes"].annotation.model_fields["launcher"].annotation  # type: ignore[union-attr]
    there = {(column.target, column.fields.get("kubernetes", {}).get("launcher")) for column in COLUMNS.values()}
    eks = {("hyperpod-eks", launcher) for launcher in launchers.__args__}  # type: ignore[union-attr]
    assert there - {("", None)} == eks | {(target, None) for target in TARGETS if target != "hyperpod-eks"}


def test_every_test_it_names_is_there(root: Path) -> None:
    named = {shown for row in SHOWN.values() for shown in row.values() if isinstance(shown, str)}
    named |= {shown.test for row in SHOWN.values() for shown in row.values() if isinstance(shown, Rendered)}
    named |= {column.test for column in COLUMNS.values()}
    assert {
        test for test in named if test.partition("::")[2] not in _functions(root / test.partition("::")[0])
    } == set()


def test_each_cell_has_a_test_or_a_reason_and_never_both() -> None:
    cells = [(what, column) for what in ASKED for column in COLUMNS]
    refused = {cell: bool(refusal(*cell)) for cell in cells}
    neither = [
        f"{column}: {what}" for what, column in cells if not refused[what, column] and _test_of(what, column) is None
    ]
    assert not neither, "these cells have neither a test nor a reason:\n" + "\n".join(neither)
    shown = [cell for cell in cells if SHOWN.get(cell[0], {}).get(cell[1]) is not None]
    both = [f"{column}: {what}" for what, column in shown if refused[what, column]]
    assert not both, "these cells have a test and a reason:\n" + "\n".join(both)


def refusal(what: str, column: str) -> str:
    """What `validate` says of a job that asks for it, and not of one that does not; or why else it is not there. Empty:
    it is."""
    its = COLUMNS[column]
    if what in _FOUND_BY and its.target:
        return _refusal_of(_FOUND_BY[what], its.target)
    why = WHY_NOT.get(what, {}).get(column, "")
    if not its.target or not ASKED[what]:
        return why
    without = _said(LEAST | its.fields, its.target)
    said = [one for one in _said(LEAST | its.fields | ASKED[what], its.target) if one not in without]
    return " / ".join(said) or why


def columns() -> str:
    """What starts the ranks in each column."""
    lines = ["| | what starts the ranks |", "|---|---|"]
    lines += [f"| {one.head} | {one.launcher}: {_link('test', one.test)} |" for one in COLUMNS.values()]
    return "\n".join(lines) + "\n"


def table() -> str:
    """Rows, and the sentences they refer to."""
    sentences: dict[str, int] = {}
    heads = [column.head for column in COLUMNS.values()]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for what in ASKED:
        cells = []
        for column in COLUMNS:
            if said := refusal(what, column):
                cells.append(f"no ({sentences.setdefault(said, len(sentences) + 1)})")
                continue
            match SHOWN[what][column]:
                case As(other):
                    words = f"as {COLUMNS[other].head.rpartition(', ')[2]}"
                case Rendered():
                    words = "rendered"
                case _:
                    words = "yes"
            cells.append(_link(words, _test_of(what, column) or ""))
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"{number}. {said}" for said, number in sentences.items())]) + "\n"


def _test_of(what: str, column: str) -> str | None:
    match SHOWN.get(what, {}).get(column):
        case As(other):
            return _test_of(what, other)
        case Rendered(test):
            return test
        case test:
            return test


def _link(words: str, test: str) -> str:
    file, _, name = test.partition("::")
    return f'[{words}](../{file} "{name}")'


def _refusal_of(find: Callable[[str], object], target: str) -> str:
    try:
        find(target)
    except UnsupportedError as error:
        return error.problems[0].message
    return ""


def _said(fields: Mapping[str, Any], target: str) -> list[str]:
    job = JobConfig.model_validate_json(json.dumps(fields))
    problems = [problem.message for problem in find_problems(job, None, target)]
    return problems + list(unused(job, target, get_target(target).capabilities()))


@cache
def _functions(file: Path) -> set[str]:
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}
