"""Nested state taken apart into a shape, tensors and plain values, and put together again. No pickle.

A training loop takes the same state apart at every save, so the walk is flat and cheap: a shape that
equals the last one means that only tensors' contents and values can have changed.
"""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hyperpod_ext.errors import JobFailedError

Shape = list[Any]
"""Nodes in the order of the walk: "T" a tensor, "V" a value, "B" bytes, whose value is their base64, "U" a tuple of
scalars, "{" and its keys, "[" and its length, "(" and its length. Survives JSON; keys may be text or whole numbers."""

Path = tuple[str | int, ...]


class Parts(NamedTuple):
    """A tree taken apart. Tensors are by reference, in order; so are values."""

    shape: Shape
    tensors: list[Any]
    values: list[Any]


_SCALARS = frozenset({bool, int, float, str, type(None)})


def take_apart(tree: Any, is_tensor: type | tuple[type, ...]) -> Parts:
    """Shape, tensors and values of `tree`; a leaf is a tensor when it is an instance of `is_tensor`.

    Raises:
        JobFailedError: a leaf that can be neither copied as a tensor nor written as JSON, with its path.
    """
    parts = Parts([], [], [])
    try:
        _take(tree, parts, is_tensor)
    except _UnstorableError:
        _explain(tree, (), is_tensor)
        raise
    return parts


class _UnstorableError(JobFailedError):
    pass


def _take(node: Any, parts: Parts, is_tensor: Any) -> None:
    shape = parts.shape
    kind = type(node)
    if kind in _SCALARS:
        shape.append("V")
        parts.values.append(node)
    elif isinstance(node, is_tensor):
        shape.append("T")
        parts.tensors.append(node)
    elif kind is dict or isinstance(node, Mapping):
        keys = tuple(node)
        if not all(type(key) is str or type(key) is int for key in keys):
            raise _UnstorableError("")
        shape += ("{", keys)
        tensors = parts.tensors
        for value in node.values():
            if isinstance(value, is_tensor):  # most leaves are, and a call costs more than they do
                shape.append("T")
                tensors.append(value)
            else:
                _take(value, parts, is_tensor)
    elif isinstance(node, list | tuple):
        flat = all(type(value) in _SCALARS for value in node)
        if flat:
            shape.append("U" if isinstance(node, tuple) else "V")
            parts.values.append(list(node))
            return
        shape += ("(" if isinstance(node, tuple) else "[", len(node))
        for value in node:
            _take(value, parts, is_tensor)
    elif kind is bytes:  # a state that its object has made bytes of itself; nobody here reads them
        shape.append("B")
        parts.values.append(base64.b64encode(node).decode())
    elif isinstance(node, bool | int | float | str):  # subclasses, such as numpy's float64
        shape.append("V")
        parts.values.append(node)
    else:
        raise _UnstorableError("")


def _explain(node: Any, path: Path, is_tensor: Any) -> None:
    """Find the leaf that cannot be stored, and say where it is."""
    if isinstance(node, is_tensor):
        return
    if isinstance(node, Mapping):
        for key, value in node.items():
            if type(key) not in (str, int):
                raise _unstorable((*path, str(key)), key, "a dictionary key")
            _explain(value, (*path, key), is_tensor)
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            _explain(value, (*path, index), is_tensor)
    elif not isinstance(node, bool | int | float | str | bytes | None):
        raise _unstorable(path, node, "a value")


def _unstorable(path: Path, value: object, what: str) -> JobFailedError:
    return JobFailedError(
        f"{fqn(path)} is {what} of type {type(value).__name__}; a snapshot holds tensors, numbers, text, "
        "bytes, and dicts, lists and tuples of them",
        hint="Leave it out of the object's state_dict(), or store it as a tensor.",
    )


def fqn(path: Path) -> str:
    """Name of a leaf, as torch.distributed.checkpoint names it: `optimizer.state.0.exp_avg`."""
    return ".".join(map(str, path))


def put_together(shape: Sequence[Any], tensors: Sequence[Any], values: Sequence[Any]) -> Any:
    """The tree that `take_apart` took apart, with `tensors` and `values` in their places."""
    return _put(iter(shape), iter(tensors), iter(values))


def _put(shape: Iterator[Any], tensors: Iterator[Any], values: Iterator[Any]) -> Any:
    match next(shape):
        case "T":
            return next(tensors)
        case "V":
            return next(values)
        case "B":
            return base64.b64decode(next(values), validate=True)
        case "U":
            return tuple(next(values))
        case "{":
            return OrderedDict((key, _put(shape, tensors, values)) for key in next(shape))
        case "[":
            return [_put(shape, tensors, values) for _ in range(next(shape))]
        case "(":
            return tuple(_put(shape, tensors, values) for _ in range(next(shape)))
        case kind:
            raise JobFailedError(f"unknown kind of node {kind!r} in a snapshot's shape")


def leaf_paths(shape: Sequence[Any]) -> tuple[list[Path], list[Path]]:
    """Paths of the tensors and of the values, in their order."""
    tensors: list[Path] = []
    values: list[Path] = []
    _walk(iter(shape), (), tensors, values)
    return tensors, values


def _walk(shape: Iterator[Any], path: Path, tensors: list[Path], values: list[Path]) -> None:
    match next(shape):
        case "T":
            tensors.append(path)
        case "V" | "U" | "B":
            values.append(path)
        case "{":
            for key in next(shape):
                _walk(shape, (*path, key), tensors, values)
        case "[" | "(":
            for index in range(next(shape)):
                _walk(shape, (*path, index), tensors, values)
