"""Rules on what rank 0 prints: what they find wrong, and that AWS's agent finds the same."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import hyperpodrun_env
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.jobs.kubernetes.hyperpod_eks_render import log_rule
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.log_rules.rules import LogRules, of_spec, read
from hyperpod_ext.runtime.log_rules.watch import LogWatch

LOSS = {"name": "loss", "logPattern": r"loss: ([0-9.]+|nan)"}


def rules(**more: Any) -> LogRules:
    made = LogRules(read([LOSS | more]))
    made.train(0.0)
    return made


def test_a_first_match_must_come_and_the_next_ones_must_follow() -> None:
    made = rules(expectedStartCutOffInSeconds="10", expectedRecurringFrequencyInSeconds=5)
    assert made.problem(10.0) == ""
    assert made.problem(10.1) == "log rule loss: rank 0 printed no line that matches within 10 s"
    made.read(["loss: 1"], 11.0)
    assert made.problem(16.0) == ""
    assert made.problem(16.1) == "log rule loss: rank 0 printed no line that matches for 5 s, after 'loss: 1'"


def test_seconds_in_which_the_job_does_not_train_do_not_count_and_a_fault_is_met_once() -> None:
    made = rules(expectedRecurringFrequencyInSeconds=5, faultOnMatch=False)
    made.read(["loss: 1"], 1.0)
    made.pause()
    assert made.problem(100.0) == ""
    made.train(100.0)
    assert made.problem(105.0) == ""
    assert "for 5 s" in made.problem(105.1)
    faults = rules(faultOnMatch=True)
    faults.read(["loss: 1"], 1.0)
    assert faults.problem(1.0) == "log rule loss: rank 0 printed 'loss: 1', which is a fault"
    faults.train(2.0)
    assert faults.problem(2.0) == ""


def test_a_number_must_be_wrong_several_times_in_a_row() -> None:
    made = rules(metricThreshold=2.5, operator="gt", metricEvaluationDataPoints=2)
    for line, wrong in (
        ("loss: 3", False),
        ("loss: 2", False),
        ("loss: 3", False),
        ("other", False),
        ("loss: 4", True),
    ):
        made.read([line], 1.0)
        assert bool(made.problem(1.0)) is wrong, line
    assert made.problem(1.0) == "log rule loss: gt 2.5, 2 times in a row: 'loss: 4'"


def test_after_a_line_that_ends_a_rule_it_is_applied_no_more() -> None:
    made = rules(expectedStartCutOffInSeconds=1, stopPattern="done", faultOnMatch=True)
    made.read(["done", "loss: 1"], 0.5)
    assert made.problem(100.0) == ""


def test_rules_that_are_none_are_named_all_at_once() -> None:
    wrong = [{"name": "a", "logPattern": "("}, LOSS, {"logPattern": "x", "operator": "near"}]
    with pytest.raises(ValueError, match=r"^rule a: logPattern: .*; rule 2: name: .*; rule 2: operator: "):
        read(wrong)


class Job:
    """A log that grows, and what was found in it."""

    def __init__(self, tmp_path: Any, is_here: Callable[[], bool] = lambda: True, **rule: Any) -> None:
        self.log, self.found = tmp_path / "rank0.log", list[str]()
        self.watch = LogWatch(LogRules(read([LOSS | rule])), self.log, self.found.append, is_here)

    def prints(self, text: str) -> None:
        with self.log.open("a") as log:
            log.write(text)

    def look(self) -> None:
        """As its thread does now and then."""
        self.watch._look()


def test_what_is_printed_in_parts_is_read_whole_and_told_once_until_the_job_goes_on(tmp_path: Any) -> None:
    job = Job(tmp_path, faultOnMatch=True)
    job.watch.hear(c.GoOn(generation=1, step=0))
    job.look()
    job.prints("first\nlo")
    job.look()
    job.prints("ss: 1")
    job.look()
    assert job.found == []
    job.prints("\nloss: 2\n")
    job.look()
    job.look()
    assert job.found == ["log rule loss: rank 0 printed 'loss: 2', which is a fault"]
    job.prints("loss: 3\n")  # by the process that is being ended
    job.watch.hear(c.AbortGeneration(generation=2, rank=0))
    job.watch.hear(c.GoOn(generation=2, step=0))
    job.look()
    assert len(job.found) == 1
    job.prints("loss: 4\n")
    job.look()
    assert job.found[1:] == ["log rule loss: rank 0 printed 'loss: 4', which is a fault"]


def test_a_rule_of_a_spec_is_that_of_the_operator() -> None:
    """As it is rendered for AWS's operator, and as our agent has it."""
    rule = {"name": "loss", "pattern": "loss: ([0-9.]+)", "stop_pattern": "done", "first_within_s": 60, "every_s": 30}
    rule |= {"threshold": 2.5, "operator": "gt", "data_points": 3, "fault_on_match": True}
    job = JobConfig.model_validate_json(json.dumps({"name": "a", "script": "a.py", "log_rules": [rule]}))
    assert of_spec(RuntimeConfig.of(job).log_rules) == read([log_rule(job, 0)])
    told = json.loads(RuntimeConfig.of(job).model_dump_json())
    assert of_spec(RuntimeConfig.from_json(json.dumps(told)).log_rules) == read([log_rule(job, 0)])
    assert "log_rules" not in json.loads(RuntimeConfig(name="a", nodes=1, workers_per_node=1).model_dump_json())


