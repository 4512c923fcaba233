"""The command `hp-ext data build`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..checkpoints.table import size
from ..command import Command, output_option
from ..needs import need_packages
from ..output import count, print_result, say

if TYPE_CHECKING:
    from hyperpod_ext.runtime.data.convert.convert import Prepared

_MIB = 1 << 20
_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


class Size(click.ParamType):  # type: ignore[type-arg]  # older clicks have no argument here
    """Type of an option whose value is a size in bytes, such as 200GiB, 512 MiB or 1000000."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the size as a number of bytes."""
        if isinstance(value, int):
            return value
        text = str(value).replace(" ", "").upper()
        number = text.rstrip("KMGTIB")
        unit = text[len(number) :].replace("IB", "").replace("B", "")
        try:
            return int(float(number) * _UNITS[f"{unit}IB" if unit else ""])
        except (ValueError, KeyError, OverflowError):
            self.fail(f"{value!r} is not a size; write 200GiB or 512MiB", param, ctx)


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext data build train.jsonl.gz
  hp-ext data build wiki/ books/*.parquet --tokenizer tokenizer.json --field text --eod 0 --out /nvme/data
  hp-ext data build book.txt --split paragraphs --sequence-length 2048
  hp-ext data build train.jsonl --tokenizer my_package.words:encode --budget 200GiB -o json

\b
SOURCE is a file, a folder or a pattern. Formats are .jsonl, .json, .txt (also with .gz), .parquet and .arrow.
Megatron's .bin/.idx files need no conversion, nor do tokens in most Arrow files: see `hp-ext data inspect FILE`. The
same command resumes an interrupted or killed conversion.""",
)
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option(
    "--tokenizer",
    default="bytes",
    show_default=True,
    metavar="NAME",
    help="Tokenizer: bytes, none (records are tokens), hf:NAME, path/to/tokenizer.json, or module:function.",
)
@click.option(
    "--field",
    default="text",
    show_default=True,
    help="Field of a record with the record's text, or with a list of its tokens.",
)
@click.option(
    "--split",
    type=click.Choice(["file", "lines", "paragraphs"]),
    default="file",
    show_default=True,
    help="Part of a plain text file that becomes one document.",
)
@click.option("--eod", type=click.IntRange(min=0), metavar="TOKEN", help="Append this token to each document.")
@click.option(
    "--on-bad-record",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="Action for a record that cannot be read.",
)
@click.option(
    "--out",
    type=click.Path(),
    metavar="DIR",
    help="Folder for token stores. Default: $HPX_DATA_DIR, or the cache of this user.",
)
@click.option("--segment", type=Size(), default="128MiB", show_default=True, help="Size of one file of the store.")
@click.option("--budget", type=Size(), help="Delete the least recently used stores if the folder exceeds this size.")
@click.option(
    "--sequence-length",
    type=click.IntRange(min=1),
    metavar="N",
    help="Also show how many samples the store has for a sequence length of N tokens (N + 1 tokens per sample).",
)
@click.option("--whole-documents", is_flag=True, help="Do not cut documents that fit into one packed sample.")
@output_option()
def command(
    sources: tuple[str, ...],
    out: str | None,
    segment: int,
    budget: int | None,
    sequence_length: int | None,
    whole_documents: bool,
    output: str,
    **options: Any,
) -> None:
    """Convert a dataset to a token store. If a store of the dataset exists already, it is only shown."""
    if whole_documents and sequence_length is None:
        raise click.UsageError("--whole-documents needs --sequence-length")
    tables = any(source.endswith((".parquet", ".arrow")) for source in sources)
    need_packages("numpy", "awscrt", *(["pyarrow"] if tables else []))
    from hyperpod_ext.runtime.data.convert.convert import Recipe, prepare
    from hyperpod_ext.runtime.data.token_store.reader import TokenStore

    _refuse_megatron(sources)
    prepared = prepare(Recipe(sources, segment_bytes=segment, **options), out)
    _tell_mappable(prepared)
    _convert(prepared, budget)
    from .inspect import of_store, text_of

    store = TokenStore(prepared.folder)
    found = of_store(store)
    if sequence_length is not None:
        from hyperpod_ext.runtime.data.token_store.packed import Packed

        packed = Packed(store, sequence_length, documents="whole" if whole_documents else "split")
        found["packed"] = {
            "sequence_length": sequence_length,
            "documents": packed.documents,
            "samples": len(packed),
            "fingerprint": packed.fingerprint,
        }
    if skipped := found["skipped"]:
        say(f"{count(skipped, 'record')} skipped; `hp-ext data inspect -o json` has examples")
    print_result(found, output, text_of(found))


def _convert(prepared: Prepared, budget: int | None) -> None:
    from hyperpod_ext.errors import UserInterruptError
    from hyperpod_ext.runtime.data.convert.convert import run

    from ..checkpoints.progress import transfer

    try:
        with transfer(f"converting {size(prepared.nbytes)}", prepared.nbytes) as on_bytes:
            run(prepared, budget_bytes=budget, on_bytes=on_bytes)
    except KeyboardInterrupt:
        hint = "Run the command again. The command continues after the part that is finished."
        raise UserInterruptError(f"{prepared.folder} is not finished", hint=hint) from None


def _tell_mappable(prepared: Prepared) -> None:
    """Print a message if the dataset can also be read without conversion. `hp-ext data build` converts the dataset
    nevertheless, because a token store is smaller and has checksums."""
    from .files import is_mappable

    recipe, path = prepared.recipe, prepared.files[0]
    if recipe.tokenizer == "none" and recipe.eod is None and is_mappable(path, recipe.field):
        say(f"{path} can also be read without conversion: ArrowStore({str(path)!r}, {recipe.field!r})")


def _refuse_megatron(sources: tuple[str, ...]) -> None:
    from hyperpod_ext.errors import ConfigError, Problem
    from hyperpod_ext.runtime.data.token_store.megatron import is_megatron

    hint = "a Megatron dataset is read in place with MegatronStore(path); `hp-ext data inspect` shows it"
    if wrong := [Problem("needs no conversion", source=one, hint=hint) for one in sources if is_megatron(one)]:
        raise ConfigError(wrong)
