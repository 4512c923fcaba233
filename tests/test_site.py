"""The documentation site without a build: its navigation, its generated pages, and the links on them."""

from __future__ import annotations

import importlib
import json
import posixpath
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hyperpod_ext.cli import SECTIONS
from pydantic import ValidationError

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))
commands, environment, example_values, examples, fields, links, markdown, nav, reference, rules = (
    importlib.import_module(f"generator.{name}")
    for name in (
        *("commands", "environment", "example_values", "examples", "fields"),
        *("links", "markdown", "nav", "reference", "rules"),
    )
)
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
BASES: dict[str, dict[str, Any]] = {
    "job": {"name": "a", "script": "train.py", "nodes": 4, "workers_per_node": 8},
    "cluster": {
        "name": "a",
        "region": "us-west-2",
        "instance_groups": [{"name": "gpu", "instance_type": "ml.p5.48xlarge", "count": 2}],
    },
}
FIELDS = [(spec, field) for spec in fields.SPECS for field in fields.fields(spec)]
ANCHOR = re.compile(r"\{#([\w-]+)\}|id=\"(\w+)\"")


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    """All generated pages of the reference."""
    return dict(reference.pages())


def committed() -> Iterator[Path]:
    """Every page in docs/, and those of the root that the site includes."""
    yield from sorted((ROOT / "docs").rglob("*.md"))
    yield from (ROOT / name for name in links.PAGES if name != "README.md")


def test_every_page_is_in_the_navigation_once_and_no_other_is(made: dict[str, str]) -> None:
    listed = list(nav.pages(nav.expand(CONFIG["nav"], list(made))))
    written = [links.site_path(str(page.relative_to(ROOT))) for page in committed()]
    assert sorted(listed) == sorted([*written, *made])


def test_sections_are_in_the_order_in_which_people_need_them() -> None:
    titles = ["Start", "Tutorials", "How-to", "Reference", "Explanation", "Help"]
    assert [title for section in CONFIG["nav"] for title in section] == titles


def test_a_build_fails_on_dead_links_and_on_pages_without_a_way_in() -> None:
    found = {value for section in CONFIG["validation"].values() for value in section.values()}
    assert found == {"warn"}, "`make docs` passes --strict, which makes errors of warnings"
    assert set(CONFIG["validation"]["links"]) >= {"anchors", "not_found", "unrecognized_links"}
    assert set(CONFIG["validation"]["nav"]) >= {"not_found", "omitted_files"}


def test_links_of_pages_lead_to_pages_of_the_site(made: dict[str, str]) -> None:
    texts = {str(page.relative_to(ROOT)): markdown.for_site(page.read_text()) for page in committed()}
    site = {links.site_path(page): links.rewrite(text, page, ROOT) for page, text in texts.items()}
    sources = links.source_pages(texts, ROOT)
    assert "source/examples/01-local/train.py.md" in sources
    files = {str(file.relative_to(ROOT / "docs")) for file in (ROOT / "docs").rglob("*") if file.is_file()}
    known = files | set(site) | set(made) | set(sources)
    for page, text in (site | made | sources).items():
        for found in links.TOKEN.finditer(text):
            if (link := found["link"]) and not links.is_external(link):
                target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link.partition("#")[0]))
                assert target in known, (page, link)


def test_names_in_code_lead_to_headings_of_the_reference(made: dict[str, str]) -> None:
    anchors = {path: {one or other for one, other in ANCHOR.findall(text)} for path, text in made.items()}
    places = reference.places(made)
    paths = [place.partition("#") for place in places.values()]
    assert [(path, anchor) for path, _, anchor in paths if anchor and anchor not in anchors[path]] == []
    assert {"hp-ext create-job", "HPX112", "HPX_HOME", "checkpoint.tiers.parity"} <= set(places)


def test_each_command_is_on_a_page(made: dict[str, str]) -> None:
    shown = {name for section in SECTIONS for name in section.help}
    assert {name.split()[0] for name in commands.commands()} == shown
    assert "--server-dry-run" in made["reference/cli/jobs.md"]


