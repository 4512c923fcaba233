"""The reference of error messages with a hint, from the source code."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from generator.rules import errors_by_name

ROOT = Path(__file__).resolve().parents[2]
GAP = "…"
"""Stands for a part of a message that is known only when the error occurs."""
LEAST_WORDS = 3
AREAS = (
    ("Command line", r"cli/(?!cluster|checkpoints|data)|hyperpod_ext/[a-z_]+\.py"),
    ("Specs and templates", r"hyperpod_ext/(config|jobs/(contract|job_files|own_templates))"),
    ("Local jobs", r"hyperpod_ext/jobs/local"),
    ("Jobs on Kubernetes", r"(hyperpod_ext/jobs/(kubernetes|fault_injection)|cli/cluster_jobs)"),
    ("Jobs on Slurm", r"hyperpod_ext/jobs/slurm"),
    ("SageMaker training jobs", r"hyperpod_ext/(jobs/sagemaker|runtime/container_sagemaker)"),
    ("Import of job files", r"hyperpod_ext/jobs/imports"),
    ("Clusters", r"(hyperpod_ext/clusters|cli/clusters)"),
    ("Training scripts", r"hyperpod_ext/runtime/(training|state|reproducible|detection|scripts|torch_requirements)"),
    ("Adapters for other libraries", r"hyperpod_ext/(integrations|compat)"),
    ("Data", r"(hyperpod_ext/runtime/data|cli/data)"),
    (
        "Checkpoints and storage",
        r"(hyperpod_ext/runtime/(storage|snapshot|checkpoint|dcp|memory_server)|cli/checkpoints)",
    ),
    ("Running jobs", r"hyperpod_ext/"),
)
"""Headings of the page, each with a pattern of the paths of its files. The first match counts."""


class Message(NamedTuple):
    """An error of the code, with `GAP` for unknown parts."""

    file: str
    text: str
    hint: str
    error: str


def messages() -> Iterator[Message]:
    """Yield every error message in the code that has a hint."""
    known = errors_by_name()
    for folder in ("hyperpod_ext", "cli"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            names = _names(tree)
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and (found := _message(node, known, names)):
                    yield Message(str(file.relative_to(ROOT)), *found)


def _names(tree: ast.Module) -> dict[str, str]:
    """Return the texts of variables that are assigned once in the module."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(_text(node.value, {}))
    return {name: texts[0] for name, texts in found.items() if len(texts) == 1}


def _message(node: ast.Call, known: Collection[str], names: dict[str, str]) -> tuple[str, str, str] | None:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    hint = next((_text(one.value, names) for one in node.keywords if one.arg == "hint"), "")
    if name not in known or not node.args or not hint.replace(GAP, "").strip():
        return None
    text = _text(node.args[0], names)
    words = re.findall(r"[A-Za-z]{2,}", text)
    return (text, hint, name) if len(words) >= LEAST_WORDS else None


def _text(node: ast.expr, names: dict[str, str]) -> str:
    """Return the text of a string in code, with `GAP` for the values in it."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name):
            return names.get(name, GAP)
        case ast.JoinedStr(values=parts):
            return "".join(_text(part, names) if isinstance(part, ast.Constant) else GAP for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, names) + _text(right, names)
        case ast.IfExp(body=body, orelse=other):
            either = [text for one in (body, other) if (text := _text(one, names)).replace(GAP, "").strip()]
            return " Or: ".join(either) or GAP
        case _:
            return GAP


def page() -> str:
    """Return the reference page of error messages."""
    listed: dict[str, dict[str, Message]] = {title: {} for title, _ in AREAS}
    for one in messages():
        area = next(title for title, pattern in AREAS if re.match(pattern, one.file))
        listed[area].setdefault(one.text, one)
    count = sum(map(len, listed.values()))
    parts = [
        "# Error messages",
        f"This page lists {count} messages with the next step that each of them prints. `{GAP}` stands for a name or "
        "a value. To find a message, search for a few of its words. [Troubleshooting](../troubleshooting.md) begins "
        "with symptoms.",
        "Mistakes in a spec have [rules](rules.md). The [exit code](exit-codes.md) follows from the kind of the error.",
    ]
    known = errors_by_name()
    for title, of_area in listed.items():
        if of_area:
            rows = [
                f"| {_cell(one.text)} | {_cell(one.hint)} | {known[one.error].exit_code} |" for one in of_area.values()
            ]
            parts += [f"## {title}", "\n".join(["| message | next step | exit code |", "|---|---|---|", *sorted(rows)])]
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    plain = re.sub(r"\s+", " ", re.sub(rf"({GAP})+", GAP, text)).strip()
    return re.sub(r"([<*_\[\]|])", r"\\\1", plain) if "`" not in plain else _outside_code(plain)


def _outside_code(text: str) -> str:
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([<*_\[\]|])", r"\\\1", part) for part in parts)
