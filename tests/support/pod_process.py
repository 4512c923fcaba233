"""The container of a rendered pod as a process of this machine, as the pod's own user, in a file system of its own.

That is this machine's, seen through an overlay: what the process writes, and the folders that volumes are mounted at,
are nobody else's and end with it. Volumes have the owners and modes that the kubelet gives them. What is not shown: the
image, whose folders may be closed to the user, and storage that has owners of its own, such as claims.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class PodProcess:
    """How to start the pod's first container."""

    pod: dict[str, Any]
    """Its `spec`."""
    place: Path
    """An empty folder, which the file system is put together in."""
    secret: str
    """Of every Secret that is mounted, what each key has."""
    programs: tuple[Path, ...] = (Path(sys.executable).parent,)
    """Folders with what the image would bring."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables that an operator would add."""

    @property
    def written(self) -> Path:
        """Its `/tmp`, once it has ended."""
        return self.place.with_name(f"{self.place.name}.tmp")

    def command(self, script: str | None = None) -> list[str]:
        """The process: `script`, if it is given, in the place of the container's own."""
        container = self.pod["containers"][0]
        words = [*container["command"], *container["args"]]
        started = [script if script and word == words[-1] else as_kubernetes_passes(word) for word in words]
        own = {one["name"]: as_kubernetes_passes(one["value"]) for one in container["env"]}
        path = ":".join(map(str, [*self.programs, "/usr/local/bin:/usr/bin:/bin"]))
        variables = {"PATH": path, "HOME": "/", "LANG": "C.UTF-8", **own, **self.env}
        variables_given = [f"{name}={value}" for name, value in variables.items()]
        inside = [*self._volumes(), f"cd {shlex.quote(container.get('workingDir', '/'))}"]
        inside.append(f"exec {shlex.join([*self._user(), 'env', '-i', *variables_given, *started])}")
        outside = [*self._file_system(), f"chroot root sh -ec {shlex.quote(chr(10).join(inside))} && code=0 || code=$?"]
        outside += [f"cp -a upper/tmp {shlex.quote(str(self.written))}", "exit $code"]
        return ["unshare", "--mount", "--propagation", "private", "sh", "-ec", "\n".join(outside)]

    def _context(self) -> dict[str, Any]:
        return self.pod.get("securityContext", {}) | self.pod["containers"][0].get("securityContext", {})

    def _user(self) -> list[str]:
        context = self._context()
        groups = [*([context["fsGroup"]] if "fsGroup" in context else []), *context.get("supplementalGroups", [])]
        ids = [f"--reuid={context.get('runAsUser', 0)}", f"--regid={context.get('runAsGroup', 0)}"]
        ids.append("--groups=" + ",".join(map(str, groups)) if groups else "--clear-groups")
        return ["setpriv", *ids, *([] if context.get("allowPrivilegeEscalation", True) else ["--no-new-privs"])]

    def _file_system(self) -> Iterator[str]:
        yield f"mount -t tmpfs none {shlex.quote(str(self.place))}"
        yield f"cd {shlex.quote(str(self.place))}"
        yield "mkdir upper work root"
        yield "mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work root"
        for folder in ("proc", "dev", "sys"):
            yield f"mount --rbind /{folder} root/{folder}"

    def _volumes(self) -> Iterator[str]:
        """In the new root, where links lead to what is in it."""
        for folder in Path(sys.base_prefix).parents:  # Python may lie in root's own home
            yield f"chmod a+x {shlex.quote(str(folder))}"
        yield "rm -rf /tmp/hyperpod* /opt/ml"
        volumes = {one["name"]: one for one in self.pod.get("volumes", [])}
        for mount in self.pod["containers"][0].get("volumeMounts", []):
            yield from self._volume(volumes[mount["name"]], shlex.quote(mount["mountPath"]))

    def _projected(self, source: dict[str, Any]) -> dict[str, Any]:
        """A projected volume of one secret, as the volume of that secret would be."""
        (one,) = source["sources"]
        return {"defaultMode": source.get("defaultMode", 0o644), "items": one["secret"]["items"]}

    def _volume(self, volume: dict[str, Any], at: str) -> Iterator[str]:
        group = self._context().get("fsGroup")
        yield f"mkdir -p {at}"
        yield f"mount -t tmpfs -o mode=0777 none {at}"
        secret = "secret" in volume or "projected" in volume
        if secret:
            source = volume.get("secret") or self._projected(volume["projected"])
            mode = source.get("defaultMode", 0o644) | (0o440 if group is not None else 0)
            yield f"mkdir {at}/..made && ln -s ..made {at}/..data"
            for item in source["items"]:
                yield f"printf %s {shlex.quote(self.secret)} >{at}/..made/{item['key']}"
                yield f"chmod {mode:o} {at}/..made/{item['key']}"
                yield f"ln -s ..data/{item['key']} {at}/{item['path']}"
        else:
            assert "emptyDir" in volume, volume
        if group is not None:
            yield f"chgrp -R {group} {at}"
            yield f"find {at} -type d -exec chmod g+rxs{'' if secret else 'w'} {{}} +"
        if secret:
            yield f"mount -o remount,ro {at}"


def as_kubernetes_passes(text: str) -> str:
    """`$$` is one dollar."""
    return text.replace("$$", "$")


@cache
def require() -> None:
    """Skip where no process can become another user in a file system of its own; fail under CI."""
    lacking = ""
    if os.geteuid() != 0 or not all(shutil.which(program) for program in ("setpriv", "unshare", "chroot")):
        lacking = "it takes root, setpriv, unshare and chroot"
    else:
        tried = (
            "mount -t tmpfs none /mnt; cd /mnt; mkdir u w r; mount -t overlay o -o lowerdir=/,upperdir=u,workdir=w r"
        )
        done = subprocess.run(["unshare", "--mount", "sh", "-ec", tried], capture_output=True, text=True, check=False)
        lacking = done.stderr.strip()
    if lacking and os.environ.get("CI"):
        pytest.fail(f"no pod can be had as a process: {lacking}")
    if lacking:
        pytest.skip(f"no pod can be had as a process: {lacking}")
