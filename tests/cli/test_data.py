"""`hp-ext data` as people and scripts use it."""

from __future__ import annotations

import json
import re
import signal
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from command import HP_EXT
from command import call_hp_ext as hp_ext
from waiting import until


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    file = tmp_path / "news.jsonl"
    file.write_text("".join(json.dumps({"text": f"news {number} " * 30}) + "\n" for number in range(500)))
    return file


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPX_DATA_DIR", str(tmp_path / "stores"))
    return tmp_path / "stores"


def test_build_inspect_and_verify(dataset: Path, place: Path) -> None:
    built = hp_ext("data", "build", dataset, "--segment", "16KiB", "--sequence-length", "64", "-o", "json")
    assert (built.code, built.stderr) == (0, "")
    assert built.json["documents"] == 500
    assert built.json["packed"]["samples"] == (built.json["tokens"] - 1) // 64
    store = Path(built.json["path"])
    assert store.parent == place
    shown = hp_ext("data", "inspect", store, "--document", "3", "-o", "json").json
    assert bytes(shown["document"]["tokens"]).startswith(b"news 3 news 3")
    assert {**shown, "document": None, "packed": None} == {**built.json, "document": None, "packed": None}
    listed = hp_ext("data", "inspect", "-o", "json").json
    assert [Path(each["path"]) for each in listed["stores"]] == [store]
    verified = hp_ext("data", "verify", store, "--source", "-o", "json")
    assert (verified.code, verified.json["state"]) == (0, "good")
    again = hp_ext("data", "build", dataset, "--segment", "16KiB", "-o", "json").json
    assert again["fingerprint"] == built.json["fingerprint"]


def test_tables_are_for_people(dataset: Path, place: Path) -> None:
    text = hp_ext("data", "build", dataset, "--sequence-length", "64", "--whole-documents").stdout
    assert "documents    500\n" in text
    assert "documents whole" in text
    store = next(place.iterdir())
    assert f"{store}: good, " in hp_ext("data", "verify", store).stdout
    assert "finished" in hp_ext("data", "inspect", place).stdout


def test_damage_is_told_and_mended(dataset: Path, place: Path) -> None:
    built = hp_ext("data", "build", dataset, "--segment", "16KiB", "-o", "json").json
    store = Path(built["path"])
    segment = store / "seg-000002.tokens"
    data = bytearray(segment.read_bytes())
    data[5000] ^= 1
    segment.write_bytes(data)
    told = hp_ext("data", "verify", store)
    assert told.code == 7
    assert "DAMAGED" in told.stdout
    assert "seg-000002.tokens: bytes 4096 to " in told.stdout
    assert "--drop-damaged" in told.stdout
    dropped = hp_ext("data", "verify", store, "--drop-damaged", "-o", "json")
    assert (dropped.code, dropped.json["dropped"][0]) == (7, "seg-000002.tokens")
    again = hp_ext("data", "build", dataset, "--segment", "16KiB", "-o", "json").json
    assert again["fingerprint"] == built["fingerprint"]
    assert hp_ext("data", "verify", store).code == 0


def test_a_dataset_that_changed_exits_7(dataset: Path, place: Path) -> None:
    store = hp_ext("data", "build", dataset, "-o", "json").json["path"]
    dataset.write_text('{"text": "other"}\n')
    told = hp_ext("data", "verify", store, "--source")
    assert told.code == 7
    assert "source: " in told.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["build"], 2, "Missing argument"),
        (["build", "none.jsonl"], 6, "there is no dataset at none.jsonl"),
        (["build", "news.jsonl", "--field", "txt"], 3, "news.jsonl:1: has no field `txt`; did you mean `text`?"),
        (["build", "news.jsonl", "--tokenizer", "gpt"], 3, "gpt: is not a tokenizer"),
        (["build", "news.jsonl", "--segment", "lots"], 2, "is not a size"),
        (["build", "news.jsonl", "--budget", "1KiB", "--segment", "4KiB"], 7, "the budget is 1,024"),
        (["build", "news.jsonl", "--whole-documents"], 2, "needs --sequence-length"),
        (["build", "news.jsonl", "--sequence-length", "10000000"], 3, "but one sample needs 10000001"),
        (["inspect", "nowhere"], 6, "there is no token store in nowhere"),
        (["verify", "."], 6, "is not a token store"),
    ],
)
def test_mistakes_end_with_a_message_and_a_code(
    dataset: Path, place: Path, arguments: list[str], code: int, message: str
) -> None:
    done = hp_ext("data", *arguments, cwd=dataset.parent)
    assert (done.code, done.stdout) == (code, "")
    assert message in done.stderr
    if code != 2:
        shown = hp_ext("data", *arguments, "-o", "json", cwd=dataset.parent)
        assert shown.json["error"]["exit_code"] == code


