"""Commands, code and error texts on pages: each is run, or the site says why not."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_place import LocalPlace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))
snippets = importlib.import_module("generator.snippets")
PAGES = [str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md"))]
TIER = "    - kind: file\n      path: {}\n      every_steps: 10\n"
"""A tier that the tutorial adds to its job."""
LONG = ("docs/rehearse.md", "docs/ten-minutes.md")
"""Pages whose commands take more than a minute. The thorough tests run them."""


def commands_run() -> set[str]:
    """Every command that `test_the_commands_of_a_page_run` runs."""
    found = [one for page in snippets.RUN for one in snippets.snippets((ROOT / page).read_text(), page)]
    return {same(command) for one in found if not one.reason for command in one.commands}


def same(command: str) -> str:
    """A command without the folder of its spec."""
    return command.replace("my-job/job.yaml", "job.yaml")


@pytest.mark.parametrize("page", [page for page in PAGES if "/benchmarks/" not in page])
def test_every_command_is_run_or_the_page_says_why_not(page: str) -> None:
    found = list(snippets.snippets((ROOT / page).read_text(), page))
    run = commands_run()
    assert [one.body for one in found if not one.reason and not set(map(same, one.commands)) <= run] == []


def test_a_reason_is_shown_below_its_block() -> None:
    block = "```\nkubectl get pods\n```"
    assert snippets.with_reasons(block, "docs/a.md").startswith(
        f"{block}\n\n<small>No test runs this block. It needs a K"
    )
    marked = f"<!-- not run: it costs money -->\n{block}"
    assert "No test runs this block. It costs money." in snippets.with_reasons(marked, snippets.RUN[0])
    assert snippets.with_reasons("```\nhp-ext schema\n```", "docs/a.md") == "```\nhp-ext schema\n```"


@pytest.mark.parametrize("page", [page for page in PAGES if "/contributing/" not in page])  # they have parts of files
def test_python_on_a_page_can_be_parsed(page: str) -> None:
    for found in snippets.BLOCK.finditer((ROOT / page).read_text()):
        if found["language"] == "python":
            ast.parse(found["body"].replace(", ...)", ")"))


def texts_of_the_code() -> str:
    """Every text in the code, one a line, with `…` for values in it."""

    def texts() -> Iterator[str]:
        for folder in ("hyperpod_ext", "cli"):
            for file in (ROOT / folder).rglob("*.py"):
                for node in ast.walk(ast.parse(file.read_text())):
                    if isinstance(node, ast.JoinedStr):
                        yield "".join(
                            str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
                        )
                    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                        yield node.value

    return "\n".join(texts())


def test_each_error_text_of_the_help_is_in_the_code() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    table = page[page.index("## By error text") :]
    listed = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert len(listed) > 20
    code = texts_of_the_code()
    assert [text for text in listed if text.removeprefix("… ").removesuffix(" …") not in code] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.thorough) if page in LONG else page for page in snippets.RUN]
)
def test_the_commands_of_a_page_run(page: str, tmp_path: Path, place: LocalPlace) -> None:
    text = (ROOT / page).read_text().replace("/tmp/tiny-gpt", str(tmp_path / "kept"))
    folder = tmp_path / "work"
    folder.mkdir()
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for one in snippets.snippets(text, page):
        if one.reason:
            continue
        for command in one.commands:
            if "checkpoints list" not in command and '"20"' in command:  # the tutorial has added a tier before
                job, first = folder / "my-job" / "job.yaml", "      every_steps: 1\n"
                assert first in job.read_text()
                job.write_text(job.read_text().replace(first, first + TIER.format(tmp_path / "kept")))
            done = subprocess.run(
                ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
