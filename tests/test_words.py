"""Names of the product use the field's words: docs/glossary.md says which of ours stay, and where."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

WORDS = {
    "ailment": "unhealthy",
    "alike": "replicated, same",
    "beside": "overlapped, neighbour",
    "board": "exchange",
    "brief": "summary",
    "calm": "quiet, without faults",
    "claims": "fences",
    "coming": "joining",
    "commander": "actions",
    "council": "restore coordinator",
    "courtesy": "CPU priority",
    "crowd": "load",
    "cutting": "aborting",
    "dismiss": "release",
    "door": "election",
    "drained": "uploaded",
    "draining": "uploading",
    "fate": "exit cause",
    "forgotten": "lost wake-up",
    "freed": "aborted",
    "greeted": "handshake done",
    "greeting": "handshake",
    "halted": "stopped",
    "hearing": "reports",
    "hello": "handshake",
    "homecoming": "final upload",
    "hurry": "unthrottle",
    "ill": "unhealthy",
    "inquest": "hang query",
    "keeper": "supervisor",
    "ladder": "escalation",
    "leaver": "departing node",
    "leavers": "departing nodes",
    "lifeline": "liveness lock",
    "newcomer": "joining node",
    "newcomers": "joining nodes",
    "noted": "recorded",
    "outlook": "estimate",
    "pace": "rate limit",
    "patience": "timeout",
    "pulse": "heartbeat",
    "retire": "decommission",
    "retired": "decommissioned",
    "retune": "tune",
    "roster": "members",
    "rung": "escalation level",
    "rungs": "escalation levels",
    "said": "what it is: answers, output, ...",
    "settle": "what it does",
    "settled": "what it does",
    "settling": "retained",
    "standing": "memberships",
    "stood": "stepped down",
    "streamed": "non-temporal",
    "stretch": "interval",
    "strike": "inject",
    "struck": "hit",
    "survey": "inventory",
    "teller": "span builder",
    "told": "what it is: reported, answer, ...",
    "unharmed": "safe to commit",
    "vacant": "unassigned",
    "verdict": "reason",
    "victim": "target",
    "victims": "targets",
    "ways": "scenarios",
    "whole": "complete, consistent, sealed",
    "zygote": "fork server",
}
"""Words that no name has as a part, each with the one to use."""

NAMES = {
    "Board": "StoreExchange",
    "Boundary": "StopAtStep",
    "Change": "what changes: ResourceChange, ...",
    "Delivery": "Upload",
    "Dismiss": "Release",
    "Door": "ElectionListener",
    "Drain": "Uploader",
    "Due": "UploadQueue",
    "Epoch": "RendezvousRound",
    "Fetcher": "RestoreCache",
    "Forgotten": "LostWakeupMonitor",
    "Line": "CoordinatorClient, CostItem, ...",
    "Lost": "StuckWait",
    "Moment": "StatusUpdate",
    "Ordered": "PendingResize",
    "Part": "what it is a part of",
    "Place": "what has its place: OfferKey, ShardKey, ...",
    "Record": "JobState, SaveRecord, ...",
    "Retire": "Decommission",
    "Story": "EventText",
    "Taken": "CapturedState",
    "Told": "DataPositions",
    "Watch": "HangMonitor, MutationCheck, ...",
    "Way": "Scenario",
    "Whole": "ConsistentStep",
    "Work": "UploadTask",
    "World": "JobNodes",
    "Worlds": "Rescaling",
    "_board": "_exchange",
    "_claim": "_fence",
    "_council": "_restore_coordinator",
    "_cut": "abort, split, shard",
    "_door": "_election",
    "_give_way": "yield, step down",
    "_home": "_final_upload",
    "_signs": "_heartbeats",
    "_taken": "captured, reserved",
    "cut": "abort, split, shard",
    "give_way": "yield",
    "is_cut": "is_sharded",
    "taken": "captured, used, accepted",
    "way": "scenario",
}
"""Whole names of classes, functions and attributes; their words are common ones, and mean nothing private elsewhere."""

FOLDERS = ("hyperpod_ext", "cli", "cdk", "examples")
TEXT = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
KEPT = re.compile(r"^\| `(?P<name>[^`]+)` \| (?P<where>[^|]+) \|", re.MULTILINE)
"""A row of the glossary's last table: a name that stays, and the folders in which it does; `everywhere`."""


