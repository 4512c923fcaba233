"""Build the zip archive that `torch.save` writes around a tensor, before the tensor's values are known.

A `.distcp` file is a sequence of zip archives, one for each tensor. A tensor's type and shape determine all bytes
around its values. Therefore the layout of a snapshot's file is built only once, and each save only copies values. The
archive's checksum of the values stays zero, because PyTorch does not read this checksum. A restore verifies the
CRC64-NVME of the whole snapshot (all archives) instead.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

ALIGNMENT = 64
"""A tensor's values start at a multiple of this many bytes, so that copies run at full memory speed."""

_LOCAL, _CENTRAL, _END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
_END64, _LOCATOR64 = b"PK\x06\x06", b"PK\x06\x07"
_MAX32 = 0xFFFFFFFF
_DOS_EPOCH = 0x21
"""1980-01-01, the date of all files in an archive, so that equal states have equal bytes."""
_PADDING_ID = 0x4246
"""ID of the extra field that PyTorch uses for padding."""


class Frame(NamedTuple):
    """The bytes of an archive before and after the values of its tensor."""

    prefix: bytes
    suffix: bytes


class _Record(NamedTuple):
    name: bytes
    size: int
    crc32: int
    start: int


def frame(data_pickle: bytes, nbytes: int) -> Frame:
    """Return the bytes of an archive before and after a tensor's values.

    The length of the prefix is a multiple of 64 bytes, so the values are aligned if the archive is aligned.

    Args:
        data_pickle: contents of the archive's file `data.pkl`.
        nbytes: number of bytes of the tensor's values.
    """
    records: list[_Record] = []
    prefix = _small_records(data_pickle, records)
    start = len(prefix)
    prefix += _local_header(b"archive/data/0", nbytes, 0, start, align=True)
    records.append(_Record(b"archive/data/0", nbytes, 0, start))
    return Frame(prefix, _directory(records, len(prefix) + nbytes))


def archive(data_pickle: bytes) -> bytes:
    """Return the complete archive of an object without tensors, with `data_pickle` as `data.pkl`."""
    records: list[_Record] = []
    body = _small_records(data_pickle, records)
    return body + _directory(records, len(body))


def _small_records(data_pickle: bytes, records: list[_Record]) -> bytes:
    body = b""
    for name, data in (("data.pkl", data_pickle), ("byteorder", b"little"), ("version", b"3\n")):
        full = f"archive/{name}".encode()
        record = _Record(full, len(data), zlib.crc32(data), len(body))
        body += _local_header(full, len(data), record.crc32, len(body)) + data
        records.append(record)
    return body


def _sizes(size: int) -> tuple[int, bytes]:
    """Return a file's 32-bit size field and its zip64 extra field, which is empty unless the size needs more bits."""
    if size < _MAX32:
        return size, b""
    return _MAX32, struct.pack("<HHQQ", 1, 16, size, size)


def _local_header(name: bytes, size: int, crc32: int, start: int, *, align: bool = False) -> bytes:
    field, extra = _sizes(size)
    if align:
        end = start + 30 + len(name) + len(extra) + 4
        padding = -end % ALIGNMENT
        extra += struct.pack("<HH", _PADDING_ID, padding) + b"\0" * padding
    version = 45 if size >= _MAX32 else 20
    fixed = (version, 0, 0, 0, _DOS_EPOCH, crc32, field, field, len(name), len(extra))
    return _LOCAL + struct.pack("<HHHHHIIIHH", *fixed) + name + extra


def _directory(records: list[_Record], start: int) -> bytes:
    body = b""
    for record in records:
        field, extra = _sizes(record.size)
        version = 45 if extra else 20
        fixed = (version, version, 0, 0, 0, _DOS_EPOCH, record.crc32, field, field, len(record.name), len(extra))
        body += _CENTRAL + struct.pack("<HHHHHHIIIHHHHHII", *fixed, 0, 0, 0, 0, record.start) + record.name + extra
    count, size = len(records), len(body)
    if start < _MAX32:
        return body + _END + struct.pack("<HHHHIIH", 0, 0, count, count, size, start, 0)
    end64 = _END64 + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, size, start)
    locator = _LOCATOR64 + struct.pack("<IQI", 0, start + size, 1)
    return body + end64 + locator + _END + struct.pack("<HHHHIIH", 0, 0, count, count, size, _MAX32, 0)
