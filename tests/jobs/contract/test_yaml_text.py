"""YAML is written by lines of ours as PyYAML writes it, and read back as what it was."""

from __future__ import annotations

import textwrap

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from job_configs import ANY_TEXT

from hyperpod_ext.jobs.contract.yaml_text import dumped, read_all, to_yaml

TEXTS = ANY_TEXT | st.text(alphabet="ab \n", max_size=8)
VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
DATA = st.recursive(
    VALUES, lambda below: st.lists(below, max_size=3) | st.dictionaries(TEXTS, below, max_size=3), max_leaves=10
)


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(data=DATA, indent=st.integers(0, 4))
def test_any_data_is_written_as_pyyaml_writes_it(data: object, indent: int) -> None:
    text = to_yaml(data, indent)
    assert text == textwrap.indent(dumped(data), " " * indent)
    assert read_all(textwrap.dedent(text) + "\n") == [data] or indent


@pytest.mark.parametrize(
    "data", [{"k" * 200: 1}, {"": 1}, {"two\nlines": 1}, {"a": "word " * 3000}, {"a": "x\ny\n\n"}, [[], {}, [[{}]]]]
)
def test_what_pyyaml_breaks_in_two_is_its_own(data: object) -> None:
    assert to_yaml(data) == dumped(data)
    assert yaml.safe_load(to_yaml(data) + "\n") == data
