"""The stacks of each kind of cluster, synthesised once; and why these tests are left out where the CDK is not."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cdk_app import CDK, Templates, synthesise

if TYPE_CHECKING:
    from cfn_account import Account

sys.path[:0] = [str(CDK), str(Path(__file__).parent)]
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # the node that the CDK supports
os.environ["NODE_OPTIONS"] = (
    "--v8-pool-size=0"  # a third of its CPU went into compiling better what it runs for seconds
)
missing = [name for name in ("aws_cdk", "cdk_nag", "cfnlint", "moto") if importlib.util.find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if missing and not os.environ.get("CI") else []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if missing:
        terminalreporter.write_line(f"tests/cdk: skipped, {', '.join(missing)} is not installed; `make cdk` does that")


@pytest.fixture(scope="session")
def synthesised(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Templates]:
    """Templates of a case of `deployments.CASES` by part; without `scale` those without machines."""

    @cache
    def templates(name: str, scale: bool = True) -> Templates:
        from deployments import CASES, deployment

        return synthesise(deployment(CASES[name]), tmp_path_factory.mktemp(name), scale=scale)

    return templates


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[Account]:
    """An empty account of moto's."""
    import cfn_shims
    from cfn_account import Account
    from moto import mock_aws

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")  # two thousand, for each account
    with mock_aws():
        yield Account(cfn_shims.forget())
