"""MACs of files: what they bind, and what they must never do twice."""

from __future__ import annotations

import itertools
import sys

import pytest
from forged import forge
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperpod_ext.errors import CorruptSnapshotError, HyperpodExtError
from hyperpod_ext.runtime.snapshot.manifest import crc64nvme, crc_text
from hyperpod_ext.runtime.storage.mac import Expected, Mac, Reading, Running, mac_of
from hyperpod_ext.runtime.storage.object_store import MIB, Cancelled

SECRET = b"0123456789abcdef"


def file_of(data: bytes, mac: Mac | None) -> Expected:
    return Expected("f", len(data), crc_text(crc64nvme(data)), mac)


@settings(deadline=None)  # the first one imports
@given(data=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200), max_size=4))
def test_a_mac_is_the_same_however_the_bytes_are_cut(data: bytes, cuts: list[int]) -> None:
    reading = Reading(file_of(data, mac_of(SECRET, memoryview(data))), SECRET)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, stop in itertools.pairwise(edges):
        reading.update(memoryview(data)[start:stop])
    assert reading.wrong() is None


@pytest.mark.parametrize("nbytes", [0, 1, MIB - 1, MIB, 9 * MIB + 7])
def test_any_other_byte_is_found(nbytes: int) -> None:
    data = bytes(nbytes)
    file = file_of(data, mac_of(SECRET, memoryview(data)))
    file.check(memoryview(data), SECRET, "f")
    for other in (data + b"\0", data[:-1], data[:-1] + b"\1"):
        if other != data:
            with pytest.raises(CorruptSnapshotError, match=r"^f: "):
                file.check(memoryview(other), SECRET, "f")


@settings(deadline=None)  # the first one imports
@given(data=st.binary(min_size=32, max_size=300), new=st.binary(min_size=1, max_size=8))
def test_what_keeps_the_crc_does_not_keep_the_mac(data: bytes, new: bytes) -> None:
    new = new if data[: len(new)] != new else bytes([new[0] ^ 1]) + new[1:]
    forged = forge(data, 0, new, 16)
    assert (crc64nvme(forged), forged != data) == (crc64nvme(data), True)
    file = file_of(data, mac_of(SECRET, memoryview(data)))
    with pytest.raises(CorruptSnapshotError, match="its CRC64-NVME is right, but not its MAC"):
        file.check(memoryview(forged), SECRET, "f")
    damaged = bytes([forged[0] ^ 1]) + forged[1:]
    with pytest.raises(CorruptSnapshotError, match=r"CRC64-NVME is [0-9a-f]{16}, but the manifest lists"):
        file.check(memoryview(damaged), SECRET, "f")


def test_another_secret_makes_another_mac() -> None:
    data = memoryview(b"weights")
    with pytest.raises(CorruptSnapshotError, match="not its MAC"):
        file_of(data.tobytes(), mac_of(b"another secret of 16", data)).check(data, SECRET, "f")


def test_no_two_macs_are_made_with_one_key() -> None:
    """Two messages under one key and nonce would give the key of the hash away."""
    data = memoryview(b"weights")
    macs = [mac_of(SECRET, data) for _ in range(50)]
    assert len({mac["salt"] for mac in macs}) == len({mac["tag"] for mac in macs}) == 50


def test_a_known_answer() -> None:
    """What is stored today must be readable tomorrow."""
    running = Running(SECRET, bytes(range(16)))
    running.update(memoryview(b"weights"))
    assert running.end() == {
        "kind": "aes-256-gmac",
        "salt": "000102030405060708090a0b0c0d0e0f",
        "tag": "7d993219ba7f3ca9b182b14a13fc23bf",
    }


def test_a_mac_that_nobody_wants_any_more_is_not_made() -> None:
    with pytest.raises(Cancelled):
        mac_of(SECRET, memoryview(bytes(100)), lambda: True)


@pytest.mark.parametrize("mac", [{"kind": "aes-512"}, {"kind": "aes-256-gmac", "salt": "00", "tag": "00"}])
def test_a_mac_of_a_newer_version_is_told_as_that(mac: Mac) -> None:
    with pytest.raises(CorruptSnapshotError, match="which this version cannot check") as told:
        Reading(file_of(b"", mac), SECRET)
    assert "Upgrade" in str(told.value)


def test_without_the_secret_damage_is_found() -> None:
    reading = Reading(file_of(b"weights", mac_of(SECRET, memoryview(b"weights"))), None)
    reading.update(memoryview(b"Weights"))
    assert "CRC64-NVME is" in str(reading.wrong())


def test_where_its_library_is_missing_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(HyperpodExtError, match="cryptography") as told:
        mac_of(SECRET, memoryview(b""))
    assert "hyperpod-ext[runtime]" in str(told.value)
