"""Find the objects that a training function can reach through its variables, their contents, and globals."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import sysconfig
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch

Named = tuple[str, Any]
Children = Callable[[str, Any], Iterable[Named]]

_OBJECTS = 20_000
_DEPTH = 6
_ITEMS = 1_000
"""Maximum number of items of a list or dict that are searched; more items are probably data."""
_LOOP = "hyperpod_ext.runtime.training"
"""Package of `Run` and the training loop. Objects of this package are not searched, because they hold all results of
`run.keep`."""
_PACKAGES = frozenset({"site-packages", "dist-packages"})
"""Names of folders with installed packages."""
_LEAVES = (str, bytes, int, float, complex, ModuleType, type(None))
MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))


def variables(frame: FrameType | None) -> list[Named]:
    """Return the variables of the script's running functions, and the globals that their code uses.

    The result is empty if `frame` belongs to hyperpod_ext, for example if a trainer of hyperpod_ext runs the loop.
    """
    found: list[Named] = []
    for each in script_frames(frame):
        found += [*locals_of(each).items(), *named_by(each.f_code, each.f_globals)]
    return found


def script_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of the script's running functions: `frame` and its callers, up to the first frame of
    hyperpod_ext."""
    while frame is not None and not is_ours(str(frame.f_globals.get("__name__"))):
        if is_of_script(str(frame.f_globals.get("__name__"))):
            yield frame
        frame = frame.f_back


def locals_of(frame: FrameType) -> dict[str, Any]:
    """Return the local variables of a running function, by name."""
    seen = frame.f_locals
    found = dict(seen)
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(seen) is dict:
        seen.clear()  # empty this dict, through which the frame would keep the objects alive
    return found


def reachable(roots: Iterable[Named], children: Children, most: int = _OBJECTS) -> Iterator[Named]:
    """Yield each reachable object once, nearest first, with a name that shows the shortest path to it.

    Args:
        roots: named objects from which the search starts.
        children: returns the named contents of an object.
        most: maximum number of objects.
    """
    seen: set[int] = set()
    queue = deque((name, value, 0) for name, value in roots)
    while queue and len(seen) < most:
        name, value, depth = queue.popleft()
        if id(value) in seen or isinstance(value, _LEAVES) or (isinstance(value, type) and not is_own(value)):
            continue
        seen.add(id(value))
        yield name, value
        if depth < _DEPTH:
            queue.extend((name, child, depth + 1) for name, child in children(name, value))


def of_script(name: str, value: Any) -> Iterable[Named]:
    """Return the named contents of `value`, if the object belongs to the script or is a plain container.

    Contents of library objects are left out, because their caches and timers change in each step.
    """
    if isinstance(value, torch.nn.Module):
        own = [value, *(each for each in value.modules() if is_own(each))]
        found = [(f"{name}.{key}", item) for each in own for key, item in list(vars(each).items()) if _is_extra(key)]
        hooks = [(f"a hook of {name}", hook) for hook in _hooks(value)]
        return [*found, *hooks, *(one for each in own for one in _classes(type(each)))]
    if isinstance(value, FunctionType):
        return mentioned(value) if is_of_script(value.__module__) else ()
    if isinstance(value, type):
        return [(f"{name}.{key}", each) for key, item in class_values(value) for each in _functions(item)]
    if type(value) in (*MAPPINGS, list, tuple, set, MethodType, functools.partial):
        return _inside(name, value)
    return [*attributes(name, value), *_classes(type(value))] if is_own(value) else ()


