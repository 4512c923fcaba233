"""The interface that a job names, looked up on this machine."""

from __future__ import annotations

import pytest

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.ipc.interface import address_of


def test_an_interface_has_its_address() -> None:
    assert address_of("lo") == "127.0.0.1"


@pytest.mark.parametrize("name", ["hpx-none0", "a-name-that-is-too-long-for-linux"])
def test_one_that_is_not_here_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(JobFailedError, match=rf"network.interface is {name}, which has no IPv4 address") as error:
        address_of(name)
    assert "Interfaces here are" in error.value.hint
    assert "lo" in error.value.hint
