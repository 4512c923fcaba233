"""Numbers outside of the training function that each call updates in place, as in `args.batch_size //= world_size`.

After a fault the training function is called again. Without this module, a surviving process would divide the number a
second time, while a new process divides it once. With this module, each call begins with the numbers from before the
first call.
"""

from __future__ import annotations

import argparse
import dis
import functools
from collections import defaultdict
from collections.abc import Callable
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any, NamedTuple

from hyperpod_ext.runtime.state.unsaved.reachable import of_script, reachable


class OutsideValue(NamedTuple):
    """A number outside of the training function, with its value before the first call of that function."""

    name: str
    owner: dict[str, Any]
    """The namespace, or the globals, that contain the number under `key`."""
    key: str
    value: int | float
    """The number before the first call of the training function."""

    @property
    def now(self) -> Any:
        return self.owner.get(self.key)

    @property
    def is_changed(self) -> bool:
        return bool(self.now != self.value)


class OutsideValues:
    """Numbers in globals and argparse namespaces that the training function, or a function it can reach, updates."""

    def __init__(self, warn: Callable[[str], object]) -> None:
        self._warn = warn
        self._numbers: list[OutsideValue] | None = None
        """The numbers before the first call of the training function; None if they are not collected yet.

        Once the first call begins its steps, the list keeps only the numbers that the call has changed by then.
        """
        self._begun = False
        """Whether a call of the training function has begun its steps."""

    def enter(self, train: Callable[..., object]) -> None:
        """Begin a call of `train`: reset the changed numbers to their values from before the first call."""
        if self._numbers is None:
            self._numbers = _numbers(train)
        for each in self._numbers:
            if each.is_changed:
                self._warn(
                    f"hyperpod_ext: {each.name} is {each.value} again, as before the first call of the training "
                    f"function, which changed it to {each.now}\n"
                )
                each.owner[each.key] = each.value

    def begin_steps(self) -> None:
        """Begin the steps of a call. Numbers that change only during steps are part of training, and are not reset."""
        if not self._begun:
            self._numbers = [each for each in self._numbers or () if each.is_changed]
        self._begun = True


def _numbers(train: Callable[..., object]) -> list[OutsideValue]:
    reached = list(reachable([("", train)], of_script))
    functions = [value for _, value in reached if isinstance(value, FunctionType)]
    updated = {name for function in functions for name in _updated(function.__code__)}
    places = [
        *(
            (f"{name}.", vars(value))
            for name, value in reached
            if isinstance(value, argparse.Namespace | SimpleNamespace)
        ),
        *(("", function.__globals__) for function in functions),
    ]
    return [
        OutsideValue(f"{prefix}{key}", owner, key, owner[key])
        for prefix, owner in {id(owner): (prefix, owner) for prefix, owner in places}.values()
        for key in updated
        if type(owner.get(key)) in (int, float)
    ]


@functools.cache
def _updated(code: CodeType) -> frozenset[str]:
    """Return the names of globals and attributes that `code` reads and sets in the same source line."""
    read: dict[int | None, set[str]] = defaultdict(set)
    found: set[str] = set()
    for each in dis.get_instructions(code):
        line = each.positions.lineno if each.positions is not None else None
        if each.opname in ("LOAD_GLOBAL", "LOAD_ATTR"):
            read[line].add(str(each.argval))
        elif each.opname in ("STORE_GLOBAL", "STORE_ATTR") and each.argval in read[line]:
            found.add(each.argval)
    return frozenset(found)