def _hooks(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the forward and backward hooks of a module and its submodules, and the hooks of its parameters."""
    for each in module.modules():
        for hooks in (each._forward_pre_hooks, each._forward_hooks, each._backward_hooks):
            yield from hooks.values()
    for parameter in module.parameters():
        yield from (parameter._backward_hooks or {}).values()
        yield from (parameter._post_accumulate_grad_hooks or {}).values()


def anything(name: str, value: Any) -> Iterable[Named]:
    """Return the named contents of `value`, also if it is a library object."""
    if isinstance(value, torch.Tensor | FunctionType) or type(value).__module__.startswith(_LOOP):
        return ()
    return [*_inside(name, value), *attributes(name, value)]


def attributes(name: str, value: Any) -> list[Named]:
    """Return an object's named attributes. Properties are left out, because reading a property could run any code."""
    return [(f"{name}.{key}", item) for key, item in own_values(value)]


def own_values(value: Any) -> list[Named]:
    """Return an object's attributes with their names, from its `__dict__` and from the slots of its classes."""
    own = getattr(value, "__dict__", None)
    found = list(own.items()) if type(own) is dict else []
    kind: Any = type(value)
    for slot in _slots(kind):
        try:
            found.append((slot.__name__, slot.__get__(value)))
        except AttributeError:
            continue  # this slot has no value
    return found


@functools.cache
def _slots(kind: Any) -> tuple[MemberDescriptorType, ...]:
    declared = [each for each in kind.__mro__ if "__slots__" in vars(each)]
    return tuple(slot for each in declared for slot in vars(each).values() if type(slot) is MemberDescriptorType)


def mentioned(function: FunctionType) -> list[Named]:
    """Return the closure variables of a function, and the globals that its code uses."""
    return enclosed(function) + named_by(function.__code__, function.__globals__)


def named_by(code: CodeType, known: Mapping[str, Any]) -> list[Named]:
    """Return the globals that `code` uses, including attributes of the script's modules, such as `utils.state`.

    Args:
        code: the code of a function.
        known: the globals of the function's module.
    """
    names, imports = _names(code)
    found = [(name, known[name]) for name in names if name in known]
    if imports:
        package = known.get("__package__")
        modules = [each for name in names for each in (name, f"{package}.{name}") if each in sys.modules]
        found += [(each.rpartition(".")[2], sys.modules[each]) for each in modules]
    seen: set[int] = set()
    for name, value in found:  # extend `found`, to reach `package.module.state`
        if isinstance(value, ModuleType) and id(value) not in seen and is_of_script(value.__name__):
            seen.add(id(value))
            found += [(f"{name}.{each}", vars(value)[each]) for each in names if each in vars(value)]
    return found


@functools.cache
def _names(code: CodeType) -> tuple[tuple[str, ...], bool]:
    """Return the names of globals and attributes in `code` and its inner functions, and whether `code` imports."""
    inner = [_names(each) for each in code.co_consts if isinstance(each, CodeType)]
    names = dict.fromkeys([*code.co_names, *(name for found, _ in inner for name in found)])
    return tuple(names), has_opcode(code, "IMPORT_NAME") or any(imports for _, imports in inner)


def has_opcode(code: CodeType, name: str) -> bool:
    return dis.opmap[name] in code.co_code[::2]


def class_values(kind: type) -> list[Named]:
    """Return the attributes of a class with their names, except names that begin with two underscores."""
    return [(key, item) for key, item in list(vars(kind).items()) if not key.startswith("__")]


def _classes(kind: type) -> list[Named]:
    """Return the classes, among a class and its base classes, that belong to the script, with their names."""
    return [(each.__name__, each) for each in kind.__mro__ if is_own(each)]


def is_own(value: Any) -> bool:
    """Return whether a class, or the class of an object, belongs to the script or is derived from such a class.

    `fully_shard` and `torch.nn.utils.parametrize` replace a module's class with a derived class of their own.
    """
    kind = value if isinstance(value, type) else type(value)
    return any(is_of_script(str(each.__module__)) for each in kind.__mro__)


def _functions(value: Any) -> list[Any]:
    """Return the functions of a static method, class method or property; any other class attribute as it is."""
    if isinstance(value, staticmethod | classmethod):
        return [value.__func__]
    return [value.fget, value.fset] if isinstance(value, property) else [value]


def enclosed(function: FunctionType) -> list[Named]:
    """Return a function's closure variables with their names, that is, the variables of enclosing functions."""
    found: list[Named] = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found.append((name, cell.cell_contents))
        except ValueError:
            continue  # this variable has no value yet
    return found


@functools.cache
def is_of_script(module: str) -> bool:
    """Return whether a Python module belongs to the user's script, not to Python, a library or hyperpod_ext."""
    if is_ours(module) or module in sys.builtin_module_names or module == "builtins":
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return True
    path = Path(file).resolve()
    if not _PACKAGES.isdisjoint(path.parts):  # a file of an installed package, in any environment
        return False
    return not any(path.is_relative_to(each) for each in _installed())


@functools.cache
def _installed() -> set[Path]:
    """Return the folders of Python's own modules and of installed packages; cached, because the look-up is slow."""
    paths = sysconfig.get_paths()
    return {Path(paths[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}


def is_ours(module: str) -> bool:
    return module == "hyperpod_ext" or module.startswith("hyperpod_ext.")


def _is_extra(attribute: str) -> bool:
    return attribute not in _OF_EVERY_MODULE


def _inside(name: str, value: Any) -> list[Named]:
    if isinstance(value, dict):
        return [(_item(name, key), item) for key, item in list(value.items())[:_ITEMS]]
    if isinstance(value, list | tuple):
        return [(f"{name}[{index}]", item) for index, item in enumerate(value[:_ITEMS])]
    if isinstance(value, set | frozenset):
        return [(f"{name}{{...}}", item) for item in list(value)[:_ITEMS]]
    if isinstance(value, MethodType):
        return [(name, value.__self__), (name, value.__func__)]
    if isinstance(value, functools.partial):
        return [(name, value.func), *((name, item) for item in (*value.args, *value.keywords.values()))]
    return []


def _item(name: str, key: Any) -> str:
    return f"{name}[{key!r}]" if isinstance(key, str | int) else f"{name}[...]"  # repr() of a tensor is slow
