"""Find state that a loop carries from one iteration to the next in variables and in iterators.

A variable is carried if an iteration may read it before setting it, according to the function's bytecode. For example,
a variable for the loss is not carried if each iteration sets it first.
"""

from __future__ import annotations

import dis
import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any, NamedTuple

from hyperpod_ext.runtime.state.unsaved.reachable import (
    Named,
    enclosed,
    has_opcode,
    is_of_script,
    is_ours,
    locals_of,
    named_by,
)

_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"})
_ALWAYS = frozenset({"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"})
_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
_ITERATORS = frozenset({"builtins", "itertools"})
_SETTING = frozenset({"update", "append", "extend", "insert", "add", "clear"})
_NEAR = 8
"""Maximum number of instructions between loading a dict and accessing its item."""
_DEPTH = 6
_MOST = 100
"""Maximum number of objects that are searched from one iterator."""


class _Instruction(NamedTuple):
    offset: int
    reads: frozenset[str]
    sets: frozenset[str]
    follows: tuple[int, ...]
    """Indices of the instructions that may run next."""


class Global(NamedTuple):
    """A global variable of a Python module."""

    of: Mapping[str, Any]
    """The module's `__dict__`."""
    name: str


def carried(frame: FrameType) -> list[Named]:
    """Return the local variables that the next iteration of a running loop may read before setting them.

    Args:
        frame: the frame of the function with the loop.
    """
    seen = locals_of(frame)
    return [(name, seen[name]) for name in sorted(_carried(frame.f_code, frame.f_lasti)) if name in seen]


def set_outside(function: FunctionType) -> list[Named]:
    """Return the `nonlocal` variables that `function` sets, with their values."""
    names = _stored("STORE_DEREF", function.__code__) if function.__code__.co_freevars else frozenset()
    return [each for each in enclosed(function) if each[0] in names]


def globals_set(code: CodeType, known: Mapping[str, Any]) -> list[Global]:
    """Return the global variables that `code` sets, in its own module and in other modules of the script.

    Args:
        code: the code of a function.
        known: the globals of the function's module.
    """
    found = [Global(known, name) for name in _stored("STORE_GLOBAL", code) if name in known]
    if attributes := _stored("STORE_ATTR", code):
        modules = [each for _, each in named_by(code, known) if isinstance(each, ModuleType)]
        places = [vars(each) for each in modules if is_of_script(each.__name__)]
        found += [Global(place, name) for place in places for name in attributes if name in place]
    return found


@functools.cache
def _stored(how: str, code: CodeType) -> frozenset[str]:
    if not has_opcode(code, how):
        return frozenset()
    return frozenset(str(each.argval) for each in dis.get_instructions(code) if each.opname == how)


def is_only_set(codes: Iterable[CodeType], name: str) -> bool:
    """Return whether `codes` set items of the dict or list `name`, but never read an item before they set it.

    A dict whose items are only set typically holds results of a step, such as metrics.
    """
    each_code = [_accesses_of_items(code, name) for code in codes if name in _all_names(code)]
    updated = any(
        how == "read" and later == "set" and (None in (key, other) or key == other)
        for found in each_code
        for index, (how, key) in enumerate(found)
        for later, other in found[index + 1 :]
    )
    return not updated and any(how == "set" for found in each_code for how, _ in found)


def is_attribute_carried(codes: Iterable[CodeType], name: str) -> bool:
    """Return whether a function of `codes` reads an object's attribute `name` before the function sets this attribute.

    An attribute that is set first typically holds a result of a step, such as a module's output.
    """
    return any(_reads_before_set(code, name) for code in codes if name in code.co_names)


@functools.cache
def _reads_before_set(code: CodeType, name: str) -> bool:
    accesses: dict[Any, list[str]] = {}
    before: Any = None
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR") and each.argval == name:
            accesses.setdefault(before, []).append(each.opname)
        # take the variable that was loaded last: newer Python versions have instructions that load two
        before = each.argval[-1] if isinstance(each.argval, tuple) else each.argval
    return any(found[0] != "STORE_ATTR" and "STORE_ATTR" in found for found in accesses.values())


def _all_names(code: CodeType) -> frozenset[str]:
    return frozenset({*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars})


def _accesses_of_items(code: CodeType, name: str) -> list[tuple[str, Any]]:
    """Return the accesses of `code` to items of the variable `name`, in code order.

    An access is a pair: "read" or "set", and the item's key. A key that is not a constant is given as None.
    """
    found: list[tuple[str, Any]] = []
    listed = [(each.opname, each.argval) for each in dis.get_instructions(code)]
    for index, (does, loaded) in enumerate(listed):
        if not does.startswith("LOAD") or name not in (loaded if isinstance(loaded, tuple) else (loaded,)):
            continue
        following = listed[index + 1 : index + 1 + _NEAR]
        if following and following[0][0] in ("LOAD_METHOD", "LOAD_ATTR"):
            found += [("set", None)] if following[0][1] in _SETTING else [("read", None)]
            continue
        until = next(
            (place for place, (does, _) in enumerate(following) if does in ("BINARY_SUBSCR", "STORE_SUBSCR")), None
        )
        if until is None:
            continue
        others = [each for each in following[:until] if each[0] not in ("COPY", "LOAD_CONST")]
        key = following[0][1] if until and not others else None
        found.append(("set" if following[until][0] == "STORE_SUBSCR" else "read", key))
        if any(does == "COPY" for does, _ in following[:until]):  # a COPY shows an update, as in `state[key] += 1`
            found.append(("set", key))
    return found


