"""Entry point of the CDK CLI: the stacks of the cluster that a ClusterConfig asks for.

    cdk synth -c cluster=../cluster.yaml            no machines yet
    cdk synth -c cluster=../cluster.yaml -c scale=true

Mistakes are told with file, line and field, and nothing is synthesised.
"""

from __future__ import annotations

import os
import sys

import aws_cdk as cdk
from hyperpod_cdk import build

from hyperpod_ext.clusters.deployment import problems
from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.config.files.load import read
from hyperpod_ext.errors import HyperpodExtError, UnsupportedError


def load_cluster(path: str) -> ClusterConfig:
    """The config in the file `path`, if it can be deployed.

    Raises:
        ConfigError: every mistake in it, with its line.
        NotFoundError: there is no such file.
    """
    loaded = read(ClusterConfig, path)
    if found := list(problems(loaded.config)):
        raise UnsupportedError(loaded.locate(found))
    return loaded.config


def main() -> int:
    app = cdk.App()
    path = app.node.try_get_context("cluster") or os.environ.get("HPX_CLUSTER") or "cluster.yaml"
    scale = str(app.node.try_get_context("scale") or "false").lower() == "true"
    try:
        config = load_cluster(str(path))
    except HyperpodExtError as error:
        print(error, file=sys.stderr)  # noqa: T201, the CLI shows it
        return error.exit_code
    build(app, config, scale=scale)
    app.synth()
    return 0


if __name__ == "__main__":
    sys.exit(main())
