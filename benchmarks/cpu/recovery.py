"""From `kill -9` to the first new step: hyperpod_ext compared with torchrun, NVRx and torchft in one run.

    python benchmarks/cpu/recovery.py --rounds 5

NVRx and torchft get environments of their own below $(VENV)/bench; where one cannot be made, or fails, that is told
and the others are measured. Prints all with their phases and the ratios, and writes recovery.json, recovery.md and
recovery.svg.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from checkpoint.peers import environment
from publish import RESULTS, publish
from recovery_page import make_document, make_page, make_table, raw_rounds
from recovery_peers import PEERS, measure_nvrx, measure_torchft
from recovery_plot import draw
from recovery_report import NVRX, OURS, TORCHFT, TORCHRUN, Recovery
from recovery_sides import EXAMPLE, Setup, SideError, measure_ours, measure_torchrun

from hyperpod_ext.config.fault_injection import KillFault
from hyperpod_ext.config.files.load import load
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.processes import become_subreaper, kill_descendants

SIDES: dict[str, Callable[[Setup, Path], Recovery]] = {
    OURS: measure_ours,
    TORCHRUN: measure_torchrun,
    NVRX: measure_nvrx,
    TORCHFT: measure_torchft,
}
_GRACE_S = 10.0
"""For what a side started to end by itself, once the side has."""


def main() -> int:
    args = _parse()
    setup = Setup(load(JobConfig, EXAMPLE), args.steps, args.width, args.layers, args.kill.rank, args.kill.step)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # cleans up as Ctrl-C does
    become_subreaper()  # whatever a side leaves behind becomes ours, to be found and ended
    rounds = []
    sides = [side for side in SIDES if side in (OURS, TORCHRUN, *args.peers)]
    failed = {side: "left out by --peers" for side in SIDES if side not in sides}
    failed |= {side: why for side in sides if side in PEERS and (why := environment(PEERS[side].name).failure)}
    try:
        for number in range(args.rounds):
            rounds.append(
                _measure_round(number, args.rounds, setup, [one for one in sides if one not in failed], failed)
            )
    except SideError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; nothing of it is left running", file=sys.stderr)
        return 130
    document = make_document(rounds, setup, failed)
    print(make_table(document))
    publish(args.out, "recovery", document, make_page(document), raw_rounds(rounds))
    draw(document["medians"], args.out / "recovery.svg")
    return 0 if all(document["checks"].values()) else 1


def _measure_round(number: int, of: int, setup: Setup, sides: list[str], failed: dict[str, str]) -> dict[str, Recovery]:
    """All sides, one after the other; who goes first alternates. A peer that fails is noted in `failed`."""
    order = sides if number % 2 == 0 else sides[::-1]
    found = {}
    for side in order:
        load_average = os.getloadavg()[0]
        try:
            with _nothing_left(side), tempfile.TemporaryDirectory(prefix="bench-") as scratch:
                found[side] = replace(SIDES[side](setup, Path(scratch)), load_average=load_average)
        except (SideError, ValueError) as error:
            if side not in PEERS:
                raise SideError(f"round {number + 1}, {side}: {error}") from None
            print(f"round {number + 1} of {of}: {side} failed: {error}", file=sys.stderr)
            failed[side] = f"it failed in round {number + 1}: {str(error).splitlines()[0]}"
            continue
        seconds = found[side].first_new_step
        print(f"round {number + 1} of {of}: {side}, first new step {seconds:.2f} s after the kill", file=sys.stderr)
    return {side: found[side] for side in sides if side in found}


@contextlib.contextmanager
def _nothing_left(side: str) -> Iterator[None]:
    """Ends what the block left running; after a good end it is an error if there is anything."""
    try:
        yield
        deadline = time.monotonic() + _GRACE_S
        while _reap() and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        left = kill_descendants(os.getpid())
    if left:
        raise SideError(f"{side} left {len(left)} processes running")


def _reap() -> bool:
    """Take leave of children that have ended; whether any still runs."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="times each side is measured (default: 5)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each job (default: 20)")
    parser.add_argument("--width", type=int, default=128, help="width of the model (default: 128)")
    parser.add_argument("--layers", type=int, default=4, help="blocks of the model (default: 4)")
    parser.add_argument("--kill", type=KillFault.parse, default="rank=2@step=13", metavar="rank=R@step=S")
    parser.add_argument(
        "--peers", nargs="*", choices=PEERS, default=list(PEERS), help="besides torchrun (default: all)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()
    if not 2 < args.kill.step <= args.steps:
        parser.error(f"--kill: the step must be one of 3 to {args.steps}")
    if args.rounds < 1:
        parser.error("--rounds: at least 1")
    return args


if __name__ == "__main__":
    sys.exit(main())
