"""Tokenizers: bytes, a Hugging Face tokenizer, or any function. A tokenizer's identity is part of a token store's
key."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hyperpod_ext.errors import ConfigError, HyperpodExtError, Problem
from hyperpod_ext.runtime.data.token_store.segment import Tokens

_VALID = "valid: bytes, none, hf:NAME, path/to/tokenizer.json, module:function"

Encode = Callable[[Sequence[str]], Sequence[Any]]


@dataclass(frozen=True)
class Tokenizer:
    """Turns texts into tokens."""

    identity: str
    """Identification of the tokenizer, as part of a token store's key. Equal identities mean equal tokens."""
    encode: Encode
    """Function that converts a list of texts to one row of integers (tokens) per text."""
    vocab_size: int | None = None
    """Number of different tokens; every token is smaller than this number. If None, each segment uses the smallest
    integer type that fits its tokens."""
    name: str | None = None
    """Name with which `find` loads the same tokenizer in another process. None if only this process has the
    tokenizer."""


def find(tokenizer: str | Callable[[str], Any]) -> Tokenizer:
    """Return the tokenizer for a name or function.

    A name is `bytes`, `none` (the records are tokens already), `hf:NAME` (from the Hugging Face Hub's local cache), the
    path of a `tokenizer.json`, or `module:function`. A function gets one text, and may have attributes `identity` and
    `vocab_size`. Without `identity`, the function's name and source code identify the function, so data that the
    function reads must not change.

    Raises:
        ConfigError: the tokenizer does not exist.
        HyperpodExtError: a package is missing.
    """
    if not isinstance(tokenizer, str):
        return _of_function(tokenizer, None)
    if tokenizer == "bytes":
        return Tokenizer("bytes", _as_bytes, 256, "bytes")
    if tokenizer.startswith("hf:"):
        return _of_hub(tokenizer)
    if tokenizer == "none":
        return Tokenizer("none", _refuse, None, "none")
    if tokenizer.endswith(".json"):
        return _of_file(tokenizer)
    if ":" in tokenizer:
        return _of_function(_imported(tokenizer), tokenizer)
    raise _unknown(tokenizer, "is not a tokenizer")


def _as_bytes(texts: Sequence[str]) -> list[Tokens]:
    # "surrogatepass": a JSON text may contain half of a surrogate pair, which strict UTF-8 would refuse
    return [np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8) for text in texts]


def _refuse(texts: Sequence[str]) -> list[Any]:
    message = f"tokenizer none is for records of token ids, but a record is text: {texts[0][:40]!r}"
    raise ConfigError([Problem(message, path="tokenizer", hint=_VALID)])


def _of_file(name: str) -> Tokenizer:
    try:
        text = Path(name).read_bytes()
    except OSError as error:
        raise _unknown(name, error.strerror or str(error)) from None
    library = _library("tokenizers", "tokenizers", name)
    try:
        return _of_backend(library.Tokenizer.from_buffer(text), name)
    except ValueError as error:
        raise _unknown(name, f"is not a tokenizer.json ({error})") from None


def _of_hub(name: str) -> Tokenizer:
    library = _library("transformers", "transformers", name)
    try:
        found = library.AutoTokenizer.from_pretrained(name.removeprefix("hf:"))
    except (OSError, ValueError) as error:
        raise _unknown(name, str(error).partition("\n")[0]) from None
    if (backend := getattr(found, "backend_tokenizer", None)) is not None:
        return _of_backend(backend, name)
    text = json.dumps(found.get_vocab(), sort_keys=True).encode()

    def encode(texts: Sequence[str]) -> list[Any]:
        return [found.encode(text, add_special_tokens=False) for text in texts]

    return Tokenizer(f"{name} {_hash(text)}", encode, len(found), name)


def _of_backend(backend: Any, name: str) -> Tokenizer:
    encode_batch = getattr(backend, "encode_batch_fast", backend.encode_batch)

    def encode(texts: Sequence[str]) -> list[Any]:
        return [each.ids for each in encode_batch(list(texts), add_special_tokens=False)]

    identity = f"tokenizer.json {_hash(backend.to_str().encode())}"
    return Tokenizer(identity, encode, backend.get_vocab_size(with_added_tokens=True), name)


def _of_function(function: Callable[[str], Any], name: str | None) -> Tokenizer:
    def encode(texts: Sequence[str]) -> list[Any]:
        return [function(text) for text in texts]

    identity = getattr(function, "identity", None)
    if identity is None:
        try:
            source = inspect.getsource(function if hasattr(function, "__code__") else type(function))
        except (OSError, TypeError):
            message = f"the tokenizer {function!r} cannot be identified, because it has no source text"
            raise HyperpodExtError(message, hint="Add an attribute `identity` that changes with its tokens.") from None
        qualified = getattr(function, "__qualname__", type(function).__qualname__)
        identity = f"{function.__module__}:{qualified} {_hash(source.encode())}"
    return Tokenizer(str(identity), encode, getattr(function, "vocab_size", None), name)


def _imported(name: str) -> Callable[[str], Any]:
    module, _, attribute = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise _unknown(name, f"cannot be imported ({error})") from None
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise _unknown(name, f"{module} has no function {attribute}")
    encode: Callable[[str], Any] = found
    return encode


def _library(module: str, package: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise HyperpodExtError(f"the tokenizer {name} needs {package}", hint=f"pip install {package}") from None


def _unknown(name: str, why: str) -> ConfigError:
    return ConfigError([Problem(f"{name}: {why}", path="tokenizer", hint=_VALID)])


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:32]
