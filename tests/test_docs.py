"""What the documentation names is there: commands, options, fields, rules, make targets and files.

Pages of other tools name options that are gone; each case here is one that would be found.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from importlib import import_module
from pathlib import Path

import click
import pytest
import yaml
from hyperpod_ext.cli import hp_ext

import hyperpod_ext
from hyperpod_ext.clusters.checks import all_checks
from hyperpod_ext.config.files.checks import CHECKS
from hyperpod_ext.config.files.load import load_text
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import ConfigError
from hyperpod_ext.jobs.rules import all_rules

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
RULE = re.compile(r"\bHPX\d{3}\b")
MAKE = re.compile(r"\bmake ([a-z][-a-z0-9]*)")


def blocks(text: str, *languages: str) -> list[str]:
    return [body for language, body in FENCE.findall(text) if language in languages]


def commands_in(text: str) -> Iterator[str]:
    """Every `hp-ext ...` of a page, as one line."""
    for block in blocks(text, "", "bash", "sh", "console"):
        for line in block.replace("\\\n", " ").splitlines():
            if found := re.match(r"\s*(?:\$ )?(?:\S*/)?hp-ext (.*)", line):
                yield found[1]
    for code in CODE.findall(FENCE.sub("", text)):
        if found := re.match(r"(?:\S*/)?hp-ext (\S.*)", code):
            yield found[1]


def wrong_in(said: str) -> str | None:
    """What of a command line does not exist: its name, or an option."""
    said = re.split(r"\s(?:#|>|\||&&|<)\s?", said)[0]
    group, name = hp_ext, "hp-ext"
    words = shlex.split(said.replace("...", ""))
    context = click.Context(hp_ext)
    while words and isinstance(group, click.Group) and not words[0].startswith("-"):
        names = words.pop(0).split("|")
        for name in names:
            if group.get_command(context, name) is None and not name.isupper():
                return f"no command {name}"
        if len(names) > 1 or name.isupper():
            return None  # `status|logs -f|cancel`: whose option is which cannot be told
        group = group.get_command(context, name) or group
    known = {option for one in group.get_params(context) for option in [*one.opts, *one.secondary_opts]}
    if name == "run":  # what follows the script is the script's
        words = words[: next((at for at, word in enumerate(words) if word.endswith(".py")), None)]
    options = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    return next((f"no option {option} of {name}" for option in options if option not in known), None)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_of_a_page_exist(page: Path) -> None:
    wrong = {said: found for said in commands_in(page.read_text()) if (found := wrong_in(said))}
    assert wrong == {}


def test_a_command_or_an_option_that_is_gone_would_be_found() -> None:
    assert sum(len(list(commands_in(page.read_text()))) for page in PAGES) > 30
    assert wrong_in("validate job.yaml --target local") is None
    assert wrong_in("checkpoints list|show|verify --x") is None
    assert wrong_in("creat-job -f job.yaml") == "no command creat-job"
    assert wrong_in("validate job.yaml --tarket local") == "no option --tarket of validate"
    assert list(commands_in("```\n$ hp-ext list --x\n```\nand `hp-ext wait A`")) == ["list --x", "wait A"]


@cache
def names_of_all(group: click.Group) -> list[tuple[str, click.Command]]:
    context = click.Context(group)
    found = []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        found += (
            [(f"{name} {inner}", one) for inner, one in names_of_all(command)]
            if isinstance(command, click.Group)
            else [(name, command)]
        )
    return found


def test_the_examples_in_the_help_of_every_command_exist() -> None:
    for name, command in names_of_all(hp_ext):
        for line in (command.epilog or "").replace("\\\n", " ").splitlines():
            if found := re.match(r"\s*hp-ext (.*)", line):
                assert wrong_in(found[1]) is None, (name, line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_rules_and_make_targets_of_a_page_exist(page: Path) -> None:
    text = page.read_text()
    links = [link.partition("#")[0] for link in LINK.findall(FENCE.sub("", text)) if "://" not in link]
    assert [link for link in links if link and not (page.parent / link).exists()] == []
    known = set(all_rules()) | set(all_checks()) | {check.rule for checks in CHECKS.values() for check in checks}
    assert set(RULE.findall(text)) <= known
    targets = set(re.findall(r"^([a-z][-a-z0-9]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = " ; ".join([*CODE.findall(FENCE.sub("", text)), *blocks(text, "", "bash", "sh", "console")])
    assert set(MAKE.findall(code)) <= targets


def make_help(*variables: str) -> set[str]:
    """The targets that `make help` lists."""
    done = subprocess.run(["make", "help", *variables], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(re.findall(r"^  make (\S+) +\S", done.stdout, re.MULTILINE))


def test_make_help_lists_the_main_targets_and_all_targets_on_request() -> None:
    main, every = make_help(), make_help("ALL=1")
    targets = set(re.findall(r"^([a-z][-a-z0-9]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"run", "check", "test", "bench", "golden", "clean"} <= main < every
    assert len(main) <= 18
    assert targets - every == {"collected", "ready", "ready-with-cdk"}, "these need a comment of one line"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_specs_of_a_page_and_parts_of_them_are_valid(page: Path) -> None:
    for block in blocks(page.read_text(), "yaml"):
        written = yaml.safe_load(block)
        if (
            not isinstance(written, dict)
            or not set(written) & set(JobConfig.model_fields)
            or "instance_groups" in written
        ):
            continue
        base = {"name": "a", "script": "train.py", "nodes": 4, "workers_per_node": 8}
        missing = {key: value for key, value in base.items() if key not in written}
        try:
            load_text(JobConfig, yaml.safe_dump(missing) + block, str(page))
        except ConfigError as error:
            unknown = [problem for problem in error.problems if "not a field" in problem.message]
            assert unknown == [], block


PUBLIC = ("hyperpod_ext", "hyperpod_ext.runtime", "hyperpod_ext.runtime.data", "hyperpod_ext.integrations.*")
IMPORT = re.compile(r"^\s*(?:>>> )?from (hyperpod_ext[\w.]*) import (\([^)]*\)|[^#\n]*)", re.MULTILINE)


def imported_in(text: str) -> Iterator[tuple[str, str]]:
    """Each module of ours and each name that the text imports from it."""
    for module, names in IMPORT.findall(text):
        yield from ((module, name.split(" as ")[0].strip()) for name in names.strip("()").split(",") if name.strip())


@pytest.mark.parametrize("name", [*hyperpod_ext.__all__])
def test_each_name_of_the_package_loads(name: str) -> None:
    assert getattr(hyperpod_ext, name).__name__ == name


def test_pages_and_examples_import_public_names_alone() -> None:
    pages = [page for page in PAGES if page.parent != ROOT / "docs" / "contributing"]
    files = [*pages, *ROOT.glob("examples/**/*.py"), *ROOT.glob("templates/**/*.j2")]
    imports = {found for file in files for found in imported_in(file.read_text())}
    assert ("hyperpod_ext.runtime", "resilient") in imports
    assert [module for module, _ in imports if not any(fnmatch(module, public) for public in PUBLIC)] == []
    lazy = {module: set(import_module(module).__all__) for module in PUBLIC[:3]}
    assert {name for module, name in imports if module in lazy and name not in lazy[module]} == set()
