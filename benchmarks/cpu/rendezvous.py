"""Process groups without a central store, beside torch's TCPStore: opened, opened again, closed, and cut.

    python benchmarks/cpu/rendezvous.py --rounds 3

Prints the tables, and writes rendezvous.json, rendezvous.md and rendezvous.svg.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from publish import RESULTS, publish
from rendezvous_page import draw, make_document, make_page, make_tables
from rendezvous_sides import SIDES, SideError, measure_freed, measure_opening, measure_stock_wait

from hyperpod_ext.processes import become_subreaper, kill_descendants

STOCK_TIMEOUT_S = 3.0


def main() -> int:
    args = _parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # cleans up as Ctrl-C does
    become_subreaper()
    gc.freeze()  # or the collector of each forked process copies our memory
    opened: list[dict[str, Any]] = []
    freed: list[dict[str, Any]] = []
    try:
        for number in range(args.rounds):
            for size in args.sizes:
                for side in SIDES[number % len(SIDES) :] + SIDES[: number % len(SIDES)]:
                    load = round(os.getloadavg()[0], 2)
                    opened.append({"side": side, "size": size, "load": load, **asdict(measure_opening(side, size))})
                print(f"round {number + 1} of {args.rounds}: {size} ranks opened and closed", file=sys.stderr)
        for size in args.sizes:
            for numel in (1, 1 << 20):
                faults = max(2, args.faults if size <= 16 else args.faults // 4)
                freed.append({"size": size, "numel": numel, **asdict(measure_freed(size, faults, numel))})
            print(f"{size} ranks killed and cut", file=sys.stderr)
        stock = measure_stock_wait(STOCK_TIMEOUT_S)
    except SideError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; nothing of it is left running", file=sys.stderr)
        return 130
    finally:
        kill_descendants(os.getpid())
    command = f"python benchmarks/cpu/rendezvous.py --rounds {args.rounds} --faults {args.faults} --sizes "
    document = make_document(opened, freed, stock, STOCK_TIMEOUT_S, command + " ".join(map(str, args.sizes)))
    print(make_tables(document))
    publish(args.out, "rendezvous", document, make_page(document), {"opened": opened, "freed": freed})
    draw(document, args.out / "rendezvous.svg")
    return 0 if all(document["aims"].values()) else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="times each side is measured at each size (default: 3)")
    parser.add_argument(
        "--faults", type=int, default=20, help="ranks killed at each size, fewer from 32 on (default: 20)"
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8, 16, 32, 64], help="numbers of ranks")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()
    if args.rounds < 1 or min(args.sizes) < 4:
        parser.error("at least 1 round, and 4 ranks")
    return args


if __name__ == "__main__":
    sys.exit(main())
