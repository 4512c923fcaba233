"""Rendered files of examples and generated specs, and error texts of specs with a mistake."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from command import Done

from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.config.files.load import load_text
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.jobs.contract.targets import TARGETS
from hyperpod_ext.jobs.plan import find_problems, make_plan
from observed.cli import Place
from observed.pool import ROOT, Document, Text, generated, pool, text_of, wrong

_FAST = 20


def examples(_fast: bool) -> Iterator[tuple[str, Any]]:
    """Each example for each target: its files, or the reasons why the target refuses it."""
    for file in sorted(ROOT.glob("examples/*/*.yaml")):
        if "\nscript:" in (text := file.read_text()):
            cluster = _cluster_of(file)
            for target in TARGETS:
                yield f"{file.parent.name}/{file.stem} {target}", _rendered(text, target, cluster)


def specs(fast: bool) -> Iterator[tuple[str, Any]]:
    """Each generated spec of each target."""
    for target in pool()["specs"]:
        for number, document in enumerate(generated(target)[: _FAST if fast else None]):
            files = _rendered(text_of(document), target)
            yield f"{target} {number:03}", files


def mistakes(fast: bool) -> Iterator[tuple[str, Any]]:
    """Exit code and error text of each wrong spec."""
    with Place() as place:
        place.write("train.py", "")
        for number, entry in enumerate(pool()["wrong"]):
            if fast and number % 5:
                continue
            done = checked(place, wrong(entry), entry.get("target"))
            yield f"{number:03}", {"code": done.code, "says": done.stderr.splitlines()}


def checked(place: Place, document: Document, target: str | None) -> Done:
    """Outcome of `validate` for a job with a target, of `cluster create --dry-run` for a cluster."""
    place.write("spec.yaml", text_of(document))
    if target is None:
        return place.run("cluster", "create", "-f", "spec.yaml", "--dry-run")
    return place.run("validate", "spec.yaml", "--target", target)


def _rendered(text: str, target: str, cluster: ClusterConfig | None = None) -> Mapping[str, Text] | list[str]:
    try:
        job = load_text(JobConfig, text)
        if problems := find_problems(job, cluster, target):
            return sorted(f"{problem.path} {problem.rule}".strip() for problem in problems)
        files = make_plan(job, cluster, target, Path("/src")).files
    except Exception as error:
        return [f"crashed: {error!r}"]
    return {name: Text(content.replace(sys.executable, "PYTHON")) for name, content in sorted(files.items())}


def _cluster_of(file: Path) -> ClusterConfig | None:
    there = file.with_name("cluster.yaml")
    return load_text(ClusterConfig, there.read_text()) if there.exists() and file.stem == "checkpointless" else None
