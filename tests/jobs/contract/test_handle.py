"""A handle is a URL that can be kept and read back."""

from __future__ import annotations

import pytest

from hyperpod_ext.errors import ConfigError
from hyperpod_ext.jobs.contract.handle import JobHandle


@pytest.mark.parametrize("text", ["local://localhost/tiny-gpt", "hyperpod-eks://research.us-west-2/a"])
def test_a_handle_is_read_back_as_it_was_written(text: str) -> None:
    assert str(JobHandle.parse(text)) == text


def test_a_bare_name_means_this_machine() -> None:
    assert JobHandle.parse("tiny-gpt") == JobHandle("local", "localhost", "tiny-gpt")


@pytest.mark.parametrize(
    "text", ["", "Tiny GPT", "local://", "local://localhost/", "../../etc", "a/b", "local://h/../x"]
)
def test_what_names_no_job_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="does not name a job"):
        JobHandle.parse(text)
