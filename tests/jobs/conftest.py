"""What tests of the laptop side share: a cluster to talk to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes_api import KubernetesApi, serve


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesApi]:
    """A cluster's API for one test, and the kubeconfig that names it."""
    with serve() as found:
        monkeypatch.setenv("KUBECONFIG", str(found.kubeconfig(tmp_path / "config")))
        yield found
