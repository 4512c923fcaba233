"""Pods of a HyperPodPyTorchJob as an operator makes them, run as processes of this machine, as a kubelet does.

The pod object is the job's template, bound to the API server's node. Its container's command and variables are started
as they were rendered, but for what pods on one machine cannot share: addresses, ports, /tmp and the secret's mount.
"""

from __future__ import annotations

import base64
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hyperpod_operator as operators
import pod_process
from hyperpodrun_env import hyperpodrun
from kube_apiserver import NODE, ApiServer

from hyperpod_ext.catalog.labels import HPJOB

KUBECTL = """\
#!/bin/sh
# kubectl ... exec -i POD -- COMMAND: the command runs in that pod's container
while [ "$1" != exec ]; do shift; done
export HPX_RUN_DIR="$(dirname "$0")/$3/run"
shift 4
exec "$@"
"""


@dataclass
class KubePod(operators.Pod):
    """One pod: an object of the API server, and the process that is its container."""

    spec: dict[str, Any] = field(default_factory=dict)
    secret: str = ""
    meet: int = 0
    """Port that agents of ours meet at."""

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def start(self) -> None:
        self.folder.mkdir(mode=0o700)
        (self.folder / "secret").touch(mode=0o600)
        (self.folder / "secret").write_text(self.secret)
        container = self.spec["containers"][0]
        words = [
            self._here(pod_process.as_kubernetes_passes(word)) for word in container["command"] + container["args"]
        ]
        own = {one["name"]: pod_process.as_kubernetes_passes(one["value"]) for one in container["env"]}
        own |= {"HPX_RUN_DIR": str(self.run_dir), "HPX_SECRET_FILE": str(self.folder / "secret")}
        own |= {"HPX_TEST_POD": str(self.folder), "HPX_SOCKET_DIR": str(self.folder), "TMPDIR": str(self.folder)}
        with (self.folder / "agent.log").open("wb") as log:
            self.agent = subprocess.Popen(words, env={**os.environ, **own, **self.env}, stdout=log, stderr=log)

    def _here(self, text: str) -> str:
        at = f"--server-host {self.ip} --server-port {self.port}"
        there = f"exec {hyperpodrun()} {at} --rdzv-conf resource_config_dir={self.folder}"
        here = text.replace("exec hyperpodrun", there).replace("--server-port 8080", at)
        return here.replace("29400", str(self.meet)).replace("/tmp/hyperpod", f"{self.folder}/hyperpod")


def make_pods(
    server: ApiServer, namespace: str, name: str, folder: Path, port: int, address: str, env: dict[str, str]
) -> list[KubePod]:
    """What the operator makes of job `name`: a pod for each node, on NODE. `address`: of all of them, for the API
    server; among themselves each has one of its own."""
    found = server.ask("GET", f"/apis/sagemaker.amazonaws.com/v1/namespaces/{namespace}/hyperpodpytorchjobs/{name}")
    core = f"/api/v1/namespaces/{namespace}"
    secret = base64.b64decode(server.ask("GET", f"{core}/secrets/{name}-hpx")["data"]["secret"]).decode()
    (group,) = found["spec"]["replicaSpecs"]
    pods = []
    for number in range(group["replicas"]):
        template = group["template"]
        metadata = template.get("metadata", {}) | {"name": f"{name}-{number}"}
        metadata["labels"] = metadata.get("labels", {}) | {HPJOB: name}
        made = server.ask("POST", f"{core}/pods", {"metadata": metadata, "spec": template["spec"] | {"nodeName": NODE}})
        made["status"] = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
        server.ask("PUT", f"{core}/pods/{name}-{number}/status", made)
        own = env | {"NNODES": str(group["replicas"]), "HPX_PORT_BASE": str(port + 10)}
        pods.append(
            KubePod(number, folder / f"{name}-{number}", (), port, own, spec=made["spec"], secret=secret, meet=port + 1)
        )
    return pods
