"""Draws the pool anew: parts from the tests' generators, 200 accepted specs a target, 100 specs with a mistake.

A new pool needs a new record. Draw only when specs have new fields that the pool lacks.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import clusters
import hypothesis
import job_configs
import pod_words
import spec_keys
import yaml

from hyperpod_ext.config.files.load import read_text
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import ConfigError
from hyperpod_ext.jobs.contract.targets import TARGETS
from hyperpod_ext.jobs.plan import find_problems
from observed import pool
from observed.cli import Place
from observed.pool import ROOT, Document, compact, merged, put_together, text_of, wrong
from observed.specs import checked

SPECS, TRIED, OF_SECTION, WRONG = 200, 12, 6, 100
_FORM = '{{\n"parts": [\n{parts}\n],\n"wrong": [\n{wrong}\n],\n"specs": {{\n{specs}\n}}\n}}\n'
_TOGETHER: list[Document] = [
    {"mode": "plain", "elastic": {"min_nodes": 1, "max_nodes": 3}},
    {"restart": {"policy": "continue", "samples": "fewer"}},
    {"checkpoint": {"tiers": [{"kind": "memory"}, {"kind": "s3", "uri": "s3://bucket/a", "every_seconds": 60.0}]}},
    {"image": "/fsx/train.sqsh", "slurm": {"container": "pyxis"}},
]
"""Keys that need each other."""
_BAD = [None, "", "x y", -1, 0, 10**12, 1.5, True, [], {}, ["a", 1], {"a": 1}]


def draw(seed: int = 0) -> None:
    """Write the pool."""
    found: Document = {"parts": [spec_keys.LEAST, *_parts()]}
    parts, own = found["parts"], range(1, len(found["parts"]))
    found["specs"] = {target: [*_accepted(parts, own, target, random.Random(f"{seed} {target}"))] for target in TARGETS}
    first = len(parts)
    parts += [*_examples("job"), *_examples("cluster"), *clusters.CASES.values()]
    with Place() as place:
        place.write("train.py", "")
        found["wrong"] = _wrong(place, parts, range(first, len(parts)), own, random.Random(f"{seed} wrong"))
    texts = {name: ",\n".join(map(compact, found[name])) for name in ("parts", "wrong")}
    texts |= {"specs": ",\n".join(f'"{target}":{compact(numbers)}' for target, numbers in found["specs"].items())}
    pool.FILE.write_text(_FORM.format(**texts))


def _parts() -> Iterator[Document]:
    """Each key alone with a value that is not its default, then whole sections with awkward values."""
    for key, field in spec_keys.keys():  # noqa: SIM118  (a function)
        if key not in ("name", "script", "image"):
            yield _mounted(merged(spec_keys.MORE.get(key, {}), spec_keys.at(key, spec_keys.value_of(key, field))))
    yield from _TOGETHER
    for name, strategy in job_configs.ALL.items():
        yield from (_mounted({name: value}) for value in _drawn(strategy))
    yield from ({"kubernetes": value} for value in _drawn(pod_words.pods(), 2 * OF_SECTION))


def _mounted(part: Document) -> Document:
    """A part with a volume for its file tier, so that pods accept it."""
    paths = [tier["path"] for tier in part.get("checkpoint", {}).get("tiers", ()) if tier["kind"] == "file"]
    volumes = [{"kind": "host", "path": path, "host_path": path} for path in paths]
    return merged(part, {"volumes": volumes}) if volumes else part


def _drawn(strategy: Any, count: int = OF_SECTION) -> list[Any]:
    found: list[Any] = []

    @hypothesis.settings(max_examples=20 * count, derandomize=True, database=None, deadline=None)
    @hypothesis.given(strategy)
    def collect(value: Any) -> None:
        if value and value not in found:
            found.append(value)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collect()
    return found[:: max(1, len(found) // count)][:count]  # neighbours resemble each other


def problems(document: Document, target: str) -> list[str]:
    """Reasons to refuse a spec."""
    try:
        job = read_text(JobConfig, text_of(document), "job.yaml").config
    except ConfigError as error:
        return [f"{one.rule}{re.sub(r'[0-9]+', '0', one.path)} {one.message}" for one in error.problems]
    return [f"{one.rule}{one.path}" for one in find_problems(job, None, target)]


def _accepted(parts: list[Document], own: range, target: str, rng: random.Random) -> Iterator[list[int]]:
    """Specs as numbers of parts. Each part is tried equally often, and kept if the target accepts the spec with it."""
    deck: list[int] = []
    for _ in range(SPECS):
        if len(deck) < TRIED:
            deck += rng.sample(own, len(own))
        tried, deck = deck[:TRIED], deck[TRIED:]
        chosen = [0]
        for number in tried:
            if not problems(put_together([*chosen, number], parts), target):
                chosen.append(number)
        yield chosen


def _examples(kind: str) -> Iterator[Document]:
    for file in sorted(ROOT.glob("examples/*/*.yaml")):
        if ("\nscript:" in file.read_text()) == (kind == "job"):
            yield yaml.safe_load(file.read_text())


def _wrong(place: Place, parts: list[Document], examples: range, own: range, rng: random.Random) -> list[Document]:
    """Mistakes of four kinds, and parts that are right alone and refused together."""
    found: list[Document] = []
    while len(found) < WRONG * 7 // 10:  # the rest are refusals by rules
        number = rng.choice(examples)
        entry: Document = {"of": [number]} | (
            {"target": rng.choice(list(TARGETS))} if "script" in parts[number] else {}
        )
        path, value = rng.choice([*_places(parts[number])])
        match rng.choice(["removed", "wrong type", "unknown", "out of range"]):
            case "removed":
                entry["removed"] = [path]
            case "wrong type":
                entry["set"] = {path: rng.choice([one for one in _BAD if type(one) is not type(value)])}
            case "unknown":
                name = path.rpartition(".")[2]
                if name.isdecimal():
                    continue
                entry["set"] = {path + rng.choice(["s", "_", "x"]): value}
            case _:
                if type(value) not in (int, float):
                    continue
                entry["set"] = {path: rng.choice([-1, 0, 10**12, -0.5])}
        if checked(place, wrong(entry, parts), entry.get("target")).code:
            found.append(entry)
    seen: set[str] = set()
    for _ in range(20_000):
        target = rng.choice(list(TARGETS))
        numbers = [0, *rng.sample(own, 2)]
        new = set(problems(put_together(numbers, parts), target)) - seen
        if new:
            seen |= new
            found.append({"of": numbers, "target": target})
            if len(found) == WRONG:
                break
    return found


def _places(document: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for name, value in items:
        if "." not in str(name):
            yield f"{above}{name}", value
            yield from _places(value, f"{above}{name}.")


if __name__ == "__main__":
    Path(pool.FOLDER).mkdir(exist_ok=True)
    draw()
