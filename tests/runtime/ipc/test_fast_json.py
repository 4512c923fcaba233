"""Messages and events are written and read as Python's own module would."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_ext.runtime.ipc import fast_json

SURROGATES = st.text(st.characters(codec=None, categories=["Cs", "L", "Zl", "Cc"]), max_size=4)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | SURROGATES
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
)


def same(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@given(VALUES)
def test_what_is_written_is_read_again_by_either(value):
    text = fast_json.dump(value)
    assert text.isascii()
    assert b"\n" not in text
    assert same(fast_json.load(text), value)
    assert same(json.loads(text), value)
    assert same(fast_json.load(json.dumps(value).encode()), value)


@pytest.mark.parametrize("text", [b"", b"{", b'{"a":}', b"nul", b'"\xff"', b"[1] 2", b"{'a': 1}"])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(ValueError, match=r"line 1 column|utf-8"):
        fast_json.load(text)


def test_what_is_nested_too_deeply_is_refused():
    with pytest.raises((ValueError, RecursionError)):
        fast_json.load(b"[" * 100_000)
