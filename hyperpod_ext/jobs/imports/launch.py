"""Parser of the command lines of launchers, such as torchrun: number of workers, script and arguments. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

_FLAGS = {"standalone", "no-python", "run-path", "inprocess-restart", "use-agent-store", "multi-gpu", "use-deepspeed"}
_FLAGS |= {
    "use-fsdp",
    "no-local-rank",
    "no-ssh",
    "force-multi",
    "same-network",
    "use-megatron-lm",
    "main-training",
    "cpu",
}
_FLAGS |= {"virtual-local-rank", "verbose", "quiet", "debug", "enable-each-rank-log", "no-ssh-check"}
_WORKERS = {
    "torchrun": ("nproc-per-node",),
    "hyperpodrun": ("nproc-per-node",),
    "accelerate": ("num-processes",),
    "deepspeed": ("num-gpus",),
    "composer": ("nproc", "n"),
}
_NODES = ("nnodes", "num-machines", "num-nodes")
_OURS = {"nproc-per-node", "rdzv-id", "rdzv-backend", "rdzv-endpoint", "rdzv-conf", "node-rank", "master-addr"}
_OURS |= {"master-port", "machine-rank", "main-process-ip", "main-process-port", "num-processes", "num-machines", "n"}
_OURS |= {"nnodes", "num-gpus", "num-nodes", "nproc", "world-size", "inprocess-restart", "no-python", "standalone"}
"""Options of launchers that are not imported, because the rendered file sets them itself."""


_PYTHON = r"python[0-9.]*|python\.sh"
_NO_PYTHON = "no-python"
"""Flag of launchers for programs that are not Python scripts."""


@dataclass
class Launch:
    """One command that starts workers, split into its parts."""

    launcher: str
    """`torchrun`, `hyperpodrun`, `accelerate`, `deepspeed`, `composer`, or `python` if there is no launcher."""
    script: str
    """File of the script, or name of the module after `-m`."""
    args: list[str]
    options: dict[str, str] = field(default_factory=dict)
    """Value of each option of the launcher, by the option's name without leading dashes; empty for a flag."""
    before: list[str] = field(default_factory=list)
    """Words of the command before the launcher, such as a profiler or `env`."""
    program: str = ""
    """The launcher, or the Python interpreter that runs it, as written in the file: a name or a path."""
    python_options: list[str] = field(default_factory=list)
    """Options of the Python interpreter, without `-u`."""
    is_module: bool = False
    is_unbuffered: bool = False
    """Whether the Python interpreter has the option `-u`."""

    @property
    def interpreter(self) -> str | None:
        """Python interpreter in the command, or in the launcher's folder; None means `python3` from PATH."""
        folder, slash, name = self.program.rpartition("/")
        if re.fullmatch(_PYTHON, name):
            return self.program if slash or name != "python3" else None
        return f"{folder}/python" if slash else None

    @property
    def workers(self) -> str | None:
        """Number of workers as written in the command; None if the command does not contain it.

        accelerate counts the workers of all nodes, other launchers the workers of one node.
        """
        return next((self.options[name] for name in _WORKERS.get(self.launcher, ()) if name in self.options), None)

    @property
    def nodes(self) -> str | None:
        """Number of nodes as written in the command; None if the command does not contain it."""
        return next((self.options[name] for name in _NODES if name in self.options), None)

    def on_each_node(self, count: int, nodes: int) -> int:
        """Return the number of workers per node.

        Args:
            count: number of workers in the command. accelerate counts the workers of all nodes.
            nodes: number of nodes, if the command does not name it.
        """
        if self.launcher != "accelerate":
            return count
        named = self.nodes or ""
        machines = int(named) if named.isdecimal() and int(named) else nodes
        return count // machines if count % machines == 0 else count

    def starts(self) -> dict[str, Any]:
        """Return the fields of a spec that start the program: a script with arguments, or a command for each worker."""
        if self.is_module:
            return {"command": [self.interpreter or "python3", "-m", self.script, *self.args], "mode": "plain"}
        if _NO_PYTHON in self.options:
            return {"command": [self.script, *self.args], "mode": "plain"}
        return {"script": self.script, "args": self.args}

    def other_options(self) -> dict[str, str]:
        """Return the options of the imported command that a rendered file would lose, because it does not set them."""
        return {name: value for name, value in self.options.items() if not self._is_replaced(name, value)}

    def replaced(self) -> Iterator[str]:
        """Yield a sentence for each option of the command that is dropped, because the rendered file sets it itself."""
        if self.is_unbuffered:
            yield "-u of the interpreter: output is unbuffered anyway"
        for name, value in self.options.items():
            if self._is_replaced(name, value) and name not in _WORKERS.get(self.launcher, ()):
                shown = f"--{name}{'=' if value else ''}{value}"
                yield f"{shown} of {self.launcher}: the rendered file sets this itself"

    def _is_replaced(self, name: str, value: str) -> bool:
        return name in _OURS or {"tee": "3", "redirects": "3", "redirect": "3"}.get(name) == value


