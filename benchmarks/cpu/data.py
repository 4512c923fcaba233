"""Token store beside Megatron's memory-mapped reader, beside decoding JSONL.gz, and what four readers take of memory.

    python benchmarks/cpu/data.py --rounds 7

Prints the tables, and writes data.json and data.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_sides import BATCH, LENGTH, PINS, STEP, install, rounds_of_epochs, rounds_of_readers, share_of_readers
from publish import RESULTS, publish

READERS = 4
STORED = "bytes as stored, second epoch, {} at once"
CLAIMS = {
    "documents of the store / Megatron's": ("documents, store", "documents, Megatron", ">=", 0.9),
    "samples of the store / Megatron's": ("samples, store", "samples, Megatron", ">=", 0.9),
    "second epoch / decoding with BPE": ("BPE, second epoch", "BPE, decoded", ">=", 20.0),
    f"second epoch / decoding, bytes as stored, {STEP} samples at once": (
        STORED.format(STEP),
        "bytes as stored, decoded",
        ">=",
        20.0,
    ),
    "summed PSS of four readers / data": ("summed PSS", "data", "<=", 1.1),
}
ASIDE = {
    "Megatron's documents by MegatronStore / by Megatron": (
        "documents, Megatron's files by MegatronStore",
        "documents, Megatron",
    ),
    "Megatron's samples by MegatronStore / by Megatron": (
        "samples, Megatron's files by MegatronStore",
        "samples, Megatron",
    ),
    f"second epoch / decoding, bytes as stored, {BATCH} at once": (STORED.format(BATCH), "bytes as stored, decoded"),
    f"second epoch / decoding, bytes as int64, {STEP} at once": (
        f"bytes, second epoch, {STEP} at once",
        "bytes, decoded",
    ),
    f"second epoch / decoding, bytes as int64, {BATCH} at once": (
        f"bytes, second epoch, {BATCH} at once",
        "bytes, decoded",
    ),
}
Rounds = Sequence[Mapping[str, Any]]


def main() -> int:
    args = _parse()
    install()
    with tempfile.TemporaryDirectory(prefix="bench-data-", dir=args.scratch) as scratch:
        folder = Path(scratch)
        readers = rounds_of_readers(folder, args.mtokens * 1_000_000, args.rounds)
        epochs = rounds_of_epochs(folder, args.mbytes << 20, args.rounds)
        memory = [share_of_readers(folder / "store", READERS)]
    measured = {"readers": readers, "epochs": epochs, "memory": memory}
    document = make_document(measured, args)
    print(make_tables(document))
    publish(args.out, "data", document, make_page(document), measured)
    return 0 if all(claim["holds"] for claim in document["claims"]) else 1


def ratios(rounds: Rounds, above: str, below: str, clock: str = "wall") -> list[float]:
    """Of two sides in the same round, by `wall` time or the `cpu`'s; bytes have no clock."""

    def value(one: Any) -> float:
        return float(one[clock] if isinstance(one, Mapping) else one)

    return [value(each[above]) / value(each[below]) for each in rounds if above in each and below in each]


def make_document(measured: Mapping[str, Rounds], args: argparse.Namespace) -> dict[str, Any]:
    """All that was measured, with the medians of ratios."""
    rounds = [each for part in measured.values() for each in part]
    compared = []
    for name, (above, below, *wanted) in {**CLAIMS, **ASIDE}.items():
        found = ratios(rounds, above, below)
        median, row = statistics.median(found), {"name": name}
        row |= {"median": median, "lowest": min(found), "highest": max(found)}
        row |= {"cpu_median": statistics.median(ratios(rounds, above, below, "cpu"))}
        if wanted:
            sign, bound = wanted
            row |= {"wanted": f"{sign} {bound:g}", "holds": median >= bound if sign == ">=" else median <= bound}
        compared.append(row)
    return {
        "command": f"python benchmarks/cpu/data.py --rounds {args.rounds} --mtokens {args.mtokens}"
        f" --mbytes {args.mbytes}",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "load_average": os.getloadavg()[0],
        "beside": list(PINS),
        "claims": [row for row in compared if "holds" in row],
        "aside": [row for row in compared if "holds" not in row],
        "tokens_per_s": {part: _medians(measured[part]) for part in ("readers", "epochs")},
        "memory": measured["memory"][0],
    }


