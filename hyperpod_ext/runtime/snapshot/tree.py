"""Split nested state into its structure, tensors and plain values, and join them again. No pickle.

A training loop splits its state at every save, so the structure is a flat list, which is cheap to build. If the
structure is the same as at the last save, only the contents of tensors and the plain values can have changed.
"""

from __future__ import annotations

import base64
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hyperpod_ext.errors import JobFailedError

Shape = list[Any]
"""Structure of nested state, as a list of its nodes, each parent before its children. The list can be stored as JSON.

"T" is a tensor, "V" a plain value, "B" bytes (with their base64 as plain value) and "U" a tuple of scalars. "{" is a
dict, followed by its keys, which are text or whole numbers. "[" is a list and "(" a tuple, followed by its length. "="
and a type's name stand for an object of this type, made from the next node."""

Path = tuple[str | int, ...]


class Form(NamedTuple):
    """Type, shape and memory layout of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    """Strides in elements; None if the tensor is contiguous, or if strides are unknown, as for a shard."""


class Parts(NamedTuple):
    """Nested state, split into its structure, tensors and plain values, without copies of the tensors."""

    shape: Shape
    tensors: list[Any]
    values: list[Any]
    built: Mapping[str, Form] = {}
    """Type, shape and strides with which a process builds a tensor before it restores the state, by tensor name."""


_SCALARS = frozenset({bool, int, float, str, type(None)})
_FACTORIES = {kind.__name__: kind for kind in (bool, int, float, str, list, tuple, dict, set)} | {"": None}
"""Default factories with which a defaultdict can be saved and restored, by name."""
_NUMPY = frozenset({"bool_", "float16", "float32", "float64"}) | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}
"""Names of the numpy scalar types whose values a Python number represents exactly."""


def take_apart(tree: Any, is_tensor: type | tuple[type, ...]) -> Parts:
    """Split `tree` into its structure, tensors and plain values.

    Args:
        tree: nested state.
        is_tensor: the types of leaves that count as tensors.

    Raises:
        JobFailedError: a value has a type that cannot be restored. The error message names the path to the value.
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
            if isinstance(value, is_tensor):  # inlined, because most leaves are tensors
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
    elif kind is bytes:  # state that an object has serialized itself
        shape.append("B")
        parts.values.append(base64.b64encode(node).decode())
    else:
        name, plain = _as_plain(node)
        shape.append(f"={name}")
        _take(plain, parts, is_tensor)


def _as_plain(node: Any) -> tuple[str, Any]:
    """Return the name of an object's type, and a plain value from which `_made` can make the object again."""
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
    """Return the object from which `_as_plain` made `name` and `plain`.

    A process that has not imported torch or numpy only forwards states, and gets the plain value instead.
    """
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
    raise JobFailedError(
        f"the snapshot has a value of the unknown type {name!r}", hint="Upgrade hyperpod_ext in the container."
    )


def _explain(node: Any, path: Path, is_tensor: Any) -> None:
    """Raise JobFailedError for the first value inside `node` that cannot be stored, with its path."""
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
        f"{fqn(path)} is {what} of type {type(value).__name__}, which cannot be restored unchanged; a snapshot holds "
        "tensors, numbers, text, bytes, and dicts, lists and tuples of them",
        hint="Convert the value in state_dict() and back in load_state_dict(), or leave it out.",
    )


def fqn(path: Path) -> str:
    """Return a leaf's name in the form of torch.distributed.checkpoint: `optimizer.state.0.exp_avg`."""
    return ".".join(map(str, path))


def put_together(shape: Sequence[Any], tensors: Sequence[Any], values: Sequence[Any]) -> Any:
    """Return the nested state that `take_apart` has split into `shape`, `tensors` and `values`."""
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
            raise JobFailedError(
                f"the snapshot's layout has the unknown mark {kind!r}", hint="Upgrade hyperpod_ext in the container."
            )


def leaf_paths(shape: Sequence[Any]) -> tuple[list[Path], list[Path]]:
    """Return the paths of all tensors, and the paths of all plain values, in the order of `shape`."""
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
