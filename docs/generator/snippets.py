"""The commands on pages: tests run those of `RUN`, and every other code block of commands has a reason against it.

A reason is written in the page, in a comment before the block (`<!-- not run: it needs a cluster -->`), or follows from
the commands by `REASONS`. The site shows the reason below the block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

BLOCK = re.compile(r"(?:<!-- not run: (?P<why>[^>]*?) -->\n)?^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.M | re.S)
SHELL = ("", "sh", "bash", "console")
PROGRAMS = (
    *("aws", "cd", "curl", "exec", "git", "hp-ext", "kubectl", "make", "npm", "openssl", "pip", "printf"),
    *("python", "python3", "sbatch", "srun", "tail", "torchrun"),
)
COMMAND = re.compile(rf"^\s*(?:\$ )?(?:{'|'.join(PROGRAMS)}) ", re.M)
RUN = (
    *("docs/ten-minutes.md", "docs/first-job.md", "docs/rehearse.md", "docs/planning.md"),
    *("docs/how-to/check-specs-in-ci.md", "docs/how-to/import-a-job.md", "docs/how-to/set-other-fields.md"),
    *("docs/how-to/tokenize-a-dataset.md", "docs/how-to/write-specs-in-an-editor.md"),
)
"""Pages whose commands `tests/test_pages.py` runs, in order, in an empty folder."""
REASONS = (
    (r"hyperpod-eks|kubeflow|kubectl|hyperpodrun", "It needs a Kubernetes cluster."),
    (r"hyperpod-slurm|sbatch|srun", "It needs a Slurm cluster."),
    (r"sagemaker|hp-ext (cluster|node) ", "It needs an AWS account."),
    (r"s3://", "It needs a bucket on S3."),
    (r"make |pip |python3? -m (venv|build)|python benchmarks/", "It installs packages, or takes minutes."),
    (r"hp-ext run|examples/|train\.py", "Tests of the examples run it in another form."),
    (r"HOST|/nvme/|curl|prometheus|torchrun|openssl", "It needs a service, or files of your own."),
    (
        r"hp-ext (chaos|move|resize|top|status|logs|exec|wait|cancel|report|doctor --job|dashboards)|tail -f",
        "It needs a job.",
    ),
    (r"hp-ext (completion|doctor)|python - |import_graph", "It needs this machine's own files, or prints them."),
)
"""Reasons for which no test runs a block, each with the pattern of its commands. The first match counts."""


class Snippet(NamedTuple):
    """A code block with commands."""

    body: str
    reason: str
    """The reason for which no test runs the block; empty if a test runs it, or if the reason is missing."""

    @property
    def commands(self) -> list[str]:
        """The command lines of the block, without the output between them."""
        lines = self.body.replace("\\\n", " ").splitlines()
        with_prompt = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return with_prompt or [line for line in lines if line.strip()]


def snippets(text: str, page: str) -> Iterator[Snippet]:
    """Yield each code block of a page that has a command of `PROGRAMS`."""
    for found in BLOCK.finditer(text):
        if found["language"] in SHELL and COMMAND.search(found["body"]):
            yield Snippet(found["body"], reason(found, page))


def reason(found: re.Match[str], page: str) -> str:
    """Return the reason for which no test runs the block `found`; empty if there is none."""
    if found["why"]:
        return f"{found['why'][0].upper()}{found['why'][1:]}."
    if page in RUN:
        return ""
    return next((why for pattern, why in REASONS if re.search(pattern, found["body"])), "")


def with_reasons(text: str, page: str) -> str:
    """Return the text of a page with the reason below each code block of commands that no test runs."""

    def replace(found: re.Match[str]) -> str:
        block = found[0][found[0].index("```") :]
        if found["language"] not in SHELL or not COMMAND.search(found["body"]) or not (why := reason(found, page)):
            return block
        return f"{block}\n\n<small>No test runs this block. {why}</small>\n"

    return BLOCK.sub(replace, text)
