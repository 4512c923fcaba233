"""One segment of a token store: an immutable file of tokens with checksums.

    0      magic, length and CRC64-NVME of the header
    20     header: JSON, see `SegmentInfo`; zeros up to 4096
    4096   tokens of all documents, contiguous, in the smallest unsigned type that holds them
           offsets: u64[documents + 1], in tokens
           CRC64-NVME of each 256 KiB from 4096 on: u64

All numbers are little-endian. A process verifies the checksum of a block (256 KiB) when it first reads from the block.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hyperpod_ext.errors import CorruptSegmentError
from hyperpod_ext.runtime.data.token_store.files import Bytes, publish, rebuild_hint
from hyperpod_ext.runtime.snapshot.manifest import crc64nvme

FORMAT = 1
HEADER_BYTES = 4096
BLOCK_BYTES = 256 * 1024
DTYPES = ("uint8", "uint16", "uint32", "uint64")
_MAGIC = b"HPXTOK1\n"
_FRAME = struct.Struct("<8sIQ")
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)

Tokens = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """The contents of a segment's header."""

    index: int
    store: str
    """Key of the token store to which the segment belongs."""
    dtype: str
    documents: int
    tokens: int
    nbytes: int
    """Size of the whole segment file, in bytes."""
    crc64nvme: str
    """Checksum of the checksums of all blocks, and so of all tokens and offsets."""
    next: Mapping[str, int] = field(default_factory=dict)
    """Position in the source files at which the next segment begins."""
    format: int = FORMAT

    @property
    def offsets_at(self) -> int:
        return HEADER_BYTES + _round_up(self.tokens * np.dtype(self.dtype).itemsize, 64)

    @property
    def crcs_at(self) -> int:
        return self.offsets_at + 8 * (self.documents + 1)

    @property
    def blocks(self) -> int:
        return -(-(self.crcs_at - HEADER_BYTES) // BLOCK_BYTES)


def segment_name(index: int) -> str:
    """Return the file name of the segment with this index."""
    return f"seg-{index:06d}.tokens"


def write_segment(
    folder: Path, index: int, tokens: Tokens, offsets: Tokens, *, store: str, following: Mapping[str, int]
) -> SegmentInfo:
    """Publish a segment file. `tokens` has shape [n]. `offsets` (u64) has one entry more than there are documents.

    `store`: key of the token store. `following`: position in the source files after the segment.

    Raises:
        DiskFullError: no space is left. The partial file is removed.
    """
    offsets = np.ascontiguousarray(offsets, dtype="<u8")
    tokens = np.ascontiguousarray(tokens, dtype=tokens.dtype.newbyteorder("<"))
    body: list[Bytes] = [tokens.data, bytes(-tokens.nbytes % 64), offsets.data]
    crcs = np.array(list(_block_crcs(body)), dtype="<u8")
    nbytes = HEADER_BYTES + sum(memoryview(part).nbytes for part in body) + crcs.nbytes
    checksum = f"{crc64nvme(crcs.data.cast('B')):016x}"
    info = SegmentInfo(
        index, store, tokens.dtype.name, len(offsets) - 1, len(tokens), nbytes, checksum, dict(following)
    )
    text = json.dumps(asdict(info)).encode()
    frame = _FRAME.pack(_MAGIC, len(text), crc64nvme(text)) + text
    publish(folder / segment_name(index), [frame.ljust(HEADER_BYTES, b"\0"), *body, crcs.data])
    return info


def read_info(path: Path) -> SegmentInfo:
    """Check a segment's header and the length of its file. Returns the header.

    Raises:
        FileNotFoundError: the file does not exist.
        CorruptSegmentError: the segment is damaged. The error's message names the damaged bytes.
    """
    with path.open("rb") as file:
        return _parse(path, file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size)


def _parse(path: Path, head: bytes, nbytes: int) -> SegmentInfo:
    hint = rebuild_hint(path.parent)
    if len(head) < HEADER_BYTES or not head.startswith(_MAGIC):
        raise CorruptSegmentError(
            f"{path}: bytes 0 to {min(len(head), HEADER_BYTES)} are not the header of a segment", hint=hint
        )
    _, length, checksum = _FRAME.unpack_from(head)
    text = head[_FRAME.size : _FRAME.size + length]
    if len(text) != length or crc64nvme(text) != checksum:
        raise CorruptSegmentError(
            f"{path}: the header, bytes 0 to {HEADER_BYTES}, does not match its checksum", hint=hint
        )
    known = json.loads(text)
    if known["format"] > FORMAT:
        raise CorruptSegmentError(
            f"{path}: format {known['format']} is newer than {FORMAT}, the newest that this version reads",
            hint="Upgrade hyperpod_ext in the container.",
        )
    info = SegmentInfo(**{name: known[name] for name in SegmentInfo.__dataclass_fields__})
    if info.dtype not in DTYPES:
        raise CorruptSegmentError(f"{path}: the header has the unknown type {info.dtype!r} of tokens", hint=hint)
    if nbytes != info.nbytes:
        raise CorruptSegmentError(f"{path}: has {nbytes} bytes, but its header lists {info.nbytes}", hint=hint)
    return info


class Segment:
    """A memory-mapped segment file. Reads take no lock and copy no data. The mapping stays valid if the file is
    deleted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.info = _parse(path, os.pread(descriptor, HEADER_BYTES, 0), os.fstat(descriptor).st_size)
            # a private and writable mapping: tensors need no copy, and only this process sees writes to them
            self._map = mmap.mmap(
                descriptor,
                self.info.nbytes,
                flags=mmap.MAP_PRIVATE | _NORESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
        finally:
            os.close(descriptor)
        info = self.info
        dtype = np.dtype(info.dtype).newbyteorder("<")
        self._itemsize = dtype.itemsize
        self._writable: Tokens = np.frombuffer(self._map, dtype, info.tokens, HEADER_BYTES)
        self._tokens = self._writable.view()
        self._tokens.flags.writeable = False
        self.offsets: npt.NDArray[np.uint64] = np.frombuffer(self._map, "<u8", info.documents + 1, info.offsets_at)
        """Token offset of the beginning of each document, followed by the end of the last document."""
        self.offsets.flags.writeable = False
        self._crcs = np.frombuffer(self._map, "<u8", info.blocks, info.crcs_at)
        if f"{crc64nvme(self._crcs.data.cast('B')):016x}" != info.crc64nvme:
            raise CorruptSegmentError(
                f"{path}: bytes {info.crcs_at} to {info.nbytes}, the blocks' checksums, are damaged",
                hint=rebuild_hint(path.parent),
            )
        self._seen = bytearray(info.blocks)
        self._all_seen = False
        self._rows = windows_of(self._tokens, 1)
        self._see((info.offsets_at - HEADER_BYTES) // BLOCK_BYTES, info.blocks - 1)
        if self.offsets[0] != 0 or self.offsets[-1] != info.tokens or (np.diff(self.offsets.view("<i8")) < 0).any():
            raise CorruptSegmentError(
                f"{path}: the offsets of documents are not in order", hint=rebuild_hint(path.parent)
            )

    def document(self, at: int, writable: bool = False) -> Tokens:
        """Return document `at` of this segment, as a view. See `tokens`."""
        item = self.offsets.item
        return self.tokens(item(at), item(at + 1), writable)

    def tokens(self, begin: int, end: int, writable: bool = False) -> Tokens:
        """Return tokens `begin` to `end` of this segment as a view of shape [end - begin], read-only unless `writable`.

        Raises:
            CorruptSegmentError: a block of the segment does not match its checksum.
        """
        if end > begin and not self._all_seen:
            first, last = begin * self._itemsize // BLOCK_BYTES, (end * self._itemsize - 1) // BLOCK_BYTES
            if self._seen.find(0, first, last + 1) >= 0:
                self._see(first, last)
        return (self._writable if writable else self._tokens)[begin:end]

    def windows(self, begins: npt.NDArray[np.int64], length: int) -> Tokens:
        """Return the `length` tokens from each position in `begins` on, as a copy of shape [len(begins), length].

        Raises:
            CorruptSegmentError: a block of the segment does not match its checksum.
        """
        if not self._all_seen:
            for begin in begins.tolist():
                self.tokens(begin, begin + length)
        rows = self._rows  # keep a reference: another thread may replace `_rows` for another `length`
        if rows.shape[1] != length:
            self._rows = rows = windows_of(self._tokens, length)
        return rows[begins]

    def damage(self) -> list[str]:
        """Verify all blocks of the segment, and return one sentence for each damaged block."""
        return [self._problem(block) for block in range(self.info.blocks) if not self._matches(block)]

    def _see(self, first: int, last: int) -> None:
        for block in range(first, last + 1):
            if not self._seen[block]:
                if not self._matches(block):
                    raise CorruptSegmentError(
                        f"{self.path}: {self._problem(block)}", hint=rebuild_hint(self.path.parent)
                    )
                self._seen[block] = 1
        self._all_seen = 0 not in self._seen

    def _matches(self, block: int) -> bool:
        begin, end = self._range(block)
        with memoryview(self._map) as view, view[begin:end] as part:
            return crc64nvme(part) == int(self._crcs[block])

    def _range(self, block: int) -> tuple[int, int]:
        begin = HEADER_BYTES + block * BLOCK_BYTES
        return begin, min(begin + BLOCK_BYTES, self.info.crcs_at)

    def _problem(self, block: int) -> str:
        begin, end = self._range(block)
        return f"bytes {begin} to {end} do not match their checksum"


def windows_of(tokens: Tokens, length: int) -> Tokens:
    """Return a view of all windows of `length` tokens. `tokens` has shape [n], and the view [n - length + 1,
    length]."""
    shape = (max(len(tokens) - length + 1, 0), length)
    return np.lib.stride_tricks.as_strided(tokens, shape, tokens.strides * 2, writeable=False)


def _block_crcs(parts: Sequence[Bytes]) -> Iterator[int]:
    """Yield the CRC64-NVME of each 256 KiB block of the concatenated `parts`."""
    checksum, filled = 0, 0
    for part in parts:
        view = memoryview(part).cast("B") if memoryview(part).nbytes else memoryview(b"")
        while view:
            piece = view[: BLOCK_BYTES - filled]
            checksum, filled, view = crc64nvme(piece, checksum), filled + len(piece), view[len(piece) :]
            if filled == BLOCK_BYTES:
                yield checksum
                checksum, filled = 0, 0
    if filled:
        yield checksum


def _round_up(number: int, to: int) -> int:
    return -(-number // to) * to
