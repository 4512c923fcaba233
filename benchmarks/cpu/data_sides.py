"""What `data.py` measures: each side reads the same tokens, in the same order, in the same process."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hyperpod_ext.runtime.data import MegatronStore, Packed, TokenStore, build
from hyperpod_ext.runtime.data.token_store.writer import StoreWriter

PINS = ("megatron-core==0.16.1", "tokenizers==0.23.3")
LENGTH = 2048
BATCH, STEP = 8, 64
"""Samples that are read at once: a micro-batch, and a step."""
_INSTALL_S = 300


def install() -> None:
    """Megatron's reader and a BPE tokenizer, without what they depend on, in a folder of their own.

    Raises:
        subprocess.CalledProcessError: they cannot be had.
    """
    folder = Path(sys.prefix) / "bench" / "data"
    stamp = folder / "made.json"
    if not stamp.exists() or json.loads(stamp.read_text()) != list(PINS):
        print("installing " + ", ".join(PINS), file=sys.stderr)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--upgrade", "--target", folder, *PINS], check=True, timeout=_INSTALL_S)
        stamp.write_text(json.dumps(PINS))
    sys.path.append(str(folder))


def megatron_reader(prefix: Path) -> Any:
    """Megatron's own `IndexedDataset`, memory-mapped."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDataset
    return IndexedDataset(str(prefix), mmap=True)


def write_corpus(folder: Path, tokens: int) -> tuple[Path, Path]:
    """(a store, the prefix of a Megatron dataset) of the same random documents of about a thousand u16 tokens."""
    with contextlib.redirect_stderr(io.StringIO()):
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    rng = np.random.default_rng(0)
    prefix = folder / "megatron"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    done = 0
    with StoreWriter(folder / "store", {"source": []}, vocab_size=50_000, segment_bytes=64 << 20) as writer:
        while done < tokens:
            document = rng.integers(0, 50_000, max(int(rng.lognormal(6.5, 0.8)), 1)).astype(np.uint16)
            writer.append(document, {})
            builder.add_document(document, [len(document)])
            done += len(document)
        writer.finish({})
    builder.finalize(f"{prefix}.idx")
    return folder / "store", prefix


class MegatronRule:
    """Windows of LENGTH + 1 tokens as Megatron's GPTDataset makes them: parts of documents, joined, as int64."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        ends = np.cumsum(dataset.sequence_lengths, dtype=np.int64)
        begins = np.arange((int(ends[-1]) - 1) // LENGTH + 1) * LENGTH
        documents = np.searchsorted(ends, begins, "right")
        self.samples = np.stack([documents, begins - (ends[documents] - dataset.sequence_lengths[documents])], axis=1)

    def __len__(self) -> int:
        return len(self.samples) - 1

    def __getitem__(self, number: int) -> np.ndarray:
        first, begin = self.samples[number]
        last, end = self.samples[number + 1]
        if first == last:
            parts = [self._dataset.get(first, offset=begin, length=end - begin + 1)]
        else:
            parts = [self._dataset.get(first, offset=begin)]
            parts += [self._dataset.get(document) for document in range(first + 1, last)]
            parts.append(self._dataset.get(last, length=end + 1))
        return np.concatenate(parts).astype(np.int64)

    def batch(self, numbers: np.ndarray) -> np.ndarray:
        """As torch's default collate stacks them."""
        return np.stack([self[number] for number in numbers])


