"""Draw changes of the product at random, and count how many of them the fast tests catch.

A map of the lines that each fast test executes is made first, by --cover: one run of all fast tests under `coverage`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import coverage

from mutants.covering import FOLDER
from mutants.drawn import Drawn, Site, draw, files
from mutants.forked import FAST, Result, Task, copy_tree, run_all, warm_up
from mutants.table import ROOT

_APART = f"{FAST} and not measures and not torch_versions and not nixl"
_TESTS, _NEAR, _BATCH = 8, 5, 20
"""Most tests for one change; most of them from the folder of its module first; tests in one confirming run."""


_USER = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
_INSIDE = 'mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm && "$@"; exit $?'
_ALONE = ["unshare", *_USER, "--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "sh", "-c", _INSIDE, "sh"]
"""Changed code may kill any process and remove any folder: it sees no processes and no /tmp but its own."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.cover and "HPX_ALONE" not in os.environ:
        _cover(options)
    code = options.map / "code.json"
    if not code.exists() or json.loads(code.read_text()) != _code():
        print(f"{options.map} has no map of this code. Make one with --cover: a run of all fast tests", file=sys.stderr)
        return 2
    if "HPX_ALONE" not in os.environ:
        command = [*_ALONE, sys.executable, "-m", "mutants.sample", *(sys.argv[1:] if arguments is None else arguments)]
        return subprocess.run(command, env=os.environ | {"HPX_ALONE": "1"}, check=False).returncode
    drawn = draw(ROOT, options.seed, options.count, options.only)
    mutants = judge(drawn, Covered(options.map), options.jobs)
    summary = {"seed": options.seed, "count": len(mutants), **summed_up(mutants)}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(summary | {"mutants": mutants}, indent=1))
    print(json.dumps(summary, indent=1))
    print(f"{100 * summary['share']:.1f} % caught; each mutant: {options.out}")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make sample-mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--only", default="", metavar="PATH", help="only files whose paths begin so")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="at a time (default: 2)")
    parser.add_argument("--cover", action="store_true", help="make the map of lines first")
    parser.add_argument("--tests", nargs="*", default=["tests"], help="of --cover: only these test files and folders")
    parser.add_argument("--map", type=Path, default=ROOT / "build/sample-mutants/map")
    parser.add_argument("--out", type=Path, default=ROOT / "build/sample-mutants/found.json")
    return parser.parse_args(arguments)


def _cover(options: argparse.Namespace) -> None:
    """Run the fast tests, and keep which lines each executes. Tests that fail are left out of the map."""
    shutil.rmtree(options.map, ignore_errors=True)
    options.map.mkdir(parents=True)
    own = Path(__file__).parent
    environment = os.environ | {FOLDER: str(options.map.resolve()), "PYTHONPATH": f"{own / 'in_children'}:{own.parent}"}
    words = ["-q", "-p", "mutants.covering", "-n", str(options.jobs), "--dist", "worksteal", "-m", _APART]
    subprocess.run([sys.executable, "-m", "pytest", *words, *options.tests], cwd=ROOT, env=environment, check=False)
    (options.map / "code.json").write_text(json.dumps(_code()))


def _code() -> dict[str, str]:
    return {name: sha256((ROOT / name).read_bytes()).hexdigest()[:12] for name in files(ROOT)}


