"""The reference of the Python API: a page for each public package, which mkdocstrings fills from the docstrings."""

from __future__ import annotations

import hyperpod_ext
from hyperpod_ext import runtime
from hyperpod_ext.runtime import data

PACKAGES = {
    "hyperpod_ext": (
        "index",
        "Specs, plans and requests. These functions run on a laptop, and need no torch.",
        hyperpod_ext.__all__,
    ),
    "hyperpod_ext.runtime": (
        "runtime",
        "Names for the training script.",
        ["resilient", "Run", *(name for name in runtime.__all__ if name not in ("resilient", "Run"))],
    ),
    "hyperpod_ext.runtime.data": (
        "data",
        "Loaders, samplers and token stores. [Data of an elastic job](../../elastic-data.md) and "
        "[Token store](../../data-store.md) explain their use.",
        data.__all__,
    ),
}
ADAPTERS = {
    "hyperpod_ext.integrations.lightning": ["ResilientTrainer"],
    "hyperpod_ext.integrations.lightning_checkpoint": ["HyperpodCheckpointIO"],
    "hyperpod_ext.integrations.hugging_face": ["ResilientTrainer"],
    "hyperpod_ext.integrations.accelerate": ["ResilientAccelerator"],
    "hyperpod_ext.integrations.titan": ["RunCheckpointer"],
    "hyperpod_ext.integrations.deepspeed": ["keep_engine", "ZeroOptimizer"],
}
SPECS = {
    "JobConfig": "\n[job.yaml](../job/index.md) lists the fields.\n",
    "ClusterConfig": "\n[cluster.yaml](../cluster/index.md) lists the fields.\n",
}
"""Classes whose fields have a reference of their own."""
MEMBERS = {
    "ClusterConfig": (),
    "JobConfig": ("words", "restarts_script", "has_agent"),
    "Run": (
        *("rank", "local_rank", "world_size", "full_size", "generation", "step", "batch_size"),
        *("keep", "restore", "data_parallel", "steps", "epochs", "log", "guard", "leave_out"),
    ),
    "Tiers": ("latest", "wait_durable", "failures", "process_group", "close"),
}
"""Members on the page, for classes that also have members for other modules of this project."""


def pages() -> dict[str, str]:
    """Return the pages of the Python API, by their paths on the site."""
    made = {}
    for package, (file, text, names) in PACKAGES.items():
        blocks = [_block(package, name) for name in names]
        made[f"reference/api/{file}.md"] = f"# {package}\n\n{text}\n\n" + "\n\n".join(blocks) + "\n"
    parts = [
        "# hyperpod_ext.integrations",
        "Adapters for other libraries. [Adapters for other libraries](../../integrations.md) explains their use.",
    ]
    for module, names in ADAPTERS.items():
        parts += [f"## {module}", *(_block(module, name, level=3) for name in names)]
    made["reference/api/integrations.md"] = "\n\n".join(parts) + "\n"
    return made


def _block(module: str, name: str, level: int = 2) -> str:
    options = f"      heading_level: {level}\n      toc_label: {name}\n"
    if name in MEMBERS:
        options += f"      members: [{', '.join(MEMBERS[name])}]\n"
    return f"::: {module}.{name}\n    options:\n{options}" + SPECS.get(name, "")
