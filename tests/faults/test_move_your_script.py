"""The scripts of docs/move-your-script.md: a kill changes no bit, and few lines are changed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "19-move"
PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.utils.data"]
KILLS = {
    "nanogpt": "sigkill:rank=1,step=12",
    "epochs": "sigkill:rank=0,step=11",
    "fsdp2": "sigkill:rank=1,step=13",
    "mingpt": "sigkill:rank=1,step=20",
    "dcp": "sigkill:rank=0,step=12",
}
MOST = {"nanogpt": 15, "mingpt": 25, "epochs": 25, "fsdp2": 15, "dcp": 15}
"""Maximum number of new lines."""


def printed(running: Any) -> set[str]:
    """Lines with results of rank 0; after a fault some are printed again."""
    log = (running.folder / "logs" / "rank0.log").read_text()
    return set(re.findall(r"^(?:step|epoch|batch) .*", log, re.MULTILINE))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.thorough] * (name in ("nanogpt", "mingpt", "dcp"))) for name in KILLS],
)
def test_a_kill_changes_no_bit(job: Any, name: str) -> None:
    settings = {"restart": {"preload": PRELOAD}}
    options = {"script": EXAMPLES / f"{name}.py", "nodes": 1, "workers_per_node": 2, "settings": settings}
    undisturbed = job("undisturbed", **options).start()
    expected = undisturbed.wait()
    running = job("killed", **options, env={"HPX_CHAOS": KILLS[name]}).start()
    report = running.wait()
    assert (expected["state"], report["state"]) == ("succeeded", "succeeded"), report["error"]
    assert report["weights"] == expected["weights"] != ""
    assert report["steps_lost"] == 0
    assert len(report["recoveries"]) == 1
    assert printed(running) == printed(undisturbed) != set()
    assert "is in no snapshot" not in undisturbed.logs()


def changes(name: str) -> list[str]:
    """Lines of the difference between the script before and after. Indentation and blank lines are no difference."""
    before, after = (
        [line for line in (EXAMPLES / f"{name}{which}.py").read_text().splitlines() if line]
        for which in ("_before", "")
    )
    stripped = [[line.strip() for line in lines] for lines in (before, after)]
    found = []
    for kind, low, high, new_low, new_high in difflib.SequenceMatcher(None, *stripped, autojunk=False).get_opcodes():
        if kind != "equal":
            found += [f"-{line}" for line in before[low:high]] + [f"+{line}" for line in after[new_low:new_high]]
    return found


@pytest.mark.parametrize("name", MOST)
def test_the_page_shows_the_changed_lines(golden_part: Callable[[str, str, str], None], name: str) -> None:
    found = changes(name)
    new, removed = (sum(line.startswith(sign) for line in found) for sign in "+-")
    assert new <= MOST[name]
    text = "\n".join(found)
    golden_part(
        "docs/move-your-script.md",
        f"changes of {name}",
        f"{new} new lines, {removed} removed or changed:\n\n```diff\n{text}\n```\n",
    )
