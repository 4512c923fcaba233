"""Conversion in a process of its own, beside who trains; killed, and taken over by another rank."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ext.errors import HyperpodExtError, JobFailedError
from hyperpod_ext.processes import descendants
from hyperpod_ext.runtime.data import Conversion, TokenStore, build, follow

SLOW = """\
import time
from pathlib import Path
def encode(text):
    while text.startswith("document 300 ") and not Path(__file__).with_name("goes-on").exists():
        time.sleep(0.01)
    return list(text.encode())
encode.identity = "slow"
"""
"""Stands still halfway until the test has looked."""


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "slow_words.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    file = tmp_path / "x.jsonl"
    file.write_text("".join(json.dumps({"text": f"document {number} " * 40}) + "\n" for number in range(600)))
    return file


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {"place": tmp_path / "stores", "tokenizer": "slow_words:encode", "segment_bytes": 20_000}


def go_on(dataset: Path) -> None:
    (dataset.parent / "modules" / "goes-on").touch()


def converters() -> list[int]:
    """Processes of ours that convert."""
    found = []
    for pid in descendants(os.getpid()):
        if b"data.convert.background" in Path(f"/proc/{pid}/cmdline").read_bytes():
            found.append(pid)
    return found


def test_reading_begins_before_conversion_ends(dataset: Path, options: dict[str, Any]) -> None:
    counted: list[int] = []
    conversion = follow(dataset, on_bytes=counted.append, **options)
    store = conversion.store()
    assert store.wait(documents=1, timeout_s=60) < 600
    assert not store.finished
    assert bytes(store[0]).startswith(b"document 0")
    part = store.prefix()
    assert len(part) >= 1
    go_on(dataset)
    whole = conversion.wait(timeout_s=60)
    assert len(whole) == 600
    assert [each.tobytes() for each in store] == [each.tobytes() for each in whole]
    assert sum(counted) == dataset.stat().st_size
    assert whole.fingerprint == build(dataset, **options).fingerprint


@pytest.mark.thorough
def test_when_the_converter_is_killed_another_rank_goes_on(dataset: Path, options: dict[str, Any]) -> None:
    # ranks as processes: the first has the converter, and dies with it
    pid = os.fork()
    if pid == 0:
        follow(dataset, **options).wait()
        os._exit(0)
    second: Conversion | None = None
    try:
        while not list(options["place"].glob("*/seg-*")):
            assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        second = follow(dataset, **options)  # stands by
        store = second.store()
        before = store.refresh()
        assert before < 600
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    go_on(dataset)
    whole = second.wait(timeout_s=60)
    assert len(whole) == 600
    assert whole.fingerprint == build(dataset, **options).fingerprint


def test_a_converter_that_dies_alone_is_told(dataset: Path, options: dict[str, Any]) -> None:
    conversion = follow(dataset, **options)
    conversion.store().wait(documents=1, timeout_s=60)
    (converter,) = converters()
    os.kill(converter, signal.SIGKILL)
    with pytest.raises(JobFailedError, match=r"killed by signal 9(.|\n)*continues after the newest segment"):
        conversion.wait(timeout_s=60)
    go_on(dataset)
    assert len(follow(dataset, **options).wait(timeout_s=60)) == 600


def test_its_mistakes_are_those_of_the_dataset(dataset: Path, options: dict[str, Any]) -> None:
    with dataset.open("a") as file:
        file.write("{\n")
    with pytest.raises(HyperpodExtError, match=r"x\.jsonl:601: not JSON"):
        follow(dataset, **options | {"tokenizer": "bytes"}).wait(timeout_s=60)


def test_a_function_of_this_process_converts_in_a_thread(dataset: Path, options: dict[str, Any]) -> None:
    conversion = follow(dataset, **options | {"tokenizer": lambda text: [len(text)]})
    assert len(conversion.wait(timeout_s=60)) == 600
    assert converters() == []


def test_stopping_leaves_no_process_and_what_was_published(dataset: Path, options: dict[str, Any]) -> None:
    conversion = follow(dataset, **options)
    conversion.store().wait(documents=1, timeout_s=60)
    conversion.stop()
    assert converters() == []
    assert TokenStore(conversion.folder).available >= 1


def test_ranks_that_start_at_once_share_one_conversion(dataset: Path, options: dict[str, Any], tmp_path: Path) -> None:
    log = tmp_path / "pids"
    noting = f"import os\ndef encode(text):\n    open({str(log)!r}, 'a').write(f'{{os.getpid()}}\\n')\n    return [1]\n"
    (tmp_path / "modules" / "noting_words.py").write_text(noting + "encode.identity = 'noting'\n")
    read, write = os.pipe()
    pids = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            store = follow(dataset, **options | {"tokenizer": "noting_words:encode"}).wait(timeout_s=60)
            os.write(write, f"{store.fingerprint} {len(store)}\n".encode())
            os._exit(0)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
    told = os.read(read, 4096).decode().splitlines()
    assert len(told) == 4
    assert len(set(told)) == 1
    converted = log.read_text().split()
    assert len(converted) == 600
    assert len(set(converted)) == 1
    assert not set(converted) & set(map(str, pids))  # in a process of its own
    os.close(read)
    os.close(write)
