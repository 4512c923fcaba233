"""The reference of the rules (HPX numbers) and of the exit codes."""

from __future__ import annotations

import inspect
from typing import Any

from hyperpod_ext import errors
from hyperpod_ext.clusters.checks import all_checks
from hyperpod_ext.config.files.check_texts import TEXTS
from hyperpod_ext.config.files.rule import Rule
from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.jobs.rules import all_rules


def rules_page() -> str:
    """Return the reference page of all rules."""
    checks: dict[str, Rule[Any]] = {
        name: Rule(name, "error", *texts, look=lambda _: iter(())) for name, texts in sorted(TEXTS.items())
    }
    jobs, clusters = all_rules(), all_checks()
    parts = [
        "# Rules",
        "Each rule is a check of a spec that `hp-ext validate`, `hp-ext render` and `hp-ext create-job` run. An error "
        "stops the command; a warning does not, unless the command has `--strict`. `--ignore HPX101` skips a rule from "
        "HPX101 on. `hp-ext explain HPX101` shows the text of one rule.",
        f"This version has {len(checks) + len(jobs) + len(clusters)} rules.",
    ]
    for title, rules in (("Every job spec", checks), ("Job specs", jobs), ("Cluster specs", clusters)):
        parts.append(f"## {title}")
        parts += [_rule(one) for one in rules.values()]
    return "\n\n".join(parts) + "\n"


def _rule(rule: Rule[Any]) -> str:
    return f"### {rule.id}: {rule.title} {{#{rule.id}}}\n\n**{rule.severity.capitalize()}.** {rule.cause}\n\n{rule.fix}"


MEANINGS = {
    0: ("The command is done.", ""),
    1: ("Another error, for example of the file system.", "Read the message."),
    2: ("The command line is wrong: an unknown command or option.", "Read the command's `--help`."),
    3: ("The spec or another input is invalid.", "Fix the listed problems; each has its line."),
    4: ("A service or node could not be reached, or refused the request.", "Run `hp-ext doctor`."),
    5: ("A name or port is in use, or the object has changed.", "Choose another name, or delete the old job."),
    6: ("The job, checkpoint, cluster or node does not exist.", "List what exists, for example with `hp-ext list`."),
    7: ("The job failed.", "Read the job's last message and `hp-ext report`."),
    8: ("The time limit of a wait ended. The job continues.", "Wait again, with a longer `--timeout`."),
    10: (
        "`hp-ext diff --exit-code` found differences, or `hp-ext cluster diff` found a resource that would be replaced "
        "or deleted.",
        "Read the differences.",
    ),
    11: (
        "`hp-ext cluster diff --exit-code` found changes, but no resource would be replaced or deleted.",
        "Read the changes.",
    ),
    130: ("Ctrl-C interrupted the command.", ""),
}
"""Meaning of each exit code, and the next step."""


def exit_codes() -> set[int]:
    """Return the exit codes of all errors of this project."""
    return {one.exit_code for one in errors_by_name().values()}


def errors_by_name() -> dict[str, type[HyperpodExtError]]:
    """Return the classes of all errors of this project, by name."""
    classes: list[tuple[str, type[Any]]] = inspect.getmembers(errors, inspect.isclass)
    return {name: one for name, one in classes if issubclass(one, HyperpodExtError)}


def exit_codes_page() -> str:
    """Return the reference page of the exit codes of `hp-ext`."""
    names: dict[int, list[str]] = {}
    for name, one in errors_by_name().items():
        names.setdefault(one.exit_code, []).append(f"`{name}`")
    rows = [
        f"| {code} | {meaning} | {', '.join(names.get(code, []))} | {step} |"
        for code, (meaning, step) in MEANINGS.items()
    ]
    head = "| exit code | meaning | `code` in JSON | next step |\n|---|---|---|---|"
    text = (
        "# Exit codes\n\nEvery `hp-ext` command ends with one of these exit codes. With `-o json`, an error is one "
        "JSON object with the fields `code`, `exit_code`, `message` and `hint`; `ConfigError` also has `problems`, a "
        "list with the path, line, message, hint and rule of each mistake.\n\n"
    )
    rest = (
        "\n\n[How a rank ends, and the result](../faults.md#how-a-rank-ends-and-the-result) lists the exit codes of "
        "a job by the way in which its ranks end.\n"
    )
    return text + head + "\n" + "\n".join(rows) + rest
