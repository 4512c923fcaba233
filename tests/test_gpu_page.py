"""docs/gpu.md has what is decided: its tables are made here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from hyperpod_ext.runtime.detection.cuda_errors import CUDA_ERRORS
from hyperpod_ext.runtime.detection.xid_codes import RECOVERY_ACTIONS, XIDS
from hyperpod_ext.runtime.process_group.nccl.environment import VARIABLES, Variable
from hyperpod_ext.runtime.process_group.nccl.versions import KNOWN_BAD, PINNED, KnownBad, written

PAGE = "docs/gpu.md"


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def names(variable: Variable) -> str:
    return ", formerly ".join(f"`{name}`" for name in variable.names)


def wanted(variable: Variable) -> str:
    if variable.kind == "debug level":
        return f"unset, or at most `{variable.value}`"
    if not variable.is_set:
        return f"unset, or `{variable.value}`"
    return f"`{variable.value}`" + (f"; {variable.least} to {variable.most} are accepted" if variable.most else "")


def versions(bad: KnownBad) -> str:
    text = f"before {written(bad.before)}"
    if any(bad.since):
        text = f"from {written(bad.since)} to {text}"
    if bad.torch is None:
        return text
    return f"{text}, with torch from {written(bad.torch[0])} to before {written(bad.torch[1])}"


FOLLOWS = {"refuse": "refused", "warn": "a warning"}

TABLES = {
    "environment": table(
        ["variable", "of", "value", "why"],
        ([names(each), ", ".join(f"`{one}`" for one in each.engines), wanted(each), each.why] for each in VARIABLES),
    ),
    "versions": table(
        ["library", "versions", "what follows", "why", "good", "source"],
        ([bad.name, versions(bad), FOLLOWS[bad.severity], bad.why, bad.good, bad.source] for bad in KNOWN_BAD),
    ),
    "pinned": table(["torch", "NCCL"], ([written(torch), written(nccl)] for torch, nccl in PINNED.items())),
    "recovery actions": table(
        ["recovery action", "what it means"],
        ([number, meaning or "none: the GPU is used"] for number, meaning in RECOVERY_ACTIONS.items()),
    ),
    "xids": table(
        ["Xid", "in NVIDIA's catalog", "meaning", "what follows"],
        ([xid.code, f"`{xid.mnemonic}`", xid.meaning, xid.remedy.value] for xid in XIDS),
    ),
    "cuda errors": table(
        ["code", "name", "text"], ([known.code, f"`{known.name}`", known.text] for known in CUDA_ERRORS)
    ),
}


@pytest.mark.parametrize("place", TABLES)
def test_the_page_has_what_is_decided(place: str, golden_part: Callable[[str, str, str], None]) -> None:
    golden_part(PAGE, place, TABLES[place])


def test_each_part_says_what_was_run_on_a_gpu_and_what_was_not(root: Path) -> None:
    for part in (root / PAGE).read_text().split("\n## ")[1:]:
        said = " ".join(part.split())  # the page is wrapped
        assert re.search(r"[Oo]n a GPU|[Nn]ever run|without a GPU", said), part.splitlines()[0]


def test_each_experiment_that_the_page_names_was_run(root: Path) -> None:
    named = set(re.findall(r"\bE\d+\b", (root / PAGE).read_text()))
    found = json.loads((root / "docs/benchmarks/gpu.json").read_text())
    ran = {name for run in found for name in run["experiments"]}
    assert named <= ran