_FORKED = "hyperpod_ext.runtime.prefork"
"""Module that rendered jobs insert between `hyperpodrun` and the script."""


_LAUNCHERS = ("torchrun", "hyperpodrun", "deepspeed", "composer")


def launcher_in(words: Sequence[str]) -> str | None:
    """Return the name of the first launcher in the words of a command; None if there is no launcher."""
    names = [word.rpartition("/")[2] for word in words]
    found = [name for name in names if name in _LAUNCHERS]
    return found[0] if found else "accelerate" if "accelerate launch" in " ".join(names) else None


def parse_launch(words: Sequence[str]) -> Launch | None:
    """Parse the words of a command that starts workers. Return None if the command runs neither a launcher with a
    script or module, nor a Python file."""
    for at, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name in _LAUNCHERS:
            return _with_options(name, word, words[at + 1 :], words[:at])
        if name == "accelerate" and words[at + 1 : at + 2] == ["launch"]:
            return _with_options(name, word, words[at + 2 :], words[:at])
        if re.fullmatch(_PYTHON, name):
            return _python(word, list(words[at + 1 :]), list(words[:at]))
        if re.fullmatch(r"\S+\.py", word) and at == 0:
            return Launch("python", word, list(words[at + 1 :]))
    return None


def _python(program: str, rest: list[str], before: list[str]) -> Launch | None:
    options: list[str] = []
    unbuffered = False
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        count = 2 if rest[0] in ("-X", "-W") else 1
        unbuffered |= rest[0] == "-u"
        options += [] if rest[0] == "-u" else rest[:count]
        rest = rest[count:]
    found = None
    if rest[:1] == ["-m"]:
        module, rest = (rest[1] if len(rest) > 1 else ""), rest[2:]
        if module in ("torch.distributed.run", "torch.distributed.launch"):
            found = _with_options("torchrun", program, rest, before)
        if module in ("accelerate.commands.launch", "deepspeed.launcher.runner"):
            found = _with_options(module.partition(".")[0], program, rest, before)
    elif rest and rest[0].rpartition("/")[2] in _LAUNCHERS:
        found = _with_options(rest[0].rpartition("/")[2], program, rest[1:], before)
    elif rest and rest[0].endswith(".py"):
        found = Launch("python", rest[0], rest[1:], before=before, program=program)
    if found is not None:
        found.python_options, found.is_unbuffered = options, unbuffered
    return found


def _with_options(launcher: str, program: str, words: Sequence[str], before: Sequence[str]) -> Launch | None:
    rest, options, module = list(words), {}, False
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word in ("-m", "--module"):
            if rest[:1] == [_FORKED]:
                rest.pop(0)
            else:
                module = True
            break
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("_", "-")
        if not equals and name not in _FLAGS and rest and not rest[0].endswith(".py") and rest[0][:2] != "--":
            value = rest.pop(0)
        options[name] = value
    if not rest or not (rest[0].endswith(".py") or _NO_PYTHON in options or module):
        return None
    return Launch(launcher, rest[0], rest[1:], options, list(before), program, is_module=module)
