"""Split nested state into a shape, tensors and plain values, and join them again. No pickle.

A training loop splits the same state at every save, so the walk is flat and cheap: if the shape equals the last one,
only tensors' contents and values can have changed.
"""

from __future__ import annotations

import base64
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hyperpod_ext.errors import JobFailedError

Shape = list[Any]
"""Nodes in the order of the walk: "T" a tensor, "V" a value, "B" bytes, with their base64 as value, "U" a tuple of
scalars, "{" and its keys, "[" and its length, "(" and its length, "=" and the type to make from the next node.
Survives JSON; keys may be text or whole numbers."""

Path = tuple[str | int, ...]


class Form(NamedTuple):
    """Type, shape and memory layout of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    """Strides in elements; None: contiguous, or unknown, as for a shard."""


class Parts(NamedTuple):
    """A split tree. Tensors and values are references, in order."""

    shape: Shape
    tensors: list[Any]
    values: list[Any]
    built: Mapping[str, Form] = {}
    """Original forms by name, of tensors that a process builds before it restores them."""


_SCALARS = frozenset({bool, int, float, str, type(None)})
_FACTORIES = {kind.__name__: kind for kind in (bool, int, float, str, list, tuple, dict, set)} | {"": None}
"""Factories of the defaultdicts that can be restored, by name."""
_NUMPY = frozenset({"bool_", "float16", "float32", "float64"}) | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}
"""Names of numpy types with values that Python numbers hold exactly."""


def take_apart(tree: Any, is_tensor: type | tuple[type, ...]) -> Parts:
    """Return shape, tensors and values of `tree`; leaves of type `is_tensor` are tensors.

    Raises:
        JobFailedError: a node of a type that cannot be restored; names its path.
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
    elif kind is dict:
        keys = tuple(node)
        if not all(type(key) is str or type(key) is int for key in keys):
            raise _UnstorableError("")
        shape += ("{", keys)
        tensors = parts.tensors
        for value in node.values():
            if isinstance(value, is_tensor):  # inline: most leaves are tensors, and a call costs more
                shape.append("T")
                tensors.append(value)
            else:
                _take(value, parts, is_tensor)
    elif kind is list or kind is tuple:
        flat = all(type(value) in _SCALARS for value in node)
        if flat:
            shape.append("U" if kind is tuple else "V")
            parts.values.append(list(node))
            return
        shape += ("(" if kind is tuple else "[", len(node))
        for value in node:
            _take(value, parts, is_tensor)
    elif kind is bytes:  # a state that its object has serialized; not read here
        shape.append("B")
        parts.values.append(base64.b64encode(node).decode())
    else:
        name, plain = _as_plain(node)
        shape.append(f"={name}")
        _take(plain, parts, is_tensor)


def _as_plain(node: Any) -> tuple[str, Any]:
    """Return the name of the node's type for `_made`, and the plain value to make it from."""
    kind = type(node)
    if kind is OrderedDict or kind is Counter:
        return kind.__name__, dict(node)
    if kind is defaultdict:
        factory = "" if node.default_factory is None else node.default_factory.__name__
        if _FACTORIES.get(factory, _take) is node.default_factory:
            return f"defaultdict.{factory}", dict(node)
    if kind is complex:
        return "complex", [node.real, node.imag]
    module, name = kind.__module__, kind.__name__
    if (module, name) == ("torch", "Size"):
        return "torch.Size", tuple(node)
    name = "bool_" if name == "bool" else name
    if module == "numpy" and name in _NUMPY:
        return f"numpy.{name}", node.item()
    raise _UnstorableError("")


def _made(name: str, plain: Any) -> Any:
    """Reverse `_as_plain`. In a process without torch or numpy, which only passes states on, the value stays plain."""
    match name.split("."):
        case ["OrderedDict"]:
            return OrderedDict(plain)
        case ["Counter"]:
            return Counter(plain)
        case ["defaultdict", factory] if factory in _FACTORIES:
            return defaultdict(_FACTORIES[factory], plain)
        case ["complex"]:
            return complex(*plain)
        case ["torch", "Size"]:
            return sys.modules["torch"].Size(plain) if "torch" in sys.modules else plain
        case ["numpy", number] if number in _NUMPY:
            return getattr(sys.modules["numpy"], number)(plain) if "numpy" in sys.modules else plain
    raise JobFailedError(f"unknown type {name!r} in a snapshot's shape")


def _explain(node: Any, path: Path, is_tensor: Any) -> None:
    """Raise for the first node in `node` that cannot be stored, with its path."""
    for key, value in node.items() if isinstance(node, Mapping) else enumerate(node if type(node) in _LISTS else ()):
        if type(key) not in (str, int):
            raise _unstorable((*path, str(key)), key, "a dictionary key")
        try:
            _take(value, Parts([], [], []), is_tensor)
        except _UnstorableError:
            _explain(value, (*path, key), is_tensor)
    raise _unstorable(path, node, "a value")


_LISTS = (list, tuple)


def _unstorable(path: Path, value: object, what: str) -> JobFailedError:
    return JobFailedError(
        f"{fqn(path)} is {what} of type {type(value).__name__}, which would not come back as it is; a snapshot holds "
        "tensors, numbers, text, bytes, and dicts, lists and tuples of them",
        hint="Convert it in state_dict() and back in load_state_dict(), or leave it out.",
    )


def fqn(path: Path) -> str:
    """Return a leaf's name in the form of torch.distributed.checkpoint: `optimizer.state.0.exp_avg`."""
    return ".".join(map(str, path))


def put_together(shape: Sequence[Any], tensors: Sequence[Any], values: Sequence[Any]) -> Any:
    """Return the tree of a shape of `take_apart`, with `tensors` and `values` in their places."""
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
            return {key: _put(shape, tensors, values) for key in next(shape)}
        case "[":
            return [_put(shape, tensors, values) for _ in range(next(shape))]
        case "(":
            return tuple(_put(shape, tensors, values) for _ in range(next(shape)))
        case str(kind) if kind.startswith("="):
            return _made(kind[1:], _put(shape, tensors, values))
        case kind:
            raise JobFailedError(f"unknown kind of node {kind!r} in a snapshot's shape")


def leaf_paths(shape: Sequence[Any]) -> tuple[list[Path], list[Path]]:
    """Return the paths of the tensors and of the values, in order."""
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
        case str(kind) if kind.startswith("="):
            _walk(shape, path, tensors, values)
        case "[" | "(":
            for index in range(next(shape)):
                _walk(shape, (*path, index), tensors, values)