def test_a_log_of_a_rank_0_elsewhere_is_left_alone(tmp_path: Any) -> None:
    here = False
    job = Job(tmp_path, lambda: here, faultOnMatch=True)
    job.watch.hear(c.GoOn(generation=1, step=0))
    job.prints("loss: 1\n")
    job.look()
    assert job.found == []
    here = True  # it has come, and the job goes on: what was printed before is no fault
    job.watch.hear(c.GoOn(generation=2, step=0))
    job.look()
    assert job.found == []
    job.prints("loss: 2\n")
    job.look()
    assert job.found == ["log rule loss: rank 0 printed 'loss: 2', which is a fault"]


# --- beside AWS's agent -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    """Their module, which needs nothing but Python."""
    (file,) = (
        hyperpodrun_env.hyperpodrun()
        .parents[1]
        .glob("lib/*/site-packages/hyperpod_elastic_agent/logagent/log_agent.py")
    )
    spec = importlib.util.spec_from_file_location("their_log_agent", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NAMED = {"name": st.just("loss"), "logPattern": st.sampled_from([r"loss: ([0-9.]+|nan|none)", "loss", "(loss: )?"])}
TIMES = {"expectedStartCutOffInSeconds": st.integers(1, 6), "expectedRecurringFrequencyInSeconds": st.integers(1, 6)}
NUMBERS = {
    "metricThreshold": st.integers(0, 3),
    "operator": st.sampled_from(["gt", "gteq", "lt", "lteq", "eq"]),
    "metricEvaluationDataPoints": st.integers(1, 3),
}
ENDS = {"stopPattern": st.sampled_from(["done", "loss: 0"]), "faultOnMatch": st.booleans()}
RULE = st.one_of(
    st.fixed_dictionaries(NAMED | TIMES, optional=ENDS),
    st.fixed_dictionaries(NAMED | {"logPattern": st.just(LOSS["logPattern"])} | NUMBERS),
    st.fixed_dictionaries(NAMED, optional=NUMBERS | TIMES | ENDS),
)
LINE = st.one_of(
    st.builds("loss: {}".format, st.sampled_from(["0", "1", "2.5", "3", "nan", "none"])), st.sampled_from(["done", "x"])
)


@settings(max_examples=300, deadline=None)
@given(rule=RULE, lines=st.lists(st.tuples(st.integers(0, 6), LINE), max_size=12))
def test_aws_agent_finds_the_same_wrong_at_the_same_line(
    theirs: ModuleType, rule: dict[str, Any], lines: list[tuple[int, str]]
) -> None:
    now = [100.0]
    theirs.time = SimpleNamespace(time=lambda: now[0])
    their_rule = theirs.LogEvaluator(rule)
    made = LogRules(read([rule]))
    made.train(now[0])
    for seconds, line in lines:
        now[0] += seconds
        try:
            state = their_rule.evaluate(line)[0].value
        except (ValueError, TypeError):  # no number: their agent logs it, and keeps its state
            state = their_rule._state.value
        made.read([line], now[0])
        why = made.problem(now[0])
        assert bool(why) == (state in ("HANGING", "SLOW", "FAULTED")), (state, why)
        if why:
            part = {"HANGING": "no line that matches", "SLOW": "in a row", "FAULTED": "which is a fault"}[state]
            assert part in why
            return
