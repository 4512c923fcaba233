"""The CDK app, which the CDK command line starts to build the stacks of the cluster that a ClusterConfig describes.

    cdk synth -c cluster=../cluster.yaml            no machines yet
    cdk synth -c cluster=../cluster.yaml -c scale=true

If the cluster file has mistakes, the app prints the line and the field of each mistake, and builds no stack.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from hyperpod_ext.clusters.deployment import problems
from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.config.files.load import read
from hyperpod_ext.errors import ConfigError, HyperpodExtError, Problem, UnsupportedError


def load_cluster(path: str) -> ClusterConfig:
    """Return the cluster's spec from the file `path`, after a check that the cluster can be deployed.

    Raises:
        ConfigError: the file has mistakes. The error lists every mistake with its line.
        NotFoundError: there is no file `path`.
    """
    loaded = read(ClusterConfig, path)
    if found := list(problems(loaded.config)):
        raise UnsupportedError(loaded.locate(found))
    return loaded.config


def context() -> dict[str, Any]:
    """Return the context from the CDK command line, which passes it in an environment variable. A context that is too
    long for a variable is in a file.

    Raises:
        ConfigError: the variable or the file does not contain a JSON object.
    """
    variable, overflow = "CDK_CONTEXT_JSON", "CONTEXT_OVERFLOW_LOCATION_ENV"
    try:
        found = dict(json.loads(os.environ.get(variable) or "{}"))
        variable = overflow
        return found | (dict(json.loads(Path(file).read_text())) if (file := os.environ.get(overflow)) else {})
    except (OSError, ValueError, TypeError) as error:
        hint = "start the app with `hp-ext cluster` or `cdk`, which set it"
        raise ConfigError([Problem(f"does not contain a JSON object: {error}", path=variable, hint=hint)]) from error


def main() -> int:
    try:
        given = context()
        path = given.get("cluster") or os.environ.get("HPX_CLUSTER") or "cluster.yaml"
        config = load_cluster(str(path))
    except HyperpodExtError as error:
        print(error, file=sys.stderr)  # noqa: T201, the CDK CLI shows this output
        return error.exit_code
    import aws_cdk as cdk  # import CDK late, because the import starts Node.js, which takes two seconds
    from hyperpod_cdk import build

    app = cdk.App()
    build(app, config, scale=str(given.get("scale") or "false").lower() == "true")
    app.synth()
    return 0


if __name__ == "__main__":
    sys.exit(main())
