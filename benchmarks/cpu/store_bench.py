"""The ranks' own store by number of ranks: a job's start, and a lost node, counted at the servers of all ranks.

    python benchmarks/cpu/store_bench.py --sizes 1024 4096

Prints the table, and writes store.json and store.md.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

from publish import RESULTS, publish
from rank_store.measure import measure_in_processes
from rank_store.page import make_document, make_page, make_table

FILES_A_RANK = 24
"""Open files of one rank here: its listener, its selector, and both ends of about eight connections."""


def main() -> int:
    args = _parse()
    rows = []
    for ranks in args.sizes:
        began = time.monotonic()
        phases = measure_in_processes(ranks, min(args.each, ranks // 2), args.workers)
        rows.append({"ranks": ranks, "phases": phases})
        print(f"{ranks} ranks in {time.monotonic() - began:.0f} s", file=sys.stderr)
    command = "python benchmarks/cpu/store_bench.py --sizes " + " ".join(str(size) for size in args.sizes)
    document = make_document(rows, args.workers, args.each, command)
    print(make_table(document))
    publish(args.out, "store", document, make_page(document))
    return 0 if all(document["aims"].values()) else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 4096, 16384], help="numbers of ranks")
    parser.add_argument("--workers", type=int, default=8, help="ranks of each node (default: 8)")
    parser.add_argument("--each", type=int, default=512, help="ranks in one process (default: 512)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()
    if any(size % (16 * args.workers) for size in args.sizes) or args.each % args.workers:
        parser.error("numbers of ranks must be multiples of 16 nodes, those of a process of whole nodes")
    if why := _missing(max(args.sizes), args.each):
        parser.error(why)
    return args


def _missing(ranks: int, each: int) -> str:
    """What this machine does not allow; empty: nothing that was looked at."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < each * FILES_A_RANK:
        return f"a process may open {files} files, and {each} ranks need {each * FILES_A_RANK}: use a smaller --each"
    threads = int(Path("/proc/sys/kernel/pid_max").read_text())
    if threads < 1.2 * ranks:
        return f"this machine has {threads} threads (kernel.pid_max), and each of {ranks} ranks has one"
    return ""


if __name__ == "__main__":
    sys.exit(main())