def test_megatron_is_shown_in_place_and_not_converted(tmp_path: Path, place: Path) -> None:
    tokens = np.arange(100, dtype="<u2")
    tokens.tofile(tmp_path / "corpus.bin")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 1, 2)
    (tmp_path / "corpus.idx").write_bytes(head + struct.pack("<i", 100) + struct.pack("<qqq", 0, 0, 1))
    shown = hp_ext("data", "inspect", tmp_path / "corpus", "--document", "0", "-o", "json").json
    assert (shown["kind"], shown["tokens"], shown["document"]["tokens"][:3]) == ("megatron", 100, [0, 1, 2])
    refused = hp_ext("data", "build", tmp_path / "corpus.bin")
    assert refused.code == 3
    assert "is read in place" in refused.stderr


def test_an_arrow_file_is_shown_with_how_each_column_is_read(tmp_path: Path, place: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"ids": [[1, 2, 300], [4]], "text": ["a", "b"]})
    file = tmp_path / "train.arrow"
    with arrow.OSFile(str(file), "wb") as sink, arrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    shown = hp_ext("data", "inspect", file, "--document", "0", "-o", "json").json
    assert (shown["kind"], shown["read"], shown["tokens"]) == ("arrow", "mapped in place", 4)
    assert shown["document"]["tokens"] == [1, 2, 300]
    assert [(one["name"], one["read"]) for one in shown["columns"]] == [
        ("ids", "mapped in place"),
        ("text", "converted"),
    ]
    text = hp_ext("data", "inspect", file).stdout
    assert re.search(r"column ids +list<\S+ int64>, mapped in place\n", text)
    assert "column text  string, converted (it is string, not a list of whole numbers)" in text
    refused = hp_ext("data", "inspect", file, "--field", "text")
    assert (refused.code, refused.stdout) == (3, "")
    assert "cannot be mapped in place: it is string" in refused.stderr
    built = hp_ext("data", "build", file, "--field", "ids", "--tokenizer", "none", "-o", "json")
    assert (built.code, built.json["tokens"]) == (0, 4)
    assert f"{file} can also be read without conversion: ArrowStore" in built.stderr
    (tmp_path / "news.jsonl").write_text('{"text": "a"}\n')
    assert "converted, by `hp-ext data build`" in hp_ext("data", "inspect", tmp_path / "news.jsonl").stdout
    assert hp_ext("data", "inspect", place, "--field", "ids").code == 2


def test_two_builds_of_one_dataset_do_not_meet(tmp_path: Path, place: Path) -> None:
    (tmp_path / "slowly.py").write_text("import time\ndef encode(text):\n    time.sleep(0.002)\n    return [1]\n")
    file = tmp_path / "news.jsonl"
    file.write_text('{"text": "a"}\n' * 30_000)  # a minute: it is interrupted
    command = [HP_EXT, "data", "build", file, "--tokenizer", "slowly:encode", "--segment", "64"]
    environ = {"PYTHONPATH": str(tmp_path), "HPX_DATA_DIR": str(place), "PATH": "/usr/bin:/bin"}
    first = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
    until(lambda: list(place.glob("*/seg-*")) or first.poll() is not None)
    assert first.poll() is None
    second = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert second.returncode == 5
    assert "is being written by another process" in second.stderr
    (store,) = place.iterdir()
    assert hp_ext("data", "inspect", store, "-o", "json").json["state"] == "growing"
    first.send_signal(signal.SIGINT)
    stderr = first.communicate(timeout=100)[1]
    assert first.returncode == 130
    assert "is not finished" in stderr
    assert "Traceback" not in stderr
    assert "continues after the part that is finished" in stderr
