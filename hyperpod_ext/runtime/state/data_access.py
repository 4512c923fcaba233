"""Call a listener when a script reads `tensor.data`, because writes to `tensor.data` do not increase the version
counter of autograd."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import torch

Listener = Callable[[torch.Tensor], None]

_plain: Any = torch.Tensor.data  # torch's descriptor of `Tensor.data`, from a base class


class DataAccess:
    """Replaces the attribute `torch.Tensor.data` until `remove` is called. Only the newest `DataAccess` is active.

    Args:
        listener: called with the tensor whose `.data` is read. Reads in other threads and in forked processes do not
            call the listener.
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