@pytest.mark.parametrize("spec", fields.SPECS)
def test_the_example_of_each_field_is_valid(spec: str) -> None:
    model, wrong = fields.SPECS[spec], {}
    for field in fields.fields(spec):
        text = json.dumps(merged(BASES[spec], examples.example(spec, (model,), field.path)))
        try:
            model.model_validate_json(text)
        except ValidationError as error:
            wrong[field.dotted] = (text, [str(one["msg"]) for one in error.errors()])
    assert wrong == {}


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `more`; sections are merged."""
    out = dict(base)
    for name, value in more.items():
        out[name] = merged(out[name], value) if isinstance(value, dict) and isinstance(out.get(name), dict) else value
    return out


def test_each_field_is_on_a_page_with_a_description(made: dict[str, str]) -> None:
    for spec, field in FIELDS:
        owned = fields.own_pages(fields.fields(spec))
        section = field.path[0] if field.path[0] in owned and len(field.path) > 1 else None
        head = f"## {field.dotted} {{#{fields.anchor(field)}}}\n\n"
        _, found, rest = made[fields.page_of(spec, section)].partition(head)
        assert found, field.dotted
        assert rest[0].isalnum() or rest[0] == "`", f"{field.dotted} has no description"


def test_example_values_are_for_fields_that_exist() -> None:
    known = {spec: {field.dotted for one, field in FIELDS if one == spec} for spec in fields.SPECS}
    assert set(example_values.JOB) - known["job"] == set()
    assert set(example_values.CLUSTER) - known["cluster"] == set()
    names = {path.rpartition(".")[2] for path in known["cluster"]}
    assert set(example_values.CLUSTER_BY_NAME) - names == set()


def test_every_environment_variable_of_the_code_has_a_sentence() -> None:
    listed = [one.name for group in (environment.USERS, environment.LAUNCHERS, environment.INTERNAL) for one in group]
    files = [file for name in ("hyperpod_ext", "cli", "templates", "cdk") for file in (ROOT / name).rglob("*")]
    texts = [file.read_text() for file in files if file.suffix in {".py", ".j2", ".c", ".sh"} and file.is_file()]
    used = {name for text in texts for name in re.findall(r"\bHPX_[A-Z][A-Z_]*[A-Z]\b", text)}
    assert sorted(listed) == sorted(used)
    assert all(one.meaning.endswith(".") for one in environment.USERS + environment.LAUNCHERS + environment.INTERNAL)


def test_every_rule_and_exit_code_is_listed(made: dict[str, str]) -> None:
    assert rules.exit_codes() - set(rules.MEANINGS) == set()
    assert len(re.findall(r"^### HPX\d{3}", made["reference/rules.md"], re.MULTILINE)) > 100


def test_error_messages_have_their_hints() -> None:
    text = (ROOT / "docs/errors.md").read_text()
    assert "[4] kubectl is not installed on this machine\ninstall kubectl, which runs commands in pods\n" in text
    assert len(re.findall(r"^\[\d\] ", text, re.MULTILINE)) > 250


def test_pages_load_nothing_from_other_sites() -> None:
    texts = {page: page.read_text() for page in committed()}
    assert [
        page for page, text in texts.items() if re.search(r"^```mermaid|!\[[^]]*\]\(http|<script", text, re.M)
    ] == []
    assert CONFIG["theme"]["font"] is False


@pytest.mark.parametrize(
    ("title", "anchor"),
    [
        ("Rehearse", "rehearse"),
        ("Predict the next fault: `hp-ext doctor --job`", "predict-the-next-fault-hp-ext-doctor---job"),
        ("SQS & SNS", "sqs--sns"),
    ],
)
def test_anchors_of_headings_are_those_of_github(title: str, anchor: str) -> None:
    assert markdown.slug(title.replace("`", ""), "-") == anchor


def test_a_link_to_a_file_of_the_repository_leads_to_its_page() -> None:
    text = "[`a`](../examples/01-local/train.py) `](x)` [b](faults.md#nan) [c](https://example.com)"
    assert links.rewrite(text, "docs/run.md", ROOT) == text.replace(
        "../examples/01-local/train.py", "source/examples/01-local/train.py.md"
    )
    assert links.rewrite("[a](docs/run.md)", "CONTRIBUTING.md", ROOT) == "[a](../run.md)"


def test_only_the_first_mention_of_a_name_becomes_a_link() -> None:
    text = "# `hp-ext top`\n\n`hp-ext top JOB`, `hp-ext top`, [`hp-ext top`](a.md)\n\n```\nhp-ext top\n```\n"
    linked = markdown.with_links(text, "metrics.md", {"hp-ext top": "reference/cli/x.md#hp-ext-top"})
    assert linked == text.replace("`hp-ext top JOB`", "[`hp-ext top JOB`](reference/cli/x.md#hp-ext-top)")
