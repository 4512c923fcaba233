"""`make test` many times in a row, as different people run it; one line a run, in build/series/log.txt, too.

`python tests/support/series.py` makes twenty runs of the last commit: ten plain ones, and others with SIGINT ignored
(as under `nohup … &`), as another user, beside two busy processes, and in a folder whose name has a space. Others:
`--runs plain=2 user=1`. Runs go on after a red one, whose log stays; the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OTHER_USER = "nobody"
_OF_A_MAKE_ABOVE = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
_SUMMARY = re.compile(r"^.*\b\d+ (?:passed|failed|error).* in [\d.]+s.*$", re.MULTILINE)


def ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """That many processes compute meanwhile."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Variant:
    """How one person runs the suite."""

    folder: str = "plain"
    neighbours: int = 0
    before_exec: Callable[[], None] | None = None
    user: str | None = None


VARIANTS = {
    "plain": Variant(),
    "sigint": Variant(before_exec=ignore_interrupts),
    "neighbours": Variant(neighbours=2),
    "space": Variant(folder="a folder with a space"),
    "user": Variant(folder="user", user=OTHER_USER),
}
TWENTY = {"plain": 10, "sigint": 3, "user": 3, "neighbours": 3, "space": 1}


def in_turn(runs: dict[str, int]) -> list[str]:
    """Names of variants, spread over the series."""
    places = [((turn + 0.5) / count, name) for name, count in runs.items() for turn in range(count)]
    return [name for _, name in sorted(places)]


def python_of(variant: Variant) -> str:
    """A Python of which the variant's user may run the program.

    Raises:
        SystemExit: there is none.
    """
    for found in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        # by way of env: what setpriv starts itself may still go where only its own user may
        command = [*as_user(variant), "env", found, "-c", "import ensurepip"]
        if shutil.which(found) and subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return found
    raise SystemExit(f"{variant.user} can run no Python 3.11 or newer here")


def as_user(variant: Variant) -> list[str]:
    return ["setpriv", f"--reuid={variant.user}", "--clear-groups"] if variant.user else []


def make(variant: Variant, clone: Path, target: str, log: Path) -> int:
    """Exit code of `make TARGET` in this clone, as the variant's user."""
    home = clone.parent / f"home of {clone.name}"
    home.mkdir(exist_ok=True)
    if variant.user:
        shutil.chown(home, variant.user)
    command = [*as_user(variant), "make", target, f"PYTHON={python_of(variant)}"]
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_MAKE_ABOVE}
    environment |= {"HOME": str(home)} if variant.user else {}
    with log.open("w") as output, busy(variant.neighbours):
        return subprocess.run(
            command, cwd=clone, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            preexec_fn=variant.before_exec, check=False,
        ).returncode  # fmt: skip


def prepare(variant: Variant, folder: Path) -> Path:
    """A clone of the last commit with its environment.

    Raises:
        SystemExit: `make ready-with-cdk` failed there.
    """
    clone = folder / variant.folder
    if not (clone / ".git").exists():
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    else:
        for step in (["fetch", "--quiet", "origin"], ["reset", "--quiet", "--hard", "origin/HEAD"]):
            subprocess.run(["git", "-c", "safe.directory=*", *step], cwd=clone, check=True)
    if variant.user:
        subprocess.run(["chown", "-R", variant.user, str(clone)], check=True)
    log = folder / f"{variant.folder}.ready.log"
    if make(variant, clone, "ready-with-cdk", log):
        raise SystemExit(f"make ready-with-cdk failed in {clone}; see {log}")
    return clone


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    arguments.add_argument("--folder", type=Path, default=ROOT / "build" / "series", help="of clones and logs")
    arguments.add_argument("--runs", nargs="*", metavar="VARIANT=N", help=f"of {', '.join(VARIANTS)}")
    options = arguments.parse_args()
    chosen = dict(one.partition("=")[::2] for one in options.runs or ())
    if unknown := set(chosen) - set(VARIANTS):
        arguments.error(f"no variants: {', '.join(sorted(unknown))}; there are {', '.join(VARIANTS)}")
    runs = {name: int(count) for name, count in chosen.items()} or TWENTY
    if any(VARIANTS[name].user for name in runs) and os.geteuid() != 0:
        arguments.error("another user's runs need root; leave them out with --runs")
    options.folder.mkdir(parents=True, exist_ok=True)
    clones = {VARIANTS[name].folder: prepare(VARIANTS[name], options.folder) for name in runs}
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    red = 0
    for number, name in enumerate(in_turn(runs), 1):
        log = options.folder / f"{commit}-{number}-{name}.log"
        began = time.monotonic()
        failed = make(VARIANTS[name], clones[VARIANTS[name].folder], "test", log)
        summaries = _SUMMARY.findall(log.read_text(errors="replace"))
        took = f"{(time.monotonic() - began) / 60:.1f} min"
        load = f"load {os.getloadavg()[2]:.1f}"
        outcome = summaries[-1] if summaries else "no summary"
        at = f"{datetime.now(UTC):%Y-%m-%d %H:%M}"
        line = f"{at} {commit} {number:2} {name:10} {'RED' if failed else 'green'} {took}, {load}: {outcome}\n"
        sys.stdout.write(line)
        sys.stdout.flush()
        with (options.folder / "log.txt").open("a") as kept:
            kept.write(line)
        red += bool(failed)
    return int(red > 0)


if __name__ == "__main__":
    raise SystemExit(main())