def neighbours(loop: Iterator[Any] | None) -> list[Any]:
    """Return the iterators that are iterated together with `run.steps`, as in `zip(run.steps(10), loader)`.

    Args:
        loop: the iterator that `run.steps` returned; None if it is unknown, which gives an empty result.
    """
    groups = [each for each in gc.get_referrers(loop) if type(each) is tuple] if loop is not None else []
    return [
        item
        for group in groups
        if any(type(each).__module__ in _ITERATORS for each in gc.get_referrers(group))
        for item in group
        if item is not loop
    ]


def iterated(iterator: Any) -> list[Any]:
    """Return `iterator`, followed by the iterators that it consumes. Iterators of this package are left out."""
    found: list[Any] = []
    queue = [(iterator, 0)]
    while queue and len(found) < _MOST:
        each, depth = queue.pop(0)
        if not hasattr(type(each), "__next__") or _is_of_ours(each) or any(each is other for other in found):
            continue
        found.append(each)
        if depth < _DEPTH:
            queue += [(one, depth + 1) for one in _held(each)]
    return found


def _held(iterator: Any) -> list[Any]:
    if type(iterator).__module__ in _ITERATORS:  # generators, zip and the like refer to the iterators that they consume
        held = gc.get_referents(iterator)
        return [*held, *(item for one in held if type(one) is tuple for item in one)]
    own = getattr(iterator, "__dict__", None)
    return list(own.values()) if type(own) is dict else []


def _is_of_ours(iterator: Any) -> bool:
    if isinstance(iterator, GeneratorType) and iterator.gi_frame is not None:
        return is_ours(str(iterator.gi_frame.f_globals.get("__name__")))
    return is_ours(type(iterator).__module__)


@functools.cache
def _carried(code: CodeType, lasti: int) -> frozenset[str]:
    """Return the variables that a loop may read before it sets them, on a path from the present instruction back to the
    same instruction.

    Args:
        code: the code of a running function.
        lasti: byte offset of the present instruction, `frame.f_lasti`.
    """
    flow = _flow(code)
    here = max((index for index, each in enumerate(flow) if each.offset <= lasti), default=0)
    inside = _cycle(flow, here)
    if here not in inside:
        return frozenset()
    live: dict[int, frozenset[str]] = dict.fromkeys(inside, frozenset())
    changed = True
    while changed:
        changed = False
        for index in sorted(inside, reverse=True):
            after = _after(flow, index, inside, here, live)
            now = flow[index].reads | (after - flow[index].sets)
            if now != live[index]:
                live[index], changed = now, True
    return _after(flow, here, inside, here, live)


def _after(
    flow: list[_Instruction], index: int, inside: set[int], end: int, live: dict[int, frozenset[str]]
) -> frozenset[str]:
    """Return the variables that an iteration may read before it sets them, after one of its instructions.

    Args:
        flow: the function's instructions.
        index: index of the instruction.
        inside: indices of the loop's instructions.
        end: index of the instruction at which the iteration ends.
        live: by instruction, the variables that may be read, from the instruction on, before they are set.
    """
    nexts = [live[each] for each in flow[index].follows if each in inside and each != end]
    return frozenset[str]().union(*nexts)


def _cycle(flow: list[_Instruction], here: int) -> set[int]:
    """Return the indices of the instructions on paths from `here` back to `here`."""
    before: dict[int, list[int]] = {}
    for index, each in enumerate(flow):
        for follower in each.follows:
            before.setdefault(follower, []).append(index)
    return _spread(here, lambda index: flow[index].follows) & _spread(here, lambda index: before.get(index, ()))


def _spread(start: int, nexts: Callable[[int], Iterable[int]]) -> set[int]:
    """Return all direct and indirect successors of `start`. `start` is included only if a path leads back to it."""
    found: set[int] = set()
    queue = list(nexts(start))
    while queue:
        if (index := queue.pop()) not in found:
            found.add(index)
            queue += nexts(index)
    return found


def _flow(code: CodeType) -> list[_Instruction]:
    listed = list(dis.get_instructions(code))
    at = {each.offset: index for index, each in enumerate(listed)}
    return [_instruction(index, each, at) for index, each in enumerate(listed)]


def _instruction(index: int, each: dis.Instruction, at: dict[int, int]) -> _Instruction:
    follows = [] if each.opname in _ENDS | _ALWAYS else [index + 1] if index + 1 < len(at) else []
    if each.opcode in _JUMPS and each.argval in at:
        follows.append(at[each.argval])
    reads, sets = _accesses(each)
    return _Instruction(each.offset, frozenset(reads), frozenset(sets), tuple(follows))


def _accesses(each: dis.Instruction) -> tuple[set[str], set[str]]:
    """Return the variables that an instruction reads, and the variables that it sets.

    Newer Python versions have instructions for two variables, such as STORE_FAST_LOAD_FAST.
    """
    if "FAST" not in each.opname and each.opname not in ("LOAD_DEREF", "STORE_DEREF", "LOAD_CLOSURE"):
        return set(), set()
    names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
    parts = [part for part in each.opname.split("_") if part in ("LOAD", "STORE", "DELETE")]
    reads: set[str] = set()
    sets: set[str] = set()
    for part, name in zip(parts, names, strict=False):
        if part != "LOAD":
            sets.add(name)
        elif name not in sets and not each.opname.endswith("AND_CLEAR"):
            reads.add(name)
    return reads, sets
