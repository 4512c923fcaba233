"""A signed manifest: what is signed, what is refused, and the bytes it stands for."""

from __future__ import annotations

from typing import Any

import pytest

from hyperpod_ext.errors import CorruptSnapshotError
from hyperpod_ext.runtime.snapshot.manifest import (
    FORMAT,
    check_bytes,
    check_crc,
    check_manifest,
    crc64nvme,
    crc_text,
    sign,
)

SECRET = b"0123456789abcdef0123456789abcdef"
DATA = bytes(range(200))
FIELDS: dict[str, Any] = {
    "format": FORMAT,
    "job": "j",
    "rank": 1,
    "world_size": 2,
    "generation": 3,
    "step": 40,
    "save_id": "g3-s40",
    "plan": "0123",
    "nbytes": len(DATA),
    "crc64nvme": crc_text(crc64nvme(DATA)),
    "values": [1, "two", None],
    "extras": {"sharing": "same"},
    "saved_at": 0.5,
}
SIGNED = sign(FIELDS, SECRET)


def test_what_was_signed_is_accepted():
    check_manifest(SIGNED, SECRET, job="j")
    check_bytes(SIGNED, DATA)


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_signed(field):
    without = {key: value for key, value in SIGNED.items() if key != field}
    for changed in ({**SIGNED, field: "another"}, without):
        with pytest.raises(CorruptSnapshotError):
            check_manifest(changed, SECRET, job=changed.get("job", "j"))


@pytest.mark.parametrize("place", [0, 8, 31, 32, 63])
def test_every_digit_of_the_signature_counts(place):
    digits = SIGNED["signature"]
    other = "0" if digits[place] != "0" else "1"
    changed = {**SIGNED, "signature": digits[:place] + other + digits[place + 1 :]}
    for signature in (changed["signature"], digits[:place], digits + "0"):
        with pytest.raises(CorruptSnapshotError, match="not signed with this job's secret"):
            check_manifest({**SIGNED, "signature": signature}, SECRET, job="j")


def test_another_job_with_the_same_secret_is_another_job():
    with pytest.raises(CorruptSnapshotError, match=": belongs to job 'j', not to 'k'"):
        check_manifest(SIGNED, SECRET, job="k")


def test_the_very_next_format_is_not_read():
    with pytest.raises(CorruptSnapshotError, match=f"format {FORMAT + 1} is newer") as caught:
        check_manifest(sign({**FIELDS, "format": FORMAT + 1}, SECRET), SECRET, job="j")
    assert "Upgrade" in caught.value.hint


@pytest.mark.parametrize("place", [0, len(DATA) // 2, len(DATA) - 1])
def test_one_bit_of_the_bytes_counts(place):
    changed = bytearray(DATA)
    changed[place] ^= 1
    with pytest.raises(CorruptSnapshotError, match="CRC64-NVME"):
        check_bytes(SIGNED, changed)


def test_a_checksum_counts_to_its_last_digit_and_so_does_the_length():
    checksum = crc64nvme(DATA)
    with pytest.raises(CorruptSnapshotError, match="CRC64-NVME"):
        check_crc(SIGNED, len(DATA), checksum ^ 1)
    with pytest.raises(CorruptSnapshotError, match="bytes, but the manifest lists"):
        check_crc(SIGNED, len(DATA) - 1, checksum)
