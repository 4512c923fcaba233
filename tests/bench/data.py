"""Token store beside Megatron's memory-mapped reader, beside decoding JSONL.gz, and what four readers take of memory.

    python tests/bench/data.py --rounds 7

Prints the tables, and writes data.json and data.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_sides import BATCH, LENGTH, PINS, install, rounds_of_epochs, rounds_of_readers, share_of_readers

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
READERS = 4
CLAIMS = {
    "documents of the store / Megatron's": ("documents, store", "documents, Megatron", ">=", 0.9),
    "samples of the store / Megatron's": ("samples, store", "samples, Megatron", ">=", 0.9),
    "second epoch / decoding with BPE": ("BPE, second epoch", "BPE, decoded", ">=", 20.0),
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
    "second epoch / decoding without a tokenizer": ("bytes, second epoch", "bytes, decoded"),
}


def main() -> int:
    args = _parse()
    install()
    with tempfile.TemporaryDirectory(prefix="bench-data-", dir=args.scratch) as scratch:
        folder = Path(scratch)
        readers = rounds_of_readers(folder, args.mtokens * 1_000_000, args.rounds)
        epochs = rounds_of_epochs(folder, args.mbytes << 20, args.rounds)
        memory = [share_of_readers(folder / "store", READERS)]
    document = make_document({"readers": readers, "epochs": epochs, "memory": memory}, args)
    print(make_tables(document))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "data.json").write_text(json.dumps(document, indent=1) + "\n")
    (args.out / "data.md").write_text(make_page(document))
    return 0 if all(claim["holds"] for claim in document["claims"]) else 1


def ratios(rounds: Sequence[Mapping[str, float]], above: str, below: str) -> list[float]:
    """Of two sides in the same round."""
    return [each[above] / each[below] for each in rounds if above in each and below in each]


def make_document(measured: Mapping[str, Sequence[Mapping[str, float]]], args: argparse.Namespace) -> dict[str, Any]:
    """All that was measured, with the medians of ratios."""
    rounds = [each for part in measured.values() for each in part]
    claims = []
    for name, (above, below, sign, bound) in CLAIMS.items():
        found = ratios(rounds, above, below)
        median = statistics.median(found)
        holds = median >= bound if sign == ">=" else median <= bound
        claims.append(
            {"name": name, "median": median, "lowest": min(found), "highest": max(found), "wanted": f"{sign} {bound:g}"}
            | {"holds": holds}
        )
    aside = {name: statistics.median(ratios(rounds, *sides)) for name, sides in ASIDE.items()}
    return {
        "command": f"python tests/bench/data.py --rounds {args.rounds} --mtokens {args.mtokens} --mbytes {args.mbytes}",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "load_average": os.getloadavg()[0],
        "beside": list(PINS),
        "claims": claims,
        "aside": aside,
        "measured": measured,
    }


def make_tables(document: Mapping[str, Any]) -> str:
    """Ratios, and the rates they come from."""
    lines = ["| ratio, median of rounds | measured | lowest to highest | wanted | |", "|---|---|---|---|---|"]
    for claim in document["claims"]:
        lowest, highest = claim["lowest"], claim["highest"]
        text = f"| {claim['name']} | {claim['median']:.2f} | {lowest:.2f} to {highest:.2f} | {claim['wanted']} | "
        lines.append(text + ("holds |" if claim["holds"] else "**does not hold** |"))
    lines += [f"| {name} | {median:.2f} | | | |" for name, median in document["aside"].items()]
    lines += ["", "| million tokens a second, median | |", "|---|---|"]
    for part in ("readers", "epochs"):
        rounds = document["measured"][part]
        for name in rounds[0]:
            lines.append(f"| {name} | {statistics.median(each[name] for each in rounds) / 1e6:.2f} |")
    (memory,) = document["measured"]["memory"]
    lines += [
        "",
        f"{READERS} readers of {memory['data'] / 1e6:.0f} MB: {memory['summed PSS'] / 1e6:.0f} MB PSS in all.",
    ]
    return "\n".join(lines)


def make_page(document: Mapping[str, Any]) -> str:
    """The page in docs/benchmarks."""
    return f"""# Token store

Made by `make bench-data`, on {document["machine"]}, load average {document["load_average"]:.1f}:
`{document["command"]}`.

{make_tables(document)}

- **Readers**: the same random documents of about a thousand `uint16` tokens, as a store and as Megatron's `.bin/.idx`,
  in shuffled order, one process, page cache warm. Beside it, Megatron's own `IndexedDataset` ({document["beside"][0]});
  *samples* are windows of {LENGTH} + 1 tokens in batches of {BATCH}, made by the rule of its `GPTDataset`: parts of
  documents, joined. All sides end with `int64` arrays, and some are first compared token by token.
- **Epochs**: Python's own sources as JSONL.gz. Decoding is gunzip, `json.loads`, and a byte-level BPE of 16,000 tokens
  ({document["beside"][1]}, which uses all cores); the second epoch is shuffled samples from the store, by one process.
  Both end with `int64` arrays. Where there is nothing to tokenise, gunzip and JSON alone are left to save.
- **Memory**: PSS of each process after it has read every document, less its PSS before it opened the store.
- Ratios are of two sides in the same round; who goes first alternates. The first round is not counted: it reads the
  pages, and checks each block against its checksum.
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
