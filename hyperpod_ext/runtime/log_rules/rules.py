"""Rules on the output of rank 0, from a spec or from AWS's operator. Pure functions.

The input is log lines with their times; the output is the rule that is broken.

Rules are evaluated as in AWS's agent (`hyperpod_elastic_agent.logagent`), with one difference: after the job has
recovered from a fault, the time limit for the next match starts again.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from hyperpod_ext.config import budgets
from hyperpod_ext.errors import ConfigError, Problem

_COMPARES = {"gt": operator.gt, "gteq": operator.ge, "lt": operator.lt, "lteq": operator.le, "eq": operator.eq}
_LINE_CHARS = 200
"""Maximum number of characters of a log line that are quoted in the cause of a fault."""


class LogRule(BaseModel):
    """One rule. The field aliases are the names that AWS's operator uses."""

    name: str = Field(min_length=1)
    pattern: re.Pattern[str] = Field(alias="logPattern")
    stop_pattern: re.Pattern[str] | None = Field(None, alias="stopPattern")
    first_within_s: float | None = Field(None, alias="expectedStartCutOffInSeconds")
    every_s: float | None = Field(None, alias="expectedRecurringFrequencyInSeconds")
    threshold: float | None = Field(None, alias="metricThreshold")
    compare: str | None = Field(None, alias="operator", pattern="^(gt|gteq|lt|lteq|eq)$")
    data_points: int = Field(1, alias="metricEvaluationDataPoints")
    fault_on_match: bool = Field(False, alias="faultOnMatch")


def of_spec(rules: Iterable[budgets.LogRule]) -> list[LogRule]:
    """Return the rules of a spec in the form in which they are evaluated.

    Raises:
        ConfigError: a rule is invalid, which can only happen if the spec was not validated.
    """
    try:
        return read(
            {
                "name": rule.name,
                "logPattern": rule.pattern,
                "stopPattern": rule.stop_pattern,
                "expectedStartCutOffInSeconds": rule.first_within_s,
                "expectedRecurringFrequencyInSeconds": rule.every_s,
                "metricThreshold": rule.threshold,
                "operator": rule.operator,
                "metricEvaluationDataPoints": rule.data_points,
                "faultOnMatch": rule.fault_on_match,
            }
            for rule in rules
        )
    except ValueError as error:
        raise ConfigError([Problem(str(error), path="log_rules")]) from None


def read(rules: Iterable[Mapping[str, Any]]) -> list[LogRule]:
    """Parse rules in the form in which the operator sends them.

    Raises:
        ValueError: a rule is invalid. The error message lists all reasons.
    """
    found, wrong = list[LogRule](), list[str]()
    for index, rule in enumerate(rules):
        try:
            found.append(LogRule.model_validate(rule))
        except ValidationError as error:
            name = rule.get("name") or index
            wrong += [f"rule {name}: {'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
    if wrong:
        raise ValueError("; ".join(wrong))
    return found


@dataclass
class _Seen:
    """State of one rule: its last match, and whether the rule is broken."""

    rule: LogRule
    since: float
    """Time at which the job began or last continued, in seconds of the caller's clock."""
    matched_at: float | None = None
    line: str = ""
    """The last line that matched the rule's pattern."""
    slow: int = 0
    """Number of successive matches in which the matched number was beyond the threshold."""
    fault: bool = False
    over: bool = False
    """Whether the rule does not apply any more, because its stop pattern has matched."""

    def read(self, line: str, now: float) -> None:
        if self.over:
            return
        match = self.rule.pattern.match(line)
        if match is not None:
            self.matched_at, self.line = now, line
            self.fault = self.rule.fault_on_match
        if not self.fault and self.rule.stop_pattern is not None and self.rule.stop_pattern.match(line):
            self.over = True
        elif match is not None and match.groups():
            self._compare(match.group(1))

    def _compare(self, number: str | None) -> None:
        rule = self.rule
        if rule.threshold is None or rule.compare is None:
            return
        try:
            is_slow = _COMPARES[rule.compare](float(number or ""), rule.threshold)
        except ValueError:
            return  # the matched text is not a number
        self.slow = self.slow + 1 if is_slow else 0

    def problem(self, now: float) -> str:
        rule = self.rule
        if self.over:
            return ""
        if self.fault:
            return f"rank 0 printed {self.line[:_LINE_CHARS]!r}, which is a fault"
        if rule.first_within_s is not None and self.matched_at is None and now - self.since > rule.first_within_s:
            return f"rank 0 printed no line that matches within {rule.first_within_s:g} s"
        last = None if self.matched_at is None else max(self.matched_at, self.since)
        if rule.every_s is not None and last is not None and now - last > rule.every_s:
            return f"rank 0 printed no line that matches for {rule.every_s:g} s, after {self.line[:_LINE_CHARS]!r}"
        if self.slow >= rule.data_points:
            return f"{rule.compare} {rule.threshold:g}, {rule.data_points} times in a row: {self.line[:_LINE_CHARS]!r}"
        return ""


class LogRules:
    """Evaluates rules on one log. Times may come from any clock, but all calls must use the same clock.

    Time counts only while the job trains: from a call of `train` to the next call of `pause`.
    """

    def __init__(self, rules: Sequence[LogRule]) -> None:
        self._rules = [_Seen(rule, 0.0) for rule in rules]
        self._trains = False

    def __len__(self) -> int:
        return len(self._rules)

    def train(self, now: float) -> None:
        """Report that training begins or continues. From now on, matches in earlier lines do not count as faults."""
        self._trains = True
        for seen in self._rules:
            seen.since, seen.slow, seen.fault = now, 0, False

    def pause(self) -> None:
        """Report that ranks have left their step. No rule counts as broken until the next `train`."""
        self._trains = False

    def read(self, lines: Iterable[str], now: float) -> None:
        """Process new lines that rank 0 has printed."""
        for line in lines:
            for seen in self._rules:
                seen.read(line, now)

    def problem(self, now: float) -> str:
        """Return the name of the first broken rule, and how it is broken; empty if no rule is broken."""
        if not self._trains:
            return ""
        broken = (f"log rule {seen.rule.name}: {why}" for seen in self._rules if (why := seen.problem(now)))
        return next(broken, "")
