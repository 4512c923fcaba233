"""One schedule: a job, some faults, and what they must not change. Everything follows from the seed, but for
the moments at which threads run.

`python -m schedules.schedule FIRST LAST` runs many, and prints those that fail.
"""

from __future__ import annotations

import faulthandler
import os
import random
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .faults import FAULTS, Interruptions
from .node import speed_up
from .states import Kind
from .world import Ended, Setting, World

STANDING_STILL_S = 120
"""A schedule takes a fifth of a second, and seconds on a machine with other work."""


def setting_of(rng: random.Random) -> Setting:
    kind = rng.choice([Kind("same"), Kind("shard"), Kind("shard"), Kind("alike"), Kind("alike", differ=True)])
    peers = rng.choice([0, 1, 2, 3, 6])
    durable = rng.choice([0, 1, 2, 4]) if peers else rng.choice([1, 2, 3])
    nodes, per_node = rng.choice([(2, 1), (2, 1), (2, 2), (3, 1), (4, 1)])
    return Setting(
        nodes,
        per_node,
        kind,
        overlap=rng.random() < 0.5,
        when_busy=rng.choice(["wait", "skip", "supersede", "supersede"]),
        memory_every=rng.choice([1, 1, 1, 2]),
        peer_every=peers,
        durable_every=durable,
        keep=rng.choice([1, 2, 3]),
    )


def scratch() -> str | None:
    """Memory where there is some for files: a durable store syncs every one of them."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


@contextmanager
def _watched_threads() -> Iterator[list[str]]:
    """What threads ended with, other than the deaths that faults brought them."""
    failures: list[str] = []

    def ended(args: Any) -> None:
        if not issubclass(args.exc_type, SystemExit):
            failures.append(f"{args.thread and args.thread.name}: {args.exc_value!r}")

    before, threading.excepthook = threading.excepthook, ended
    try:
        yield failures
    finally:
        threading.excepthook = before


def run(seed: int, counts: Counter[str] | None = None) -> list[str]:
    """One schedule; returns what happened. Raises AssertionError, with that, where something must not have."""
    rng, story = random.Random(seed), []
    setting = setting_of(rng)
    story.append(f"{setting}")
    with tempfile.TemporaryDirectory(prefix="test-", dir=scratch()) as folder, _watched_threads() as failures:
        world = World(rng, setting, Path(folder), story.append)
        interruptions = Interruptions(world, rng.choice([0.0, 0.1, 0.25]))
        world.interrupt, world.interrupt_commit = interruptions.settling, interruptions.committing
        try:
            world.start(setting.nodes, setting.per_node)
            for _ in range(rng.randint(2, 5)):
                world.train(rng.randint(0, 3))
                interruptions.left = 3
                fault = rng.choices(list(FAULTS), list(FAULTS.values()))[0]
                story.append(f"--- at {world.step}: {fault.__name__}")
                if counts is not None:
                    counts[fault.__name__] += 1
                fault(world)
                world.settle_membership()
            world.train(1)
            assert not failures, f"threads ended with {failures}"
        except Ended as ended:
            story.append(f"ended: {ended}")
            if counts is not None:
                counts["ended"] += 1
        except BaseException as error:
            error.add_note("\n".join([f"HPX_SCHEDULE_SEED={seed}", *story, f"threads ended with {failures}"]))
            raise
        finally:
            world.close()
    return story


def main() -> None:
    first, last = int(sys.argv[1]), int(sys.argv[2])
    failed = 0
    counts: Counter[str] = Counter()
    speed_up()
    for seed in range(first, last):
        print(f"seed {seed}", flush=True)
        faulthandler.dump_traceback_later(STANDING_STILL_S, exit=True, file=sys.stdout)
        try:
            run(seed, counts)
        except Exception:
            failed += 1
            traceback.print_exc()
        faulthandler.cancel_dump_traceback_later()
    print(f"{last - first} schedules, {failed} failed, {dict(counts)}", flush=True)
    os._exit(bool(failed))  # threads of lost nodes that wait for minutes need not be waited for


if __name__ == "__main__":
    main()
