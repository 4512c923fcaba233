"""docs/errors.md: the recorded errors, and the texts of those that no case provokes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from observed.record import recorded
from observed.refusals import Refusal, refusals

AREAS = (
    "Job spec",
    "Rules for jobs",
    "Targets",
    "Overlays",
    "Clusters",
    "Deployment of clusters",
    "Imports",
    "Commands",
    "Checkpoints",
    "Data",
)
"""Areas with provoked errors, in the order of the page."""

_HEAD = """\
# Error messages

This page is generated. It has {provoked} messages that a test provoked, with the mistake, the exit code and the whole
text. {more} further messages follow with the text of the source; no test provoked them for this page.

A message names the file, the line and the field; then the mistake; then, in brackets or after `hint:`, the fix.
`[HPX103]` at the end is the rule that found the mistake: `hp-ext explain HPX103` shows its reason, and
`--ignore HPX103` switches the rule off (only rules from HPX101 on). To find a message, search this page for a part of
it without names and numbers.

| exit code | meaning |
|---|---|
| 0 | done; a warning changes nothing |
| 1 | other error, for example a missing package or a full disk |
| 2 | wrong usage of the command line |
| 3 | a spec, file or option is wrong, or the target does not support it |
| 4 | an endpoint cannot be reached, or refuses the request; with "may", it is unknown whether the request succeeded |
| 5 | conflict: a name, port or folder is in use |
| 6 | a job, file, checkpoint or name was not found |
| 7 | the job failed, or data or a checkpoint is damaged |
| 8 | a wait ended before the job |
| 130 | Ctrl-C |

## Provoked messages

The line with `#` is the mistake, with the exit code in brackets.
"""
_REST = """\
## Messages from the source

The tests of this page did not provoke these messages: most need a running job, a cluster or an account. Words in
braces stand for values; `a | b` stands for one of two texts. The number in brackets is the exit code of a process that
ends with the message; some are only in a log.
"""
_FILES = (
    ("Checkpoints in a job", ("runtime/checkpoint/", "runtime/storage/", "runtime/snapshot/", "runtime/dcp/")),
    ("Data in a job", ("runtime/data/",)),
    ("Objects and state of the script", ("runtime/state/", "runtime/training/", "runtime/scripts/")),
    ("Reproducible sums", ("runtime/reproducible/",)),
    ("Trainers' adapters", ("integrations/",)),
    ("AWS's packages (`compat`)", ("compat/",)),
    ("Memory servers", ("runtime/memory_server/",)),
    ("Start and end of a job, its nodes and processes", ("hyperpod_ext/runtime/",)),
    ("Commands and specs", ("cli/", "hyperpod_ext/config/", "hyperpod_ext/planner/", "hyperpod_ext/")),
)
"""Sections of texts from the source, by beginnings or parts of file names. The first that fits is taken."""
_PLACES = (
    ("Kubernetes", "jobs/kubernetes/"),
    ("Slurm", "jobs/slurm/"),
    ("SageMaker", "jobs/sagemaker/"),
    ("Clusters and their deployment", "clusters/"),
    ("Jobs", "hyperpod_ext/jobs/"),
)


def page() -> str:
    """The whole page."""
    found = recorded("errors")
    rest = _not_provoked(found)
    parts = [_HEAD.format(provoked=len(found), more=len(rest))]
    for area in AREAS:
        parts.append(f"### {area}\n\n" + _fence(_provoked_in(area, found)))
    parts.append(_REST)
    for title, refused in _by_title(rest):
        parts.append(f"### {title}\n\n" + _fence(f"[{one.code}] {one.text}" for one in refused))
    return "\n".join(parts)


def _provoked_in(area: str, found: dict[str, Any]) -> Iterator[str]:
    for key, shown in found.items():
        if key.startswith(f"{area}: "):
            yield "\n".join([f"# [{shown['code']}] {key.removeprefix(f'{area}: ')}", *shown["says"]])


def _fence(entries: Iterator[str]) -> str:
    return "```text\n" + "\n\n".join(entries).replace("```", "'''") + "\n```\n"


def _not_provoked(found: dict[str, Any]) -> list[Refusal]:
    """Texts from the source that fit no recorded message; each once."""
    lines = "\n".join(line for shown in found.values() for line in shown["says"])
    seen: dict[str, Refusal] = {}
    for one in refusals():
        literal = [part for part in re.split(r"\{[^}]*\}", one.text.partition("\n")[0]) if part]
        pattern = ".*".join(map(re.escape, literal))
        if not re.search(pattern, lines):
            seen.setdefault(one.text, one)
    return list(seen.values())


def _by_title(rest: list[Refusal]) -> Iterator[tuple[str, list[Refusal]]]:
    titles = [title for title, _ in (*_FILES, *_PLACES)]
    grouped: dict[str, list[Refusal]] = {title: [] for title in titles}
    for one in rest:
        places = ((title, (part,)) for title, part in _PLACES)
        title = next(title for title, parts in (*places, *_FILES) if any(part in one.file for part in parts))
        grouped[title].append(one)
    yield from ((title, found) for title, found in grouped.items() if found)
