"""`python -m cluster FIRST [LAST]`: run these seeds; the story of one, or of each that fails."""

from __future__ import annotations

import sys
import time
from collections import Counter

from .cluster import run_seed, run_seeds


def main(arguments: list[str]) -> int:
    first = int(arguments[0])
    last = int(arguments[1]) if len(arguments) > 1 else first + 1
    began, ends, failed = time.process_time(), Counter[str](), []
    outcomes = run_seeds(first, last) if last - first > 1 else [run_seed(first, tells=True)]
    for outcome in outcomes:
        ends[", ".join(outcome.states) or "nobody ended it"] += 1
        if outcome.violations:
            failed.append(outcome.seed)
        if last - first == 1 or (outcome.violations and len(failed) < 4):
            print("\n".join(outcome.story))
            print(f"seed {outcome.seed}: {'; '.join(outcome.violations) or 'as promised'}\n")
    spent = time.process_time() - began
    print(f"{last - first} seeds in {spent:.1f} s: {dict(ends)}; {len(failed)} failed: {failed[:20]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
