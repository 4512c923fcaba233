"""`python -m cluster FIRST [LAST] [--nodes 16]`: run these seeds; the story of one, or of each that fails."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from .cluster import run_seed, run_seeds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster", description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int, nargs="?", help="the first that is not run; by itself the next")
    parser.add_argument("--nodes", type=int, help="in place of what each seed says")
    given = parser.parse_args()
    first, nodes = given.first, given.nodes
    last = first + 1 if given.last is None else given.last
    began, ends, failed = time.process_time(), Counter[str](), []
    outcomes = run_seeds(first, last, nodes=nodes) if last - first > 1 else [run_seed(first, tells=True, nodes=nodes)]
    for outcome in outcomes:
        ends[", ".join(outcome.states) or "nobody ended it"] += 1
        if outcome.violations:
            failed.append(outcome.seed)
        if last - first == 1 or (outcome.violations and len(failed) < 4):
            print("\n".join(outcome.story))
            print(f"seed {outcome.seed}: {'; '.join(outcome.violations) or 'as promised'}\n")
    spent = time.process_time() - began
    print(f"{last - first} seeds in {spent:.1f} CPU seconds: {dict(ends)}; {len(failed)} failed: {failed[:20]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
