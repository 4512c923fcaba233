"""Call a listener before a script gets `tensor.data`: a write through it increments no counter of autograd."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import torch

Listener = Callable[[torch.Tensor], None]

_plain: Any = torch.Tensor.data  # torch's own descriptor, in a base class of Tensor


class DataAccess:
    """Replaces `torch.Tensor.data` until it is removed. One listener at a time: the newest.

    Args:
        listener: called with the tensor, in this thread of this process only; forked processes have a copy of it.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener, self._here = listener, _here()
        torch.Tensor.data = self  # type: ignore[assignment]  # a descriptor, like the original

    def __get__(self, tensor: torch.Tensor | None, owner: type | None = None) -> Any:
        if tensor is None:
            return _plain
        if _here() == self._here:
            self._listener(tensor)
        return _plain.__get__(tensor, owner)

    def __set__(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        _plain.__set__(tensor, value)

    def remove(self) -> None:
        """Restore `torch.Tensor.data`, unless a newer object has replaced this one."""
        if torch.Tensor.__dict__.get("data") is self:
            del torch.Tensor.data


def _here() -> tuple[int, int]:
    return os.getpid(), threading.get_ident()
