"""A durable tier in which a stranger has written: each command ends soon, stays small, and touches nothing outside."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner
from hostile_tree import JOB, SECRET, HostileTree, outside_of, save
from hyperpod_ext.cli import hp_ext

from hyperpod_ext.config.checkpoint.file import FileTier
from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.runtime.memory_server.restore_cache import RestoreCache
from hyperpod_ext.runtime.storage.checkpoints import Checkpoints
from hyperpod_ext.runtime.storage.open import open_tier

MOST_SECONDS, MOST_BYTES = 10.0, 120 << 20
"""CPU of one command, and memory beyond that of a process that has imported what it needs: 80 MB."""
CONTROL = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
EXIT_CODES = {0, 3, 4, 5, 6, 7}


@pytest.mark.parametrize("seed", [4, 5, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(4))])
def test_a_hostile_tier_costs_little_and_nothing_outside(tmp_path: Path, seed: int) -> None:
    check_in_process(tmp_path, seed)


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(1000, 1300, 10))
def test_300_hostile_tiers_cost_little_and_nothing_outside(tmp_path: Path, first: int) -> None:
    for seed in range(first, first + 10):
        check_in_process(tmp_path / str(seed), seed)


def check_in_process(folder: Path, seed: int) -> None:
    """In a process of its own, as memory is counted by process; one that hangs is killed."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(300)
        try:
            _check(folder, seed)
        except BaseException:
            os.write(write, traceback.format_exc().encode(errors="replace")[-60_000:])
            os._exit(1)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as told:
        text = told.read().decode()
    assert os.waitpid(pid, 0)[1] == 0, f"seed {seed}: {text or 'it hung'}"


def _check(folder: Path, seed: int) -> None:
    base, outside = folder / "tier", folder / "outside"
    base.mkdir(parents=True)
    tree = HostileTree(base / JOB, outside, seed)
    tree.grow()
    before = outside_of(outside)
    (secret := folder / "secret").write_bytes(SECRET)
    secret.chmod(0o600)
    tier = FileTier(path=str(base), keep=1)
    checkpoints = Checkpoints(open_tier(tier, JOB), job=JOB, secret=SECRET)
    uploader = SimpleNamespace(checkpoints=checkpoints, url=checkpoints.store.url, tier=tier)
    cache = RestoreCache([cast(Any, uploader)], cast(Any, None), cast(Any, None))

    def restore() -> None:
        offers = cache.offers()
        assert not offers.unreachable, offers
        newest = offers.checkpoints[0]
        assert (newest["step"], newest["generation"]) == (20, 1)
        assert offers.generation < 100_000
        for rank in ("0", "1"):
            found = checkpoints.read(next(one for one in checkpoints.found() if one.folder == newest["folder"]))
            image = bytearray(int(found["ranks"][rank]["nbytes"]))
            checkpoints.read_image(newest["folder"], found, rank, memoryview(image))

    def unless_in_the_way(action: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                action()
            except HyperpodExtError as error:
                if not re.search(r"[Rr]emove|not a regular file", str(error)):
                    raise  # it has to name what is in the way

        return run

    def write_on() -> None:
        generation = checkpoints.newest_generation() + 1
        checkpoints.fence(generation, 20, "next run")
        save(checkpoints, 30, generation)
        assert checkpoints.found()[0].step >= 30
        checkpoints.prune(1, None, ())
        assert any(one.step == 30 and checkpoints._is_ours(one) for one in checkpoints.found())

    def command(*arguments: str) -> Callable[[], None]:
        def run() -> None:
            done = CliRunner().invoke(hp_ext, [*arguments])
            if done.exception is not None and not isinstance(done.exception, SystemExit):
                raise done.exception
            assert done.exit_code in EXIT_CODES, (done.exit_code, done.output)
            assert not CONTROL.search(done.output), (arguments, CONTROL.search(done.output), done.output[-2000:])
            assert len(done.output) < 200_000

        return run

    place, copied = str(base / JOB), folder / "copied" / JOB
    known = ("--secret-file", str(secret))
    actions: dict[str, Callable[[], None]] = {"start": unless_in_the_way(checkpoints.store.check), "restore": restore}
    for word in ("list", "show"):
        actions |= {
            word: command("checkpoints", word, place, *known),
            f"{word} json": command("checkpoints", word, place, "-o", "json"),
        }
    actions["report"] = command("report", f"file://{place}")
    actions["top"] = command("top", f"file://{place}", "--once")
    actions["list jobs"] = command("list", "--kept", str(base))
    actions["show a made up one"] = command("checkpoints", "show", place, "--step", "21")
    actions["verify"] = command("checkpoints", "verify", place, "--all", *known)
    actions["copy"] = command("checkpoints", "copy", place, str(copied), *known)
    actions["copy another"] = command("checkpoints", "copy", place, str(copied), "--step", "30", *known)
    actions["a look at prune"] = command("checkpoints", "prune", place, "--keep", "1", "--dry-run")
    actions["prune"] = command("checkpoints", "prune", place, "--keep", "1", "--yes", *known)
    actions["restore what is left"] = restore
    actions["go on"] = unless_in_the_way(write_on)
    for name, action in actions.items():
        _measured(name, action, tree)
        assert outside_of(outside) == before, f"{name} touched what is outside; {tree.made}"


def _measured(name: str, action: Callable[[], None], tree: HostileTree) -> None:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    began, cpu, held = time.monotonic(), time.process_time(), _memory("VmRSS")
    try:
        action()
    except BaseException as error:
        raise AssertionError(f"{name}: {error!r}; {tree.made}") from error
    used, grown = time.process_time() - cpu, _memory("VmHWM") - held
    if os.environ.get("HPX_TELL"):
        sys.stderr.write(f"{name}: {used:.2f} s of CPU, {time.monotonic() - began:.2f} s, {grown >> 20} MiB\n")
    assert used < MOST_SECONDS, f"{name} took {used:.1f} s of CPU; {tree.made}"
    assert grown < MOST_BYTES, f"{name} took {grown >> 20} MiB; {tree.made}"


def _memory(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10
