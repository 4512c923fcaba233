"""Imports lines of an sbatch file on which its step depends, as lines of `overlay.slurm.before`. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from hyperpod_ext.jobs.contract.rank_variables import changes_ranks
from hyperpod_ext.jobs.imports.placeholders import names_in
from hyperpod_ext.jobs.imports.shell_values import Script
from hyperpod_ext.jobs.slurm.import_step import Step, unescaped


def earlier_step(step: Step, script: Script) -> str | None:
    """Return a step that runs before the imported step, as a line of the batch script.

    Return None if a word of the step has an unknown value.
    """
    words = [word if word in script.literal else unescaped(word) for word in step.words]
    given = {name: value for name, (value, line) in script.exports.items() if line <= step.line}
    text = shlex.join(["env", *(f"{name}={value}" for name, value in given.items()), *words] if given else words)
    known = [word for word in [*step.words, *given.values()] if word not in script.literal]
    if not step.is_srun or step.before or step.line in script.in_background or any("$" in one for one in known):
        return None
    if re.search(r"[\n\r\x00]", text) or any("`" in one for one in known) or changes_ranks(text):
        return None
    return text + ("" if script.strict else " || true")


_PATH = r"[\w./~${}+-]+"
_LOADS = r"module|ml|spack (?:load|env activate)"
_ACTIVATES = r"(?:conda|mamba|micromamba|source|pyenv) activate"
_ENVIRONMENT = re.compile(
    rf"(?:\[\[? -[defs] {_PATH} \]\]? && )?"
    r"(?:set -a; )?"
    rf"(?:(?:source|\.)\s+{_PATH}|{_ACTIVATES}|{_LOADS})(?:\s+[\w./=:@~${{}}+-]+)*"
    r"(?:\s+(?:&?>>?\s*/dev/null|2>&1|2>\s*/dev/null))*(?:; set \+a)?"
    r"|eval \"\$\((?:\S*/)?(?:conda|mamba|micromamba) shell[\w. =-]*hook[\w. =-]*\)\""
    r"|(?:source|\.) \"?\$\(conda info --base\)\"?/etc/profile\.d/conda\.sh"
)
_KNOWS_CONDA = re.compile(r"conda\.sh|shell[\w. =-]*hook|bashrc|profile|^(?:module|ml)\b")
"""Pattern of lines that define the functions of conda in the shell."""
_ACTIVATE = re.compile(r"\bactivate\b")


def environment_lines(script: Script) -> list[tuple[str, int]]:
    """Return the commands before the first `srun` that only change its environment, each with its line number.

    An example is `source /fsx/venv/bin/activate`.
    """
    first = script.steps[0][1] if script.steps else 0
    lines = [(text, line) for text, line in script.others if line < first and _ENVIRONMENT.fullmatch(text.strip())]
    return [one for one in lines if not script.assigned & set(names_in(one[0]))]


def environment_of(script: Script, prepared: Sequence[tuple[str, int]], text: str) -> str | None:
    """Return a line of shell that sets up the step's environment; None if the file does not set up an environment.

    The rendered line runs the imported file's own commands in bash, because `sh` has neither `source` nor the functions
    of conda. If the environment cannot be activated, the job stops, because it would otherwise train with the system's
    Python.

    Args:
        prepared: commands that change the environment, from `environment_lines`.
        text: content of the file.
    """
    login = re.match(r"#!\S*bash\s+(-l\b|--login)", text) is not None
    if not prepared and not login:
        return None
    lines = ["set -e"] if script.strict else []
    known = login
    for one, _line in prepared:
        known |= _KNOWS_CONDA.search(one) is not None
        if re.search(r"\b(conda|mamba) activate\b", one) and not known:
            lines.append('eval "$(conda shell.bash hook)"')
            known = True
        lines.append(_quiet(one) + (" || exit 1" if _ACTIVATE.search(one) else ""))
    shell = "bash -lc" if login else "bash -c"
    made = shlex.quote("; ".join([*lines, "set -o posix", "export -p"]))
    return f'made=$({shell} {made}) || exit 1; eval "$made"'


def _quiet(text: str) -> str:
    """Redirect the output of the command `text` to stderr, because stdout has only the exported variables."""
    first, ends, _rest = text.partition("; set +a")
    return f"{first} >&2{ends}"
