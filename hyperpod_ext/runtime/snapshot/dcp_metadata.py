"""Write DCP's `.metadata` and a file of plain values for a checkpoint, so that plain `dcp.load` can read it.

`.metadata` and the file of plain values exist only for PyTorch. hyperpod_ext itself reads the signed manifest instead,
and never unpickles. `.metadata` is a pickle, written opcode by opcode, because the writing process does not import
torch. The class names in `.metadata` are those of torch.distributed.checkpoint, unchanged since torch 2.3. A test
compares `.metadata` with torch's own pickle. Torch 2.15 adds strides to a tensor's properties. `.metadata` leaves
strides out: torch 2.15 reads metadata without strides, and torch 2.13 refuses metadata with strides.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyperpod_ext.runtime.snapshot.layout_plan import Item, Plan
from hyperpod_ext.runtime.snapshot.tree import fqn, put_together
from hyperpod_ext.runtime.snapshot.zip_file import archive

METADATA_FILE = ".metadata"
VERSION = "1.0.0"


@dataclass(frozen=True, slots=True)
class RankFile:
    """One rank's part of a checkpoint."""

    rank: int
    plan: Plan
    values: Sequence[Any]
    file: str
    """Name of the file with the rank's tensors, relative to the checkpoint's folder."""
    frozen: tuple[str, int] = ("", 0)
    """Name and length of a separate file with the frozen parameters, which are the first bytes of the snapshot. If
    there is such a file, `file` contains only the bytes after the frozen parameters."""

    def place(self, item: Item) -> _ShardExtent:
        """Return the file that contains a shard, and the shard's offset and length in it."""
        first, nbytes = self.frozen
        file, start = (first, item.start) if item.end <= nbytes else (self.file, item.start - nbytes)
        return _ShardExtent(item.sizes, file, start, item.end - item.start)


@dataclass(frozen=True, slots=True)
class Derived:
    """Contents of the files that plain `dcp.load` needs in addition to the files with the ranks' tensors."""

    metadata: bytes
    values_file: bytes


def derive(parts: Sequence[RankFile], values_file: str) -> Derived:
    """Return DCP's files for a checkpoint.

    If several ranks have saved the same shard or plain value, the files use the lowest rank's shard or value.

    Args:
        parts: the files of all ranks.
        values_file: name of the file of plain values, to which `.metadata` refers.
    """
    tensors: dict[str, _TensorEntry] = {}
    for part in sorted(parts, key=lambda part: part.rank):
        for item in part.plan.items:
            entry = tensors.setdefault(item.fqn, _TensorEntry(item.dtype, item.shape, {}))
            entry.chunks.setdefault(item.offsets, part.place(item))
    paths: dict[str, tuple[str | int, ...]] = {}
    body, places = b"", {}
    for part in sorted(parts, key=lambda part: part.rank):
        for path, value in _leaves(part):
            name = fqn(path)
            if name not in paths and value is not _TENSOR:
                blob = archive(pickle.dumps(value, protocol=2))
                places[name] = (len(body), len(blob))
                body += blob
            paths.setdefault(name, path)
    return Derived(_metadata(tensors, places, paths, values_file), body)


# --- leaves of the state, by the rules of torch.distributed.checkpoint -----------------------------

_TENSOR = object()


def _leaves(part: RankFile) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    count = sum(1 for node in part.plan.shape if node == "T")
    tree = put_together(part.plan.shape, [_TENSOR] * count, part.values)
    return _traverse((), tree)


