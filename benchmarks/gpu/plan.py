"""Experiments with process groups, copies and faults on a GPU, in the order of their worth.

    python benchmarks/gpu/plan.py --limit-s 540 --out build/gpu              all of them
    python benchmarks/gpu/plan.py --limit-s 540 --out build/gpu              what the first command had no time for
    python benchmarks/gpu/plan.py --only E1,E2 --fake gloo --out build/fake  two of them, on CPU with gloo

Needs torch, and no installation. Prints a line for each experiment, and writes results.json and results.md after each.
The exit code is 1 when one has failed.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
NO_GPU = "No GPU here, so nothing was run. `make test-gpu FAKE=gloo` goes through the plan on CPU."


def main(arguments: list[str] | None = None) -> int:
    import catalog
    import machine
    import results
    import runner

    args = _parse([one.name for one in catalog.PLAN], arguments)
    chosen = args.only or [one.name for one in catalog.PLAN if one.measures or not args.bench]
    if args.list:
        print("\n".join(f"{one.name:<4} {one.limit_s:4.0f} s at most  {one.shows}" for one in catalog.PLAN))
        return 0
    if not args.fake and not machine.has_gpu():
        print(NO_GPU)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # cleans up as Ctrl-C does
    try:
        plan = runner.Plan(
            catalog.PLAN, chosen, out=args.out, fake=bool(args.fake), limit_s=args.limit_s, again=bool(args.only)
        )
        plan.run()
    except runner.PlanError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; {args.out} has what was found, and the same command goes on", file=sys.stderr)
        return 130
    print(f"{args.out / results.PAGE_FILE} has the figures")
    return int(any(plan.results.of(name).outcome == "failed" for name in chosen))


def _parse(known: list[str], arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-s", type=float, default=540.0, help="seconds for all of it (default: 540)")
    parser.add_argument("--only", type=_names(known), default=(), metavar="E1,E2", help="run these, run before or not")
    parser.add_argument("--fake", choices=("gloo",), help="run on CPU, with gloo in place of NCCL")
    parser.add_argument(
        "--out", type=Path, default=Path("build/gpu"), help="folder of the results (default: build/gpu)"
    )
    parser.add_argument("--bench", action="store_true", help="only what measures")
    parser.add_argument("--list", action="store_true", help="show the experiments, and stop")
    return parser.parse_args(arguments)


def _names(known: list[str]) -> Callable[[str], tuple[str, ...]]:
    def read(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"no experiment {', '.join(unknown)}; there are {', '.join(known)}")
        return names

    return read


if __name__ == "__main__":
    sys.exit(main())
