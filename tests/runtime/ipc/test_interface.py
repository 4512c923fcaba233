"""Addresses of this machine: of the interface that a job names, and on the way to another machine."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest

from hyperpod_ext.errors import JobFailedError, UnreachableError
from hyperpod_ext.runtime.ipc import interface
from hyperpod_ext.runtime.ipc.interface import address_of, address_towards


def test_an_interface_has_its_address() -> None:
    assert address_of("lo") == "127.0.0.1"


@pytest.mark.parametrize("name", ["hpx-none0", "a-name-that-is-too-long-for-linux"])
def test_one_that_is_not_here_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(JobFailedError, match=rf"network.interface is {name}, which has no IP address") as error:
        address_of(name)
    assert "Interfaces here are" in error.value.hint
    assert "lo" in error.value.hint


def test_an_interface_with_an_ipv6_address_alone_has_that_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = [
        "fe80000000000000000000fffe000001 04 40 20 80 hpx-six0",
        "fd000000000000000000000000000002 04 40 00 80 hpx-six0",
    ]
    (tmp_path / "if_inet6").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(interface, "_IPV6_ADDRESSES", tmp_path / "if_inet6")
    assert address_of("hpx-six0") == "fd00::2"


@pytest.mark.parametrize("master", ["127.0.0.1", "::1", "localhost"])
def test_the_own_address_is_of_the_family_that_the_other_machine_has(master: str) -> None:
    own = ipaddress.ip_address(address_towards(master))
    assert own.is_loopback
    assert master == "localhost" or own.version == ipaddress.ip_address(master).version


def test_a_name_without_an_address_is_named() -> None:
    with pytest.raises(UnreachableError, match=r"cannot reach nowhere\.invalid"):
        address_towards("nowhere.invalid")