def _traverse(path: tuple[str | int, ...], node: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _traverse((*path, str(key)), value)
    elif _is_taken_apart(node):
        for index, value in enumerate(node):
            yield from _traverse((*path, index), value)
    else:
        yield path, node


def _is_taken_apart(node: Any) -> bool:
    """Return whether the elements of a list or tuple are stored one by one, not as one pickle.

    PyTorch pickles each tuple as one value, but DCP's files store a tuple that contains tensors by element.
    """
    if isinstance(node, list):
        return any(isinstance(value, Mapping) or value is _TENSOR or _is_taken_apart(value) for value in node)
    return isinstance(node, tuple) and _holds_tensors(node)


def _holds_tensors(node: Any) -> bool:
    if isinstance(node, Mapping):
        return any(_holds_tensors(value) for value in node.values())
    if isinstance(node, list | tuple):
        return any(_holds_tensors(value) for value in node)
    return node is _TENSOR


# --- the pickle -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ShardExtent:
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class _TensorEntry:
    dtype: str
    shape: tuple[int, ...]
    chunks: dict[tuple[int, ...], _ShardExtent]


_MODULE = "torch.distributed.checkpoint.metadata"


def _metadata(
    tensors: Mapping[str, _TensorEntry],
    values: Mapping[str, tuple[int, int]],
    paths: Mapping[str, tuple[str | int, ...]],
    values_file: str,
) -> bytes:
    described = [(_text(name), _tensor_metadata(entry)) for name, entry in tensors.items()]
    described += [(_text(name), _object(_MODULE, "BytesStorageMetadata", _dict([]))) for name in values]
    stored = [
        (_index(name, offsets), _storage(place.file, place.start, place.length))
        for name, entry in tensors.items()
        for offsets, place in entry.chunks.items()
    ]
    stored += [(_index(name, None), _storage(values_file, *place)) for name, place in values.items()]
    wanted = [*tensors, *values]
    planner = [(_text(name), _tuple([_key(key) for key in paths[name]])) for name in wanted if name in paths]
    state = _dict(
        [
            (_text("state_dict_metadata"), _dict(described)),
            (_text("planner_data"), _dict(planner)),
            (_text("storage_data"), _dict(stored)),
            (_text("storage_meta"), _NONE),
            (_text("version"), _text(VERSION)),
        ]
    )
    return b"\x80\x02" + _object(_MODULE, "Metadata", state) + b"."


def _tensor_metadata(entry: _TensorEntry) -> bytes:
    layout = _call("torch.serialization", "_get_layout", [_text("torch.strided")])
    memory_format = _call(_MODULE, "_MEM_FORMAT_ENCODING", [_integer(0)])
    state = _tuple([_global("torch", entry.dtype), layout, _FALSE, memory_format, _FALSE])
    properties = _object(_MODULE, "TensorProperties", state)
    chunks = [
        _object(
            _MODULE,
            "ChunkStorageMetadata",
            _dict([(_text("offsets"), _size(offsets)), (_text("sizes"), _size(place.sizes))]),
        )
        for offsets, place in entry.chunks.items()
    ]
    fields = [("properties", properties), ("size", _size(entry.shape)), ("chunks", _list(chunks))]
    return _object(_MODULE, "TensorStorageMetadata", _dict([(_text(name), value) for name, value in fields]))


def _index(name: str, offsets: tuple[int, ...] | None) -> bytes:
    state = [("fqn", _text(name)), ("index", _NONE), ("offset", _NONE if offsets is None else _size(offsets))]
    return _object(_MODULE, "MetadataIndex", _dict([(_text(key), value) for key, value in state]))


def _storage(file: str, start: int, length: int) -> bytes:
    state = [("relative_path", _text(file)), ("offset", _integer(start)), ("length", _integer(length))]
    module = "torch.distributed.checkpoint.filesystem"
    return _object(module, "_StorageInfo", _dict([(_text(key), value) for key, value in state]))


_NONE, _FALSE = b"N", b"\x89"


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _object(module: str, name: str, state: bytes) -> bytes:
    """Return the pickle opcodes that create an instance by `__new__`, and then set its state."""
    return _global(module, name) + b")\x81" + state + b"b"


def _call(module: str, name: str, arguments: Sequence[bytes]) -> bytes:
    return _global(module, name) + _tuple(arguments) + b"R"


def _size(sizes: Sequence[int]) -> bytes:
    return _call("torch", "Size", [_tuple([_integer(size) for size in sizes])])


def _key(key: str | int) -> bytes:
    return _integer(key) if isinstance(key, int) else _text(key)


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _integer(value: int) -> bytes:
    if 0 <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(9, "little", signed=True)
    return b"\x8a" + struct.pack("<B", len(data)) + data


def _tuple(items: Sequence[bytes]) -> bytes:
    return b"(" + b"".join(items) + b"t"


def _list(items: Sequence[bytes]) -> bytes:
    return b"](" + b"".join(items) + b"e"


def _dict(items: Sequence[tuple[bytes, bytes]]) -> bytes:
    return b"}(" + b"".join(key + value for key, value in items) + b"u"
