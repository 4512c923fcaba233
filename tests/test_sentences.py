"""Sentences of pages, docstrings, comments and messages avoid the turns of phrase that readers have stumbled over."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
CODE = sorted(file for folder in ("hyperpod_ext", "cli", "cdk") for file in (ROOT / folder).rglob("*.py"))
FENCE = re.compile(r"^```.*?^```|<!--.*?-->", re.MULTILINE | re.DOTALL)
CODE_WORD = re.compile(r"`[^`]*`")

RULES = {
    r"\b(?:who|whom|what|which)ever\b": "name the person or thing",
    r"(?:^|[.;:(] |\b(?:of|to|by|from|with|for|than|as|are|has|have|says?|shows?) )what (?:is|are|was|were|it|they|has"
    r"|had|that|each|an?|the|others|our|one|can|must|may|would|will|does|did|changes|comes|lies)\b": "name the thing",
    r"\b(?:is|are|was|were|be|been|gets?) told\b|\btells?\b(?!:)": "report, send, return, log",
    r"\bthose (?:that|who|which|there)\b": "repeat the noun",
    r"\b(?:is|are|was|were) there\b(?! (?:an?|any|no|more)\b)": "exists",
    r"\b(?:has|have|had) (?:it|them|all|others|everybody) \w+(?:ed|en)\b": "use the passive or the verb itself",
    r"\banew\b": "again",
    r"\bof (?:its|theirs|ours|yours)(?=[,.;])": "name the thing",
    r"(?-i:(?:^|[.] )Where (?:it|that|there|one|an?|the|no|each)\b)": "if",
    r"(?<!-)\bbeside\b": "next to, compared with",
    r"\bbr(?:ings?|ought)\b": "upload, copy, contain",
    r"\blies?\b": "is in",
    r"\bthereby\b|\bas ever\b|\ball the same\b": "leave it out",
    r"\b(?:hears?|heard) (?:of|from)\b": "receive",
    r"\b(?:he|she|himself|herself)\b": "name the thing",
}
"""Regular expressions, and the words to write instead."""


def test_each_rule_finds_its_turn() -> None:
    examples = [
        *("Whoever reads it", "of what is there", "is told of it", "those that stay", "files that are there"),
        *("has them uploaded", "begins anew", "a size of its.", "Where a node fails", "beside the log"),
        *("it brings the file", "it lies in a folder", "thereby", "hears of a fault", "he reads"),
    ]
    for rule, text in zip(RULES, examples, strict=True):
        assert re.search(rule, text, re.IGNORECASE), rule
    assert not any(re.search(rule, "Return the newest step of each rank.") for rule in RULES)


@pytest.mark.parametrize("kind", ["pages", "code"])
def test_sentences_are_plain(kind: str) -> None:
    texts = of_pages() if kind == "pages" else of_code()
    found = [
        f"{place}: {match[0]!r} in {text[max(0, match.start() - 30) : match.end() + 30]!r}; write: {instead}"
        for place, text in texts
        for rule, instead in RULES.items()
        for match in re.finditer(rule, text, re.MULTILINE | re.IGNORECASE)
    ]
    assert found == []


def of_pages() -> Iterator[tuple[str, str]]:
    """Yield each paragraph of a page, with its place. Code is replaced by spaces."""
    for page in PAGES:
        text = FENCE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), page.read_text())
        line = 1
        for paragraph in re.split(r"(\n\s*\n)", text):
            yield f"{page.relative_to(ROOT)}:{line}", CODE_WORD.sub("CODE", " ".join(paragraph.split()))
            line += paragraph.count("\n")


def of_code() -> Iterator[tuple[str, str]]:
    """Yield each docstring, comment and message of the product, with its place."""
    for file in CODE:
        source, name = file.read_text(), file.relative_to(ROOT)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) >= 4:
                yield f"{name}:{node.lineno}", CODE_WORD.sub("CODE", " ".join(node.value.split()))
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield f"{name}:{token.start[0]}", token.string.lstrip("# ")