def kept(glossary: str) -> dict[str, tuple[str, ...]]:
    """Names that stay, and where."""
    return {
        row["name"]: () if row["where"].strip() == "everywhere" else tuple(re.findall(r"`([^`]+)`", row["where"]))
        for row in KEPT.finditer(glossary[glossary.index("## Names that stay") :])
    }


FORMER = {"was", "fields_were"}
"""What an event's declaration says of its names in logs of earlier versions."""


def walk(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node, but for declarations of former names."""
    match tree:
        case ast.Assign(targets=[ast.Name(id=name)]) if name in FORMER:
            return
    yield tree
    for child in ast.iter_child_nodes(tree):
        yield from walk(child)


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every name that a module gives to something, and every string that can be the name of an event or a message."""
    for node in walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.keyword(arg=str(name)) | ast.Name(id=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.alias(asname=str(name)):
                yield node.lineno, name
            case ast.Constant(value=str(name)) if TEXT.fullmatch(name):
                yield node.lineno, name


def parts(name: str) -> Iterator[str]:
    """Words of a name, and of those that end in s the singular."""
    for part in map(str.lower, PARTS.findall(name)):
        yield from (part, part.removesuffix("s"))


def faults(file: str, source: str, stays: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """What of a file has a private word: where, which, and what to say instead."""
    found = [*((0, part) for part in Path(file).with_suffix("").parts), *names(ast.parse(source))]
    for line, name in dict.fromkeys(found):
        instead = NAMES.get(name) or next((WORDS[part] for part in parts(name) if part in WORDS), None)
        if instead and not (name in stays and (not stays[name] or file.startswith(stays[name]))):
            yield f"{file}:{line}: {name}: {instead}"


def files(root: Path) -> Iterator[Path]:
    for folder in FOLDERS:
        yield from (path for path in sorted((root / folder).rglob("*.py")) if ".venv" not in path.parts)


def test_names_use_the_words_of_the_field(root: Path) -> None:
    stays = kept((root / "docs/glossary.md").read_text())
    private = [one for path in files(root) for one in faults(str(path.relative_to(root)), path.read_text(), stays)]
    assert private == []


def test_a_name_that_stays_is_still_there(root: Path) -> None:
    used = {name for path in files(root) for _, name in names(ast.parse(path.read_text()))}
    assert sorted(kept((root / "docs/glossary.md").read_text()).keys() - used) == []


@pytest.mark.parametrize(
    "source",
    [
        "class Zygote: ...",
        "class MyZygotePool: ...",
        "def fork(zygote): ...",
        "self._zygote = 1",
        "fork(zygote=1)",
        "rung_of = 1",
        "def f():\n    rung = 1",
        "log('homecoming')",
        "class Line: ...",
        "self._door = 1",
        "import load as crowd",
        "from a import load as crowd",
        "class Outlooks: ...",
    ],
)
def test_a_private_word_is_found(source: str) -> None:
    assert len(list(faults("hyperpod_ext/a.py", source, {}))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "line = 1",
        "was = ('homecoming',)",
        "text = 'The zygote of a node.'",
        "wrung = 1",
        "class LineReader: ...",
        "place = 1",
    ],
)
def test_the_same_letters_mean_something_else(source: str) -> None:
    assert list(faults("hyperpod_ext/a.py", source, {})) == []


@pytest.mark.parametrize("file", ["hyperpod_ext/zygote.py", "hyperpod_ext/zygotes/start.py"])
def test_a_file_and_a_folder_have_names_too(file: str) -> None:
    assert len(list(faults(file, "", {}))) == 1


def test_files_of_tests_are_named_in_the_words_of_the_field(root: Path) -> None:
    files = [str(path.relative_to(root)) for path in (root / "tests").rglob("test_*.py")]
    assert [fault for file in files for fault in faults(file, "", {})] == []


def test_the_glossary_says_where_a_name_stays() -> None:
    stays = kept(
        "## Names that stay\n| name | where | why |\n| `homecoming` | `cli/`, `hyperpod_ext/runtime/events/` | logs |\n"
    )
    assert stays == {"homecoming": ("cli/", "hyperpod_ext/runtime/events/")}
    assert list(faults("cli/a.py", "'homecoming'", stays)) == []
    assert list(faults("cdk/a.py", "'homecoming'", stays)) != []