def _medians(rounds: Rounds) -> dict[str, dict[str, float]]:
    """Return the median wall and CPU seconds of each side."""
    return {
        name: {clock: statistics.median(each[name][clock] for each in rounds) for clock in ("wall", "cpu")}
        for name in rounds[0]
    }


def make_tables(document: Mapping[str, Any]) -> str:
    """Ratios, and the rates they come from."""
    lines = ["| ratio, median of rounds | measured | lowest to highest | by CPU time | wanted | |"]
    lines += ["|---|---|---|---|---|---|"]
    for row in [*document["claims"], *document["aside"]]:
        text = f"| {row['name']} | {row['median']:.2f} | {row['lowest']:.2f} to {row['highest']:.2f} | "
        text += f"{row['cpu_median']:.2f} | {row.get('wanted', '')} | "
        lines.append(text + ("|" if "holds" not in row else "holds |" if row["holds"] else "**does not hold** |"))
    lines += ["", "| million tokens a second, median | | by CPU time |", "|---|---|---|"]
    for part in ("readers", "epochs"):
        for name, rate in document["tokens_per_s"][part].items():
            lines.append(f"| {name} | {rate['wall'] / 1e6:.2f} | {rate['cpu'] / 1e6:.2f} |")
    memory = document["memory"]
    lines += [
        "",
        f"{READERS} readers of {memory['data'] / 1e6:.0f} MB: {memory['summed PSS'] / 1e6:.0f} MB PSS in all.",
    ]
    return "\n".join(lines)


def make_page(document: Mapping[str, Any]) -> str:
    """The page in docs/benchmarks."""
    return f"""# Token store

`make bench-data` writes this page. The benchmark ran on {document["machine"]}, with a load average of
{document["load_average"]:.1f}, as `{document["command"]}`.

{make_tables(document)}

- **Readers**: one process reads random documents of about a thousand `uint16` tokens in shuffled order, with a warm
  page cache: the same documents from a token store and from Megatron's `.bin/.idx` files. Megatron's files are read by
  Megatron's own `IndexedDataset` ({document["beside"][0]}). *Samples* are windows of {LENGTH} + 1 tokens in batches of
  {BATCH}, joined from parts of documents by the rule of Megatron's `GPTDataset`. All readers return `int64` arrays.
  Before the measurement, some arrays are compared token by token.
- **Epochs**: the data are the source files of Python's standard library as JSONL.gz. *Decoding* is gunzip,
  `json.loads`, and a byte-level BPE of 16,000 tokens ({document["beside"][1]}, which uses all cores). In the *second
  epoch*, one process reads shuffled samples from the store. Decoding and the second epoch return either `int64` arrays,
  or bytes as they are stored, which are cast on the device. For data without a tokenizer (*bytes*), reading from the
  store avoids only the work of gunzip and `json.loads`. If such bytes are returned as `int64`, writing eight bytes for
  each byte takes longer than reading the byte.
- **CPU time** is the processor time of all threads of the process. On a busy machine, CPU time changes less than the
  other figures.
- **Memory**: the PSS of each process after the process has read every document, less its PSS before it opened the
  store.
- **Ratios** compare two readers in the same round, in alternating order. The first round does not count, because in the
  first round the pages are read from disk, and the checksum of each block is verified.
"""


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="times each side is measured (default: 7)")
    parser.add_argument("--mtokens", type=int, default=60, help="million tokens for the readers (default: 60)")
    parser.add_argument("--mbytes", type=int, default=16, help="MiB of text for the epochs (default: 16)")
    parser.add_argument("--scratch", type=Path, help="where the data is made (default: the system's)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()
    if min(args.rounds, args.mtokens, args.mbytes) < 1:
        parser.error("--rounds, --mtokens and --mbytes: at least 1")
    return args


if __name__ == "__main__":
    sys.exit(main())
