"""A writer that is killed with SIGKILL at any moment: nothing half written is seen, and nothing is left locked."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ext.runtime.data import TokenStore, build
from hyperpod_ext.runtime.data.convert.check import check
from hyperpod_ext.runtime.data.convert.convert import Recipe, prepare
from hyperpod_ext.runtime.data.token_store.files import TEMPORARY, FileLock
from hyperpod_ext.runtime.data.token_store.writer import LOCK

TEXTS = [f"document {number} " * (number % 50 + 1) for number in range(4000)]
OPTIONS: dict[str, Any] = {"segment_bytes": 8192, "eod": 0}


def start_writer(file: Path, place: Path) -> int:
    """A process that converts until it is done or killed."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        build(file, place=place, **OPTIONS)
        code = 0
    finally:
        os._exit(code)


@pytest.mark.slow
@pytest.mark.parametrize("most", [40, pytest.param(100, marks=pytest.mark.thorough)])
def test_kills_leave_no_damage_no_lock_and_the_same_store(most: int, tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    undisturbed = build(file, place=tmp_path / "undisturbed", **OPTIONS)
    folder = prepare(Recipe((str(file),), **OPTIONS), tmp_path / "killed").folder
    chance = random.Random(0)
    kills, seen, left, stores = 0, 0, 0, 0
    newest, longest_s = 0, 0.02
    while kills < most:
        pid = start_writer(file, tmp_path / "killed")
        time.sleep(
            chance.uniform(0.0, longest_s)
        )  # the moment of the kill is the test's chance, not its synchronisation
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            stores += 1
            assert TokenStore(folder).fingerprint == undisturbed.fingerprint
            (folder / "store.json").unlink()  # begin anew
            for path in folder.glob("seg-*"):
                path.unlink()
            newest = 0
            continue
        kills += 1
        left += len(list(folder.glob(f".*{TEMPORARY}")))
        if not (folder / "about.json").exists():
            longest_s *= 1.1
            continue
        found = check(folder)
        assert found.problems == []
        assert found.segments >= newest  # what was published stays
        longest_s *= 1.1 if found.segments == newest else 0.8  # so that some get somewhere, on any machine
        newest = found.segments
        seen += found.segments
        lock = FileLock(folder / LOCK)
        assert lock.acquire()  # at once
        lock.release()
    print(f"{kills} kills, {seen} segments looked at, {left} unfinished files left, {stores} stores finished between")
    assert seen > most  # or nothing was tested
    assert left > 0
    last = build(file, place=tmp_path / "killed", **OPTIONS)
    assert last.fingerprint == undisturbed.fingerprint
    assert [each.tobytes() for each in last] == [each.tobytes() for each in undisturbed]
    assert not list(folder.glob(f".*{TEMPORARY}"))  # swept