class Covered:
    """The lines that each passing test executes."""

    def __init__(self, folder: Path) -> None:
        self._data = [coverage.CoverageData(str(file)) for file in folder.glob("lines*")]
        for data in self._data:
            data.read()
        self._children = [json.loads(file.read_text()) for file in folder.glob("child-*.json")]
        self.seconds: dict[str, float] = {}
        for file in folder.glob("tests-*.json"):
            self.seconds |= json.loads(file.read_text())
        self._starting = {child["test"] for child in self._children} & self.seconds.keys()

    @cache  # noqa: B019  (lives as long as the program)
    def _lines(self, file: str) -> dict[int, set[str]]:
        path, found = str(ROOT / file), dict[int, set[str]]()
        for data in self._data:
            for line, tests in data.contexts_by_lineno(path).items():
                found.setdefault(line, set()).update(tests)
        for child in self._children:
            for line in child["lines"].get(path, ()):
                found.setdefault(line, set()).add(child["test"])
        return {line: tests & self.seconds.keys() for line, tests in found.items()}

    def tests_of(self, site: Site) -> tuple[str, list[str]]:
        """How tests reach a site, and the tests to show it to.

        `line`: they execute it. `import`: they execute others of its file, it runs when that is imported. `folder`: no
        test is known to execute it; tests of its folder start processes, and one that is killed keeps no lines.
        `nowhere`: no fast test reaches it.
        """
        lines = self._lines(site.file)
        if site.inside:
            for line in site.lines:
                if tests := lines.get(line):
                    return "line", self._chosen(tests, site.file)
        elif tests := set().union(*lines.values()):
            return "import", self._chosen(tests, site.file)
        near = {test for test in self._starting if test.startswith(folder_of(site.file))}
        return ("folder", self._chosen(near, site.file)) if near else ("nowhere", [])

    def _chosen(self, tests: Iterable[str], file: str) -> list[str]:
        """The quickest tests, of as many functions as there are, and from the folder of the module first."""
        quick = sorted(tests, key=lambda test: (self.seconds[test], test))
        each = {test.partition("[")[0]: test for test in reversed(quick)}
        one = sorted(each.values(), key=quick.index)
        near = [test for test in one if test.startswith(folder_of(file))][:_NEAR]
        chosen = list(dict.fromkeys([*near, *one, *quick]))[:_TESTS]
        return sorted(chosen, key=quick.index)


def folder_of(file: str) -> str:
    """Folder of the tests that mirrors a module's, or the nearest one above."""
    folder = Path("tests") / Path(file.removeprefix("hyperpod_ext/")).parent
    while not (ROOT / folder).is_dir():
        folder = folder.parent
    return f"{folder}/"


def judge(drawn: Sequence[Drawn], covered: Covered, jobs: int) -> list[dict[str, Any]]:
    """Each change with its outcome. A test that fails without any change, too, has caught nothing."""
    found = {}
    tasks = []
    for number, one in enumerate(drawn):
        reach, tests = covered.tests_of(one.site)
        place = {"file": one.site.file, "line": one.site.lines[0], "kind": one.site.kind}
        found[str(number)] = place | {"before": one.before, "after": one.after, "reach": reach, "verdict": "not run"}
        if tests:
            tasks.append(Task(str(number), tuple(tests), one.site.file, one.text))
    warm_up()
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        trees = [Path(scratch) / str(number) for number in range(jobs)]
        for tree in trees:
            copy_tree(tree)
        with run_all(tasks, trees) as results:
            for done, result in enumerate(results, 1):
                found[result.task.name] |= verdict(result)
                one = found[result.task.name]
                print(f"{done}/{len(tasks)} {one['verdict']:<8} {one['file']}:{one['line']} {one['kind']}", flush=True)
        wrong = _failing({one["by"] for one in found.values() if one.get("by")}, trees)
    for one in found.values():
        if one.get("by") in wrong:
            one["verdict"] = "not run"
    return list(found.values())


def verdict(result: Result) -> dict[str, Any]:
    """`caught` if a test fails, does not end, or cannot be imported; `not run` if no test says anything."""
    if result.code == 0:
        word = "survived" if result.passed else "not run"
    else:
        word = "caught" if result.failed or result.uncollected or result.code < 0 else "not run"
    by = next(iter([*result.failed, *result.uncollected]), "") if word == "caught" else ""
    return {"verdict": word, "by": by, "seconds": round(result.seconds, 1)}


def _failing(tests: Iterable[str], trees: list[Path]) -> set[str]:
    """Tests that fail in a copy without any change."""
    chosen = sorted(one for one in tests if "::" in one)
    parts = [chosen[start : start + _BATCH] for start in range(0, len(chosen), _BATCH)]
    with run_all([Task("", tuple(part), whole=True) for part in parts], trees) as results:
        return {test for result in results for test in result.failed}


def summed_up(mutants: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Share of caught changes of all that were drawn, and the same by kind and by how tests reach them."""
    caught = [one for one in mutants if one["verdict"] == "caught"]
    verdicts = dict(Counter(one["verdict"] for one in mutants))
    found: dict[str, Any] = {"share": round(len(caught) / max(1, len(mutants)), 4), "verdicts": verdicts}
    for name in ("kind", "reach"):
        all_of, caught_of = (Counter(one[name] for one in part) for part in (mutants, caught))
        found[f"by {name}"] = {key: f"{caught_of[key]} of {number}" for key, number in sorted(all_of.items())}
    return found


if __name__ == "__main__":
    sys.exit(main())
