"""Torch's private names: each one that the code uses is in the table, this torch has them, and one that lacks some is
refused with all of their names."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
from world_of_one import world_of_one

from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.runtime import dcp
from hyperpod_ext.runtime.process_group.groups import ProcessGroups
from hyperpod_ext.runtime.reproducible import reproducible
from hyperpod_ext.runtime.state import meshes
from hyperpod_ext.runtime.torch_requirements import private_names
from hyperpod_ext.runtime.torch_requirements.private_names import TABLE, Feature, missing

RUNTIME = Path(private_names.__file__).parents[1]
PRIVATE = re.compile(r"_(?!Z)[a-zA-Z]\w*")  # _Z: C++, whose names process_group/test_groups.py looks for
NOT_TORCH = {
    "agent/worker_main.py": {"_config"},  # multiprocessing's
    "data/epoch_reader.py": {"_fetch_batches"},  # Accelerate's
    "data/sources.py": {"_fingerprint"},  # Hugging Face's datasets
    "detection/heartbeat.py": {"_value2member_map_"},  # enum
    "integrations/accelerate.py": {"_shared_state", "_reset_state", "_custom_objects"},
    "integrations/hugging_face.py": {
        *("_init_training_state", "_wrap_model", "_get_collator_with_removed_columns", "_remove_unused_columns")
    },
    "integrations/lightning.py": {"_should_accumulate", "_ddp_kwargs", "_layer_sync"},
    "metrics/families.py": {"_bucket", "_sum", "_count"},  # ends of Prometheus's names
    "reproducible/sharded.py": {"_counted"},  # of its owner
    "reproducible/wrapped.py": {"_hpx_reproducible"},  # what is ours on a module, and on a view
    "snapshot/snapshot.py": {"_replace"},  # of a named tuple
    "snapshot/part_reads.py": {"_replace"},  # of a named tuple
    "state/large_values.py": {"_hpx_plain"},  # ours on a tensor
    "state/training_state.py": {"_keeps_alive", "_replace"},
}
"""Private names of others, by the file that uses them."""
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
LOOKED_AT = (*DEFINITIONS, ast.Attribute, ast.Constant, ast.Name, ast.Import, ast.ImportFrom)


def private_names_of(text: str) -> set[str]:
    """Private names that a module uses and does not define: attributes, imports, and words that are such a name."""
    nodes = _nodes(text)
    used = {name for node in nodes for name in _used(node) if PRIVATE.fullmatch(name)}
    foreign = used - set(_defined(nodes))
    ours = foreign & defined() if foreign else set()
    own = {name for node in nodes if isinstance(node, ast.Attribute) and node.attr in ours for name in _of_self(node)}
    return foreign - own


@functools.cache
def _nodes(text: str) -> tuple[ast.AST, ...]:
    return tuple(node for node in ast.walk(ast.parse(text)) if isinstance(node, LOOKED_AT))


def _used(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute):
        if not (isinstance(node.value, ast.Name) and node.value.id in ("os", "sys")):
            yield node.attr
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
        yield from (node.module or "").split(".")
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.Import):
        yield from (part for alias in node.names if alias.name.startswith("torch.") for part in alias.name.split("."))


def _defined(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, DEFINITIONS):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr


def _of_self(node: ast.Attribute) -> Iterator[str]:
    """What an object asks of itself: a class of ours in another module may define it."""
    if _is_self(node.value) or "super()" in ast.unparse(node.value):
        yield node.attr


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


@functools.cache
def defined() -> frozenset[str]:
    """All names of ours."""
    return frozenset(name for file in RUNTIME.rglob("*.py") for name in _defined(_nodes(file.read_text())))


def test_every_private_name_that_the_runtime_uses_is_in_the_table() -> None:
    known = {part for each in TABLE for part in re.split("[.:]", str(each))}
    for file in sorted(RUNTIME.rglob("*.py")):
        name = str(file.relative_to(RUNTIME))
        unknown = private_names_of(file.read_text()) - known - NOT_TORCH.get(name, set())
        assert not unknown, f"{name} uses {', '.join(sorted(unknown))}: see torch_requirements/private_names.py"


def test_no_name_is_in_the_table_that_nothing_uses() -> None:
    others = [file for file in RUNTIME.rglob("*.py") if file != Path(private_names.__file__)]
    words = {word for file in others for word in re.findall(r"\w+", file.read_text())}
    assert [str(each) for each in TABLE if each.name not in words] == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import torch\ntorch._new_thing()", {"_new_thing"}),
        ("from torch._new.part import thing", {"_new"}),
        ("from torch.nn import _new", {"_new"}),
        ("import torch._new", {"_new"}),
        ("getattr(group, '_new', None)", {"_new"}),
        ("class A:\n    def a(self, other):\n        self._own = other._new", {"_new"}),
        ("import os\ndef _own(): os._exit(1)\n_own.x", set()),
    ],
)
def test_a_new_one_would_be_found(code: str, found: set[str]) -> None:
    assert private_names_of(code) == found


OF_SOME_VERSIONS = (
    *(Feature.LASTING_GROUPS, Feature.KEPT_MESHES),
    *(Feature.KEPT_FSDP2, Feature.REPRODUCIBLE_FSDP2),
)


@pytest.mark.parametrize("each", [each for each in TABLE if not each.optional], ids=str)
def test_this_torch_has(each: private_names.PrivateName) -> None:
    if each.feature in OF_SOME_VERSIONS and missing(each.feature):
        pytest.skip(f"torch {torch.__version__} cannot do it: {each.feature.title}")
    assert each.exists()


@pytest.fixture
def looked_up_anew() -> Iterator[None]:
    missing.cache_clear()
    yield
    missing.cache_clear()


@pytest.mark.usefixtures("looked_up_anew")
def test_a_torch_that_lacks_names_is_refused_when_a_job_starts_with_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch.distributed.distributed_c10d, "_new_group_with_tag")
    monkeypatch.delattr(torch.distributed.tensor._redistribute, "_gen_transform_infos")
    with pytest.raises(HyperpodExtError) as error:
        ProcessGroups()
    assert error.value.message == (
        f"torch {torch.__version__} lacks names that recovery of process groups, DTensors and device meshes needs: "
        "torch.distributed.distributed_c10d._new_group_with_tag, "
        "torch.distributed.tensor._redistribute._gen_transform_infos"
    )
    assert error.value.hint == "docs/compatibility.md lists the versions of torch that have them."


@pytest.mark.usefixtures("looked_up_anew")
def test_what_run_keep_has_imported_is_checked_then(monkeypatch: pytest.MonkeyPatch) -> None:
    with world_of_one(), pytest.raises(HyperpodExtError, match="_gen_transform_infos"), meshes.recording():
        monkeypatch.delattr(torch.distributed.tensor._redistribute, "_gen_transform_infos")


@pytest.mark.usefixtures("looked_up_anew")
def test_features_that_few_jobs_use_are_checked_when_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.distributed.checkpoint._nested_dict, "flatten_state_dict")
    monkeypatch.delattr(torch.distributed.fsdp.FSDPModule, "set_custom_reduce_scatter", raising=False)
    ProcessGroups()
    with pytest.raises(HyperpodExtError, match=r"lacks .* torch.distributed.checkpoint._nested_dict.flatten_state"):
        _ = dcp.Tiers
    sharded = torch.nn.Linear(1, 1)
    sharded.register_module("_get_fsdp_state", None)
    with pytest.raises(HyperpodExtError, match=r"lacks .*\.FSDPModule\.set_custom_reduce_scatter"):
        reproducible(sharded)


def test_an_attribute_of_instances_is_looked_for_in_the_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    holder = f"{__name__}:Holder"
    assert private_names.PrivateName(holder, "_set", "", Feature.DDP).exists()
    assert not private_names.PrivateName(holder, "_gone", "", Feature.DDP).exists()
    assert not private_names.PrivateName(f"{__name__}:NoClass", "_set", "", Feature.DDP).exists()
    assert not private_names.PrivateName("torch.no_module", "_set", "", Feature.DDP).exists()


class Holder:
    def __init__(self) -> None:
        self._set = 1


def test_what_is_not_loaded_is_not_imported() -> None:
    code = (
        "import sys, torch.distributed as dist\n"
        "before = set(sys.modules)\n"
        "from hyperpod_ext.runtime.torch_requirements.private_names import check_loaded\n"
        "check_loaded()\n"
        "print(sorted(name for name in set(sys.modules) - before if name.startswith('torch')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
