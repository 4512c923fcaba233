"""Nested state taken apart into tensors and a JSON skeleton, and put together again. No pickle.

The skeleton keeps what JSON alone would lose: dictionary keys that are numbers (optimizers have them),
tuples, and where each tensor goes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hyperpod_ext.errors import JobFailedError

Skeleton = dict[str, Any]
"""`{"t": index}` a tensor, `{"v": scalar}`, `{"d": [[key, node], ...]}`, `{"l": [...]}`, `{"u": [...]}` a tuple."""


def take_apart(tree: Any) -> tuple[Skeleton, list[torch.Tensor]]:
    """Skeleton of `tree` and its tensors, by reference, in order.

    Raises:
        JobFailedError: a leaf that can be neither copied as a tensor nor written as JSON, with its path.
    """
    tensors: list[torch.Tensor] = []
    return _take(tree, "", tensors), tensors


def _take(node: Any, path: str, tensors: list[torch.Tensor]) -> Skeleton:
    if isinstance(node, torch.Tensor):
        tensors.append(node)
        return {"t": len(tensors) - 1}
    if node is None or isinstance(node, bool | int | float | str):
        return {"v": node}
    if isinstance(node, Mapping):
        for key in node:
            if not isinstance(key, str | int):
                raise _unstorable(f"{path}.{key}", key, "a dictionary key")
        return {"d": [[key, _take(value, f"{path}.{key}", tensors)] for key, value in node.items()]}
    if isinstance(node, tuple):
        return {"u": [_take(value, f"{path}[{index}]", tensors) for index, value in enumerate(node)]}
    if isinstance(node, Sequence) and not isinstance(node, bytes | bytearray):
        return {"l": [_take(value, f"{path}[{index}]", tensors) for index, value in enumerate(node)]}
    raise _unstorable(path, node, "a value")


def put_together(skeleton: Skeleton, tensors: Sequence[torch.Tensor]) -> Any:
    """The tree that `take_apart` took apart, with `tensors` in their places."""
    ((kind, content),) = skeleton.items()
    match kind:
        case "t":
            return tensors[content]
        case "v":
            return content
        case "d":
            return OrderedDict((key, put_together(value, tensors)) for key, value in content)
        case "l":
            return [put_together(value, tensors) for value in content]
        case "u":
            return tuple(put_together(value, tensors) for value in content)
    raise JobFailedError(f"unknown kind of node {kind!r} in a snapshot's skeleton")


def _unstorable(path: str, value: object, what: str) -> JobFailedError:
    return JobFailedError(
        f"{path.lstrip('.')} is {what} of type {type(value).__name__}; a snapshot holds tensors, numbers, text, "
        "and dicts, lists and tuples of them",
        hint="Leave it out of the object's state_dict(), or store it as a tensor.",
    )
