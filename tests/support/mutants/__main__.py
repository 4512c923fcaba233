"""Apply each mutant of the table to a copy of the tree, run the fast tests that look at it, and say which one saw it.

A mutant counts as caught when a test fails. One that keeps tests from being collected is a mistake of the table.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mutants.catalog import MUTANTS
from mutants.forked import Result, Task, copy_tree, run_all, warm_up
from mutants.table import ROOT, Mutant, TableError

_EXAMPLE = """example:
  make test-mutants ARGS='--only quorum.half_takes_over'
  make test-mutants ARGS='--only "sampler.*" --show'
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one mutant."""

    name: str
    verdict: str
    """`caught`, `SURVIVED`, or `mistake`: the entry of the table cannot be judged."""
    place: str
    promise: str
    seconds: float
    by: str = ""
    """The test that saw it."""
    output: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    chosen = [one for one in MUTANTS if not options.only or any(fnmatch.fnmatch(one.name, o) for o in options.only)]
    if not chosen:
        print(f"no mutant is called {' or '.join(options.only)}; --list shows them", file=sys.stderr)
        return 2
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name:<40} {mutant.promise}")
        return 0
    try:
        texts = {mutant.name: mutant.source.read(ROOT) for mutant in chosen}
        changed = {mutant.name: mutant.applied(texts[mutant.name]) for mutant in chosen}
    except TableError as error:
        print(error, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no run is left behind
    progress = sys.stderr if options.output == "json" else sys.stdout
    began = time.monotonic()
    warm_up()
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        trees = [Path(scratch) / str(number) for number in range(options.jobs)]
        for tree in trees:
            copy_tree(tree)
        took = _unchanged(chosen, trees)
        if took is None:
            return 2
        print(f"{len(took)} test files pass without any mutant", file=progress, flush=True)
        tasks = [
            Task(m.name, tuple(sorted(m.tests, key=took.__getitem__)), m.source.path, changed[m.name]) for m in chosen
        ]
        tasks.sort(key=lambda task: -sum(took[file] for file in task.tests))  # the longest first
        by_name = {mutant.name: mutant for mutant in chosen}
        with run_all(tasks, trees) as results:
            for result in results:
                mutant = by_name[result.task.name]
                verdict = judge(mutant, texts[mutant.name], result)
                verdicts.append(verdict)
                print(
                    f"{verdict.verdict:<8} {verdict.name:<40} {verdict.seconds:5.1f} s  {verdict.by}",
                    file=progress,
                    flush=True,
                )
                if options.show or verdict.verdict == "mistake":
                    print(result.tail, file=progress, flush=True)
    return _tell(verdicts, time.monotonic() - began, options.output)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make test-mutants",
        description=__doc__,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="only these; may have * in it")
    parser.add_argument("--list", action="store_true", help="names and promises, and nothing else")
    parser.add_argument("--show", action="store_true", help="the end of what pytest printed, too")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="at a time (default: 2)")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    return parser.parse_args(arguments)


def _unchanged(chosen: Sequence[Mutant], trees: list[Path]) -> dict[str, float] | None:
    """Seconds that each test file takes without any mutant; None, and said why, where one fails then."""
    files = sorted({file for mutant in chosen for file in mutant.tests})
    took: dict[str, float] = {}
    failed = []
    with run_all([Task(file, (file,)) for file in files], trees) as results:
        for result in results:
            took[result.task.name] = result.seconds
            if result.code != 0 or not result.passed:
                failed.append(result)
    for result in failed:
        print(f"{result.task.name} fails without any mutant, so that mutants would prove nothing:", file=sys.stderr)
        print(result.tail, file=sys.stderr)
    return None if failed else took


def judge(mutant: Mutant, text: str, result: Result) -> Verdict:
    place = f"{mutant.source.path}:{mutant.line(text)}"
    if result.code == 1 and result.failed and not result.uncollected:
        verdict = "caught"
    elif result.code == 0 and result.passed:
        verdict = "SURVIVED"
    else:  # nothing collected, wrong usage, a run that did not end
        verdict = "mistake"
    by = result.failed[0] if verdict == "caught" else ""
    output = "" if verdict == "caught" else result.tail
    return Verdict(mutant.name, verdict, place, mutant.promise, round(result.seconds, 2), by, output)


def _tell(verdicts: Sequence[Verdict], seconds: float, output: str) -> int:
    passed = sum(one.verdict == "caught" for one in verdicts)
    others = [one for one in verdicts if one.verdict != "caught"]
    if output == "json":
        told = {"passed": passed, "failed": len(others), "seconds": round(seconds, 1)}
        print(json.dumps({**told, "mutants": [asdict(one) for one in sorted(verdicts, key=lambda one: one.name)]}))
        return 1 if others else 0
    if others:
        print("\nNot caught. A fast test is missing that sees this, or the entry of the table is wrong:")
        for one in others:
            print(f"  {one.verdict:<8} {one.name}\n           {one.place}\n           {one.promise}")
    print(f"{passed} passed, {len(others)} failed in {seconds:.0f} s: {passed} of {len(verdicts)} mutants are caught")
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main())
