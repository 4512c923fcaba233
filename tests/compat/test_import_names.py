"""Names of AWS's packages in a job with `compat: aws`, as docs/compat-aws.md lists them."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

import hyperpod_ext.compat.checkpointless as ours
from hyperpod_ext.catalog.aws_terms import COMPAT_PAGE, Term, packages, terms
from hyperpod_ext.compat import import_names
from hyperpod_ext.errors import JobFailedError

NAMES = {one.name: one for one in terms() if one.module}
LABELS = {"works": "works", "partly": "works partly", "refused": "refused"}
ROOT = Path(import_names.__file__).parent


def exported(module: str) -> set[str]:
    """Return the names in `__all__` of a module of `hyperpod_ext.compat`, which is not imported: it may need others."""
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
    assigned = (
        node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return set(ast.literal_eval(next(assigned).value))


@pytest.fixture
def aws() -> Iterator[None]:
    """AWS's packages are replaced."""
    import_names.install("aws")
    try:
        yield
    finally:
        sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, import_names.AwsFinder)]
        for name in [name for name in sys.modules if name.partition(".")[0] in packages()]:
            del sys.modules[name]


def test_the_names_of_aws_s_examples_are_27() -> None:
    assert len([one for one in NAMES.values() if one.module.startswith("hyperpod_checkpointless_training.")]) == 27
    assert packages() == import_names.MODULES.keys()


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_found_or_refused(aws: None, name: str) -> None:
    term = NAMES[name]
    package, _, module = term.module.partition(".")
    counterpart = import_names.MODULES[package][module]
    if term.compat == "refused":
        with pytest.raises(JobFailedError, match="cannot be used with `compat: aws`") as refused:
            exec(f"from {term.module} import {name}")
        assert refused.value.hint == term.how
        return
    assert name in exported(counterpart)
    if counterpart != "checkpointless.trainer" or importlib.util.find_spec("lightning"):
        found = getattr(import_module(term.module), name)
        assert found is getattr(import_module(f"hyperpod_ext.compat.{counterpart}"), name)


def test_the_package_has_the_names() -> None:
    here = {one.name for one in NAMES.values() if one.module.startswith("hyperpod_checkpointless_training.")}
    assert set(ours.__all__) == {name for name in here if NAMES[name].compat != "refused"}
    assert ours.wait_rank() is None


def test_other_names_are_reported_with_the_page(aws: None) -> None:
    with pytest.raises(ImportError, match=COMPAT_PAGE):
        exec("from hyperpod_checkpointless_training.inprocess.wrap import HPMonitorThread")
    with pytest.raises(ModuleNotFoundError):
        import_module("hyperpod_checkpointless_training.inprocess.hp_monitor_thread")


def test_names_are_replaced_only_on_request_and_never_twice(aws: None, capsys: pytest.CaptureFixture[str]) -> None:
    import_module("hyperpod_checkpointless_training.inprocess.wrap")
    with pytest.raises(JobFailedError, match="was imported before its counterpart"):
        import_names.install("aws")
    with pytest.raises(JobFailedError, match="compat: gcp is unknown"):
        import_names.install("gcp")


def test_the_page_lists_all_names(golden_part: Callable[[str, str, str], None]) -> None:
    def row(one: Term) -> str:
        return f"| `{one.name}` | {LABELS[one.compat]} | {one.how} | {one.ours} |"

    head = ["| name | | with `compat: aws` | in a script of your own |", "|---|---|---|---|"]
    for package in ["", *sorted(packages())]:
        listed = [one for one in terms() if one.module.partition(".")[0] == package]
        golden_part(COMPAT_PAGE, f"names of {package or 'the environment'}", "\n".join([*head, *map(row, listed), ""]))
