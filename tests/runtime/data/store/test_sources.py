"""Datasets as they come: every kind read, from any place in it, and mistakes told with file and record."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyperpod_ext.errors import ConfigError, HyperpodExtError, NotFoundError
from hyperpod_ext.runtime.data import TokenStore, build
from hyperpod_ext.runtime.data.token_store.sources import Position, find_files, rows

TEXTS = ["first", "zweites: äöü", "", "\ud800 half a pair", "last\nwith two lines"]
RECORDS = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS)


def as_parquet(path: Path) -> None:
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(arrow.table({"text": [text.replace("\ud800", "?") for text in TEXTS]}), path, row_group_size=2)


def as_arrow(path: Path, stream: bool = False) -> None:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"text": [text.replace("\ud800", "?") for text in TEXTS]})
    with (
        path.open("wb") as file,
        (arrow.ipc.new_stream if stream else arrow.ipc.new_file)(file, table.schema) as writer,
    ):
        writer.write_table(table, max_chunksize=2)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "a.jsonl": lambda path: path.write_text(LINES),
    "blank.jsonl": lambda path: path.write_text("\n" + LINES.replace("\n", "\n\n")),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES.encode())),
    "a.json": lambda path: path.write_text(json.dumps(RECORDS, indent=1)),
    "a.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps(RECORDS).encode())),
    "lines.json": lambda path: path.write_text(LINES),
    "strings.jsonl": lambda path: path.write_text("".join(json.dumps(text) + "\n" for text in TEXTS)),
    "a.parquet": as_parquet,
    "a.arrow": as_arrow,
    "stream.arrow": lambda path: as_arrow(path, stream=True),
}


def texts(store: TokenStore) -> list[str]:
    return [each.tobytes().decode("utf-8", "surrogatepass") for each in store]


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_gives_its_documents(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    columns = name.endswith(("parquet", "arrow"))
    wanted = [text.replace("\ud800", "?") for text in TEXTS] if columns else TEXTS
    counted: list[int] = []
    assert texts(build(tmp_path / name, place=tmp_path, on_bytes=counted.append)) == wanted
    assert sum(counted) == (tmp_path / name).stat().st_size


@pytest.mark.parametrize("name", WRITERS)
def test_reading_begins_at_any_record(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)

    def read(start: Position) -> list[tuple[Position, Any]]:
        found = rows([tmp_path / name], start, field="text", split="file", on_bytes=lambda nbytes: None)
        return [(following, value) for _, following, value in found]

    whole = read(Position())
    assert len(whole) == len(TEXTS)
    for number, (place, _) in enumerate(whole, 1):
        assert read(place) == whole[number:]


@pytest.mark.parametrize(
    ("split", "wanted"),
    [
        ("file", ["one\ntwo\n\n\nthree\n\n"]),
        ("lines", ["one\n", "two\n", "\n", "\n", "three\n", "\n"]),
        ("paragraphs", ["one\ntwo\n\n\n", "three\n\n"]),
    ],
)
def test_plain_text_is_split_as_asked(tmp_path: Path, split: str, wanted: list[str]) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\n\nthree\n\n")
    assert texts(build(tmp_path / "a.txt", place=tmp_path, split=split)) == wanted


def test_folders_and_patterns_are_read_in_one_order(tmp_path: Path) -> None:
    (tmp_path / "data" / "deep").mkdir(parents=True)
    for name in ("c.jsonl", "a.jsonl", "deep/b.jsonl"):
        (tmp_path / "data" / name).write_text(json.dumps({"text": name}) + "\n")
    (tmp_path / "data" / "README.md").write_text("not data")
    assert texts(build(tmp_path / "data", place=tmp_path)) == ["a.jsonl", "c.jsonl", "deep/b.jsonl"]
    assert [path.name for path in find_files([tmp_path / "data" / "*.jsonl"])] == ["a.jsonl", "c.jsonl"]


def test_records_may_be_tokens_already(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"ids": [1, 70000]}\n{"ids": []}\n{"ids": [3]}\n')
    store = build(tmp_path / "a.jsonl", place=tmp_path, field="ids", tokenizer="none")
    assert [each.tolist() for each in store] == [[1, 70000], [], [3]]


def test_tokens_and_texts_are_not_taken_for_one_another(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"ids": [1, 70000]}\n')
    with pytest.raises(HyperpodExtError, match=r"token 70000 is beyond(.|\n)*`none`"):
        build(tmp_path / "a.jsonl", place=tmp_path, field="ids")
    (tmp_path / "b.jsonl").write_text('{"text": "words"}\n')
    with pytest.raises(ConfigError, match="a record is text: 'words'"):
        build(tmp_path / "b.jsonl", place=tmp_path, tokenizer="none")


def test_columns_may_be_tokens_already(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"ids": [[1, 2], [], [300]]}), tmp_path / "a.parquet")
    store = build(tmp_path / "a.parquet", place=tmp_path, field="ids", tokenizer="none")
    assert [each.tolist() for each in store] == [[1, 2], [], [300]]


def test_an_end_of_document_follows_each(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n{"text": ""}\n')
    store = build(tmp_path / "a.jsonl", place=tmp_path, eod=256)
    assert [each.tolist() for each in store] == [[97, 98, 256], [256]]
    assert store[0].dtype == np.uint16


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"text": \n', r"a\.jsonl:2: not JSON"),
        ('{"text": "a"}\n{"txt": "b"}\n', r"a\.jsonl:2: has no field `text`; did you mean `txt`\? \(name the"),
        ('{"text": 5}\n', r"a\.jsonl:1: `text` is neither text nor a list of tokens, but int"),
        ('{"text": [1, true]}\n', r"a\.jsonl:1: `text` is a list with a value of type bool"),
        ("\n", "there are no documents: the dataset has no records"),
        ("", "there are no documents"),
    ],
)
def test_bad_records_are_told_with_file_and_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message):
        build(tmp_path / "a.jsonl", place=tmp_path)


def test_bad_records_can_be_left_out_and_are_counted_through_a_restart(tmp_path: Path) -> None:
    good = json.dumps({"text": "x" * 40}) + "\n"
    (tmp_path / "a.jsonl").write_text((good * 300 + "{\n" + good * 300 + "[1.5]\n{}\n") * 3)
    options: dict[str, Any] = {"place": tmp_path, "on_bad_record": "skip", "segment_bytes": 4000}
    store = build(tmp_path / "a.jsonl", **options)
    assert len(store) == 1800
    assert store.done is not None
    assert store.done["skipped"]["count"] == 9
    assert store.done["skipped"]["examples"][0]["record"] == 301
    before = store.fingerprint
    (store.folder / "store.json").unlink()
    for path in sorted(store.folder.glob("seg-*"))[9:]:
        path.unlink()
    again = build(tmp_path / "a.jsonl", **options)
    assert again.fingerprint == before
    assert again.done is not None
    assert again.done["skipped"]["count"] == 9


def test_text_that_is_not_utf_8_is_a_bad_record(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\n\xff\xfe\n")
    with pytest.raises(ConfigError, match=r"a\.txt:2: not UTF-8"):
        build(tmp_path / "a.txt", place=tmp_path, split="lines")


@pytest.mark.parametrize("keep", [0.5, 0.99])
def test_a_gzip_file_that_is_cut_off_is_an_error(tmp_path: Path, keep: float) -> None:
    whole = gzip.compress(("".join(json.dumps({"text": str(n)}) + "\n" for n in range(5000))).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(ConfigError, match=r"a\.jsonl\.gz: the gzip file is cut off"):
        build(tmp_path / "a.jsonl.gz", place=tmp_path)
    (tmp_path / "b.jsonl.gz").write_text("not gzip at all")
    with pytest.raises(ConfigError, match=r"b\.jsonl\.gz: is not a gzip file"):
        build(tmp_path / "b.jsonl.gz", place=tmp_path)


def test_damaged_and_strange_columns_are_errors(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    as_parquet(tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"there is no column txet \(did you mean `text`\?\)"):
        build(tmp_path / "a.parquet", place=tmp_path, field="txet")
    for name in ("b.parquet", "b.arrow"):
        (tmp_path / name).write_bytes(b"PAR1 nothing of the kind")
        with pytest.raises(ConfigError, match=rf"{name}: cannot be read"):
            build(tmp_path / name, place=tmp_path)


def test_what_is_not_there_or_not_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no dataset"):
        build(tmp_path / "nothing", place=tmp_path)
    (tmp_path / "a.csv").write_text("a,b")
    with pytest.raises(ConfigError, match=r"a\.csv: has an unsupported format \(valid: \.jsonl"):
        build(tmp_path / "a.csv", place=tmp_path)


class TestTokenizers:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        (tmp_path / "a.jsonl").write_text('{"text": "one two three"}\n')
        return tmp_path / "a.jsonl"

    def test_a_function_of_a_module(self, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "my_words.py").write_text("def encode(text):\n    return [len(word) for word in text.split()]\n")
        monkeypatch.syspath_prepend(tmp_path)
        assert build(file, place=tmp_path, tokenizer="my_words:encode")[0].tolist() == [3, 3, 5]

    def test_a_function_without_a_source_needs_an_identity(self, file: Path, tmp_path: Path) -> None:
        tokenizer = eval("lambda text: [1]")
        with pytest.raises(HyperpodExtError, match="Add an attribute `identity`"):
            build(file, place=tmp_path, tokenizer=tokenizer)
        tokenizer.identity = "always one"
        assert build(file, place=tmp_path, tokenizer=tokenizer)[0].tolist() == [1]

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("gpt", "gpt: is not a tokenizer"),
            ("no_such_module:encode", "cannot be imported"),
            ("json:no_such", "json has no function no_such"),
            ("none.json", "No such file"),
        ],
    )
    def test_one_that_is_not_there_is_told(self, file: Path, tmp_path: Path, name: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            build(file, place=tmp_path, tokenizer=name)
