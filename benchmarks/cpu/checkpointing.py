"""Our checkpoint engine beside memcpy, torch, DLRover, NVRx, AWS's client and S3 clients, in one run.

    python benchmarks/cpu/checkpointing.py --rounds 5
    python benchmarks/cpu/checkpointing.py --quick
    python benchmarks/cpu/checkpointing.py --campaigns replicas drain --update     # others stay as they were measured

Prints the tables, and writes checkpoint.json, checkpoint.md and checkpoint.svg.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
from pathlib import Path

from checkpoint.drain import measure_drain
from checkpoint.measure import Bench, measure_firsts, measure_saves, measure_training, order
from checkpoint.page import make_document, make_page, make_tables, raw_rounds
from checkpoint.peers import environments
from checkpoint.plot import draw
from checkpoint.replicas import measure_replicas
from checkpoint.systems import KINDS, MEMCPY, OURS, SYSTEMS, TORCH_SAVE
from publish import RESULTS, publish

from hyperpod_ext.processes import become_subreaper, kill_descendants

CAMPAIGNS = {
    "saves": lambda bench: [measure_saves(bench, kind) for kind in KINDS],
    "firsts": lambda bench: [measure_firsts(bench, kind) for kind in KINDS],
    "training": lambda bench: [measure_training(bench)],
    "replicas": lambda bench: [measure_replicas(bench)],
    "drain": lambda bench: [measure_drain(bench)],
}
QUICK_SYSTEMS = (OURS, MEMCPY, TORCH_SAVE)


def main() -> int:
    args = _parse()
    before = json.loads((args.out / "checkpoint.json").read_text()) if args.update else None
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # cleans up as Ctrl-C does
    become_subreaper()  # whatever a system leaves behind becomes ours, to be found and ended
    systems = order([SYSTEMS[name] for name in args.systems])
    survivals = 1 if args.quick else args.rounds
    envs = environments(_environments_of(args))
    bench = Bench(systems, envs, args.mbytes << 20, args.rounds, survivals, args.window_steps)
    if args.quick:
        bench.windows, bench.settle_s, bench.quiet_s = 1, 1.0, 0.0
    try:
        if args.quick:
            measure_saves(bench, "plain")
            measure_training(bench)
        for name in () if args.quick else args.campaigns:
            bench.campaign = name
            CAMPAIGNS[name](bench)
    except KeyboardInterrupt:
        print("\ninterrupted; nothing of it is left running", file=sys.stderr)
        if bench.rows:  # what was measured until then is not lost, and nothing is overwritten by it
            print(make_tables(make_document(bench, _command(args))))
        return 130
    finally:
        kill_descendants(os.getpid())
    document = make_document(bench, _command(args), before)
    print(make_tables(document))
    publish(args.out, "checkpoint", document, make_page(document), raw_rounds(bench))
    draw(document["medians"], args.out / "checkpoint.svg")
    return 1 if any(failure["system"] in QUICK_SYSTEMS for failure in bench.failures) else 0


def _environments_of(args: argparse.Namespace) -> set[str]:
    """Those that this run needs: of its systems, and of the S3 clients."""
    if args.quick:
        return set()
    peers = {peer for name in args.systems if (peer := SYSTEMS[name].peer)}
    return peers | ({"clients"} if "drain" in args.campaigns else set())


def _command(args: argparse.Namespace) -> str:
    command = ["python", "benchmarks/cpu/checkpointing.py", "--rounds", str(args.rounds), "--mbytes", str(args.mbytes)]
    command += ["--window-steps", str(args.window_steps)] + ["--quick"] * args.quick
    for name, every in (("systems", SYSTEMS), ("campaigns", CAMPAIGNS)):
        if list(getattr(args, name)) != list(every) and not args.quick:
            command += [f"--{name}", *getattr(args, name)]
    return shlex.join(command)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="times each system is asked (default: 5)")
    parser.add_argument("--mbytes", type=int, help="MiB of state a rank (default: 512)")
    parser.add_argument("--window-steps", type=int, default=1, help="least steps of a window of training (default: 1)")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, metavar="NAME", help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--campaigns", nargs="+", choices=CAMPAIGNS, metavar="NAME", help=f"of {', '.join(CAMPAIGNS)}")
    parser.add_argument("--quick", action="store_true", help="smoke run: little state, ours and torch.save only")
    parser.add_argument("--update", action="store_true", help="keep what is known of other campaigns and systems")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()
    args.rounds = args.rounds or (2 if args.quick else 5)
    args.mbytes = args.mbytes or (16 if args.quick else 512)
    args.systems = args.systems or list(QUICK_SYSTEMS if args.quick else SYSTEMS)
    args.campaigns = args.campaigns or list(CAMPAIGNS)
    if args.rounds < 1 or args.mbytes < 1 or args.window_steps < 1:
        parser.error("--rounds, --mbytes and --window-steps: at least 1")
    if args.update and not (args.out / "checkpoint.json").exists():
        parser.error(f"--update: there is no checkpoint.json in {args.out}")
    return args


if __name__ == "__main__":
    sys.exit(main())
