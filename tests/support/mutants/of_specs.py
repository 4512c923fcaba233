"""What the user writes, what is refused of it, and what is rendered and changed from it."""

from __future__ import annotations

from mutants.table import Mutant, Source

BASE = Source("hyperpod_ext.config.base", ("tests/config/test_load.py",))
OVERRIDES = Source("hyperpod_ext.config.files.overrides", ("tests/config/test_overrides.py",))
CHECKS = Source("hyperpod_ext.config.files.checks", ("tests/config/test_checks.py",))
RENDER = Source("hyperpod_ext.jobs.contract.render", ("tests/jobs/test_plan.py",))
SCRIPTS = Source("hyperpod_ext.jobs.rules.scripts", ("tests/jobs/rules/test_scripts.py",))
STACK_CHANGES = Source("hyperpod_ext.clusters.cdk.changes", ("tests/clusters/cdk/test_changes.py",))

MUTANTS: list[Mutant] = [
    BASE.mutant(
        "config.unknown_field_is_ignored",
        "A field that is not known is an error, with the name that was meant.",
        'extra="forbid",',
        'extra="ignore",',
    ),
    SCRIPTS.mutant(
        "scripts.only_the_first_file_is_asked",
        "A script that imports hyperpod_ext through a module of its folder is not warned of.",
        "for code in read)",
        "for code in read[:1])",
    ),
    OVERRIDES.mutant(
        "config.first_override_wins",
        "Of two --set options for one field, the last one counts.",
        "for override in overrides:",
        "for override in reversed(list(overrides)):",
    ),
    CHECKS.mutant(
        "config.batch_among_nodes",
        "The global batch divides among all ranks, not just among nodes.",
        "if batch is None or batch % world == 0:",
        "if batch is None or batch % job.nodes == 0:",
    ),
    RENDER.mutant(
        "render.quotes_let_the_shell_in",
        "What the user writes reaches the process letter for letter: the shell expands none of it.",
        'environment.filters["quote"] = shlex.quote',
        'environment.filters["quote"] = json.dumps',
    ),
    RENDER.mutant(
        "render.missing_name_is_nothing",
        "A name that a template does not get is an error, never an empty string.",
        "        undefined=StrictUndefined,\n",
        "",
    ),
    STACK_CHANGES.mutant(
        "stacks.replacement_is_called_an_update",
        "A property that an update cannot change is told as a replacement before anything is deployed.",
        "elif any(_touches(path, one, before, after) for one in fixed.always):",
        "elif kind != CLUSTER and any(_touches(path, one, before, after) for one in fixed.always):",
    ),
]