class Timed:
    """Tokens a second of one side in one round, by the clock and by the CPU time of all threads."""

    def __init__(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def rate(self, tokens: int) -> dict[str, float]:
        wall, cpu = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
        return {"wall": tokens / wall, "cpu": tokens / cpu}


def rate_of_documents(get: Callable[[int], np.ndarray], ids: np.ndarray) -> dict[str, float]:
    """Of documents as int64, which is what goes to the device."""
    timed, tokens = Timed(), 0
    for number in ids:
        tokens += len(get(number).astype(np.int64))
    return timed.rate(tokens)


def rate_of_batches(batch: Callable[[np.ndarray], np.ndarray], ids: np.ndarray, size: int = BATCH) -> dict[str, float]:
    """Of batches of `size` samples."""
    timed, tokens = Timed(), 0
    for at in range(0, len(ids) - size + 1, size):
        tokens += batch(ids[at : at + size]).size
    return timed.rate(tokens)


def rounds_of_readers(folder: Path, tokens: int, rounds: int) -> list[dict[str, dict[str, float]]]:
    """Tokens a second of each reader, warm, round by round; who begins changes."""
    place, prefix = write_corpus(folder, tokens)
    store, theirs, mapped = TokenStore(place), megatron_reader(prefix), MegatronStore(prefix)
    rule, packed, in_place = MegatronRule(theirs), Packed(store, LENGTH), Packed(mapped, LENGTH)
    rng = np.random.default_rng(1)
    few = rng.permutation(len(rule))[:32]
    assert np.array_equal(rule.batch(few), packed.batch(few))  # or one of them reads something else
    assert np.array_equal(rule.batch(few), in_place.batch(few))
    sides: dict[str, Callable[[], dict[str, float]]] = {
        "documents, Megatron": lambda: rate_of_documents(theirs.get, documents),
        "documents, store": lambda: rate_of_documents(store.get, documents),
        "documents, Megatron's files by MegatronStore": lambda: rate_of_documents(mapped.get, documents),
        "samples, Megatron": lambda: rate_of_batches(rule.batch, samples),
        "samples, store": lambda: rate_of_batches(packed.batch, samples),
        "samples, Megatron's files by MegatronStore": lambda: rate_of_batches(in_place.batch, samples),
    }
    found = []
    for number in range(rounds + 1):
        documents, samples = rng.permutation(len(store)), rng.permutation(len(rule))
        names = list(sides) if number % 2 else list(reversed(sides))
        rates = {name: sides[name]() for name in names}
        if number:  # the first one only warms up: pages, and each block's checksum
            found.append({name: rates[name] for name in sides})
            print(f"readers, round {number} of {rounds}", file=sys.stderr)
    return found


def texts(nbytes: int) -> Iterator[str]:
    """Python's own sources, over and over."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    done = 0
    while done < nbytes:
        for file in files:
            text = file.read_text(errors="replace")
            done += len(text)
            yield text
            if done >= nbytes:
                return


def rounds_of_epochs(folder: Path, nbytes: int, rounds: int) -> list[dict[str, dict[str, float]]]:
    """Tokens a second of an epoch of JSONL.gz: decoded each time, and from the store; by BPE, and of bytes.

    As int64, but for those that stay as they are stored.
    """
    import tokenizers

    file, words = folder / "text.jsonl.gz", folder / "tokenizer.json"
    with gzip.open(file, "wt", compresslevel=6) as opened:
        for text in texts(nbytes):
            opened.write(json.dumps({"text": text}) + "\n")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=16_000, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(texts(min(nbytes, 8 << 20)), trainer)
    bpe.save(str(words))
    by_bpe, by_bytes = (
        Packed(build(file, place=folder / "stores", tokenizer=tokenizer), LENGTH) for tokenizer in (str(words), "bytes")
    )

    def of_bpe(batch: list[str]) -> int:
        return sum(len(np.array(each.ids, np.int64)) for each in bpe.encode_batch(batch))

    def of_bytes(batch: list[str]) -> int:
        return sum(len(_bytes_of(each).astype(np.int64)) for each in batch)

    def as_stored(ids: np.ndarray) -> np.ndarray:
        return by_bytes.batch(ids, dtype=None)

    sides: dict[str, Callable[[], dict[str, float]]] = {
        "BPE, decoded": lambda: _decode(file, of_bpe),
        "BPE, second epoch": lambda: rate_of_batches(by_bpe.batch, of(by_bpe)),
        "bytes, decoded": lambda: _decode(file, of_bytes),
        f"bytes, second epoch, {BATCH} at once": lambda: rate_of_batches(by_bytes.batch, of(by_bytes)),
        f"bytes, second epoch, {STEP} at once": lambda: rate_of_batches(by_bytes.batch, of(by_bytes), STEP),
        "bytes as stored, decoded": lambda: _decode(file, lambda batch: sum(len(_bytes_of(each)) for each in batch)),
        f"bytes as stored, second epoch, {BATCH} at once": lambda: rate_of_batches(as_stored, of(by_bytes)),
        f"bytes as stored, second epoch, {STEP} at once": lambda: rate_of_batches(as_stored, of(by_bytes), STEP),
    }
    rng = np.random.default_rng(2)

    def of(packed: Packed) -> np.ndarray:
        return rng.permutation(len(packed))

    found = []
    for number in range(rounds + 1):
        names = [name for name in sides if number or not name.endswith("decoded")]
        rates = {name: sides[name]() for name in (names if number % 2 else reversed(names))}
        if number:
            found.append({name: rates[name] for name in sides})
            print(f"epochs, round {number} of {rounds}", file=sys.stderr)
    return found


def _bytes_of(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def _decode(file: Path, encode: Callable[[list[str]], int]) -> dict[str, float]:
    timed, tokens, batch = Timed(), 0, []
    with gzip.open(file) as opened:
        for line in opened:
            batch.append(json.loads(line)["text"])
            if len(batch) == 64:
                tokens, batch = tokens + encode(batch), []
    tokens += encode(batch) if batch else 0
    return timed.rate(tokens)


def share_of_readers(folder: Path, readers: int) -> dict[str, float]:
    """Summed PSS of processes that have read all of the store in `folder`, as a multiple of its bytes."""
    program = (
        "import sys, pathlib\n"
        "from hyperpod_ext.runtime.data import TokenStore\n"
        "def pss(): return next(int(line.split()[1]) * 1024 for line in "
        "pathlib.Path('/proc/self/smaps_rollup').read_text().splitlines() if line.startswith('Pss:'))\n"
        "from hyperpod_ext.runtime.snapshot.manifest import crc64nvme\n"
        "crc64nvme(b'')  # its library is loaded now\n"
        "before = pss()\n"
        "store = TokenStore(sys.argv[1])\n"
        "total = sum(int(document.sum()) for document in store)\n"
        "print(total, flush=True); sys.stdin.readline()\n"
        "print(before, pss(), flush=True); sys.stdin.readline()\n"
    )
    command = [sys.executable, "-c", program, str(folder)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(readers)
    ]
    answers = []
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.enter_context(process)
        assert len({_line(process) for process in processes}) == 1
        for process in processes:  # all have all mapped, and read it
            _say(process)
            answers.append([int(number) for number in _line(process).split()])
        for process in processes:
            _say(process)
    data = sum(path.stat().st_size for path in folder.glob("seg-*"))
    return {"data": float(data), "summed PSS": float(sum(after - before for before, after in answers))}


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def _say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
