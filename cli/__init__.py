"""`hp-ext`: each command is a module of its own, in the folder of its section, loaded when it is called.

`hp-ext --help` therefore costs no more than click; keep imports of the library inside functions.
"""

from __future__ import annotations

import sys

import click

from .lazy_group import LazyGroup, Section

SECTIONS = [
    Section(
        "Jobs",
        f"{__name__}.job",
        {
            "init": "Write a job spec and a training script to start from.",
            "validate": "Check a job spec, and tell every mistake at once.",
            "render": "Show or write the files that would be submitted.",
            "diff": "Show what a spec would change in a job on Kubernetes.",
            "create-job": "Submit a job, and wait for its result if asked to.",
            "wait": "Wait until a job has ended, and show its result.",
            "list": "List the jobs of a target.",
            "status": "Show one job, or all.",
            "logs": "Show what the workers of a job print.",
            "cancel": "End a job, and leave nothing of it running.",
            "resize": "Have a job that runs go on with more or fewer nodes.",
            "move": "Have the ranks of a node go to a spare, and the node end.",
            "chaos": "Inflict a fault on a job that runs, to see what it does.",
            "import": "Turn a job for Kubernetes into a spec.",
        },
    ),
    Section(
        "Jobs on a cluster",
        f"{__name__}.cluster_jobs",
        {
            "describe": "Show one job on one screen: pods, why they wait, events.",
            "exec": "Run a command on a node of a job, beside its workers.",
            "port-forward": "Bring ports of a job's pod to this machine.",
            "delete": "Delete what a job left on Kubernetes when it had ended.",
        },
    ),
    Section(
        "Before a job",
        f"{__name__}.plan",
        {
            "plan": "Tell what a job's state weighs, how often to save it, and what that costs.",
            "simulate": "Run a job through a month of drawn failures, in seconds.",
            "scales": "Show how well a global batch divides on each number of nodes.",
        },
    ),
    Section(
        "What happens to a job",
        f"{__name__}.report",
        {
            "report": "Show what happened to a job, and what it cost.",
            "top": "Follow a job that runs: step, goodput, faults, ranks.",
            "dashboards": "Write a Grafana dashboard and alert rules for jobs that show their numbers.",
        },
    ),
    Section(
        "Checkpoints and data",
        __name__,
        {
            "checkpoints": "List, show, verify, copy and prune checkpoints.",
            "data": "Convert datasets to memory-mapped tokens; show and verify them.",
        },
    ),
    Section(
        "Clusters",
        f"{__name__}.clusters",
        {
            "create-cluster": "Create a HyperPod cluster from its spec.",
            "update-cluster": "Show what a spec would change in a cluster, and change it.",
            "cluster": "Make a cluster with all around it; list, show and delete clusters.",
            "node": "Reboot, replace and drain nodes of a cluster.",
        },
    ),
    Section(
        "Reference",
        f"{__name__}.reference",
        {
            "schema": "Print the JSON schema of a spec, of an output, or of events.",
            "explain": "Tell what a rule or a field means.",
            "instances": "List instance types, and what pods can have of each.",
            "templates": "List, show and hand over the templates of what is submitted.",
            "doctor": "Tell what is installed and reachable.",
            "completion": "Print what a shell needs to complete commands.",
        },
    ),
]


@click.group(
    cls=LazyGroup,
    sections=SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Example:
  hp-ext init my-job
  hp-ext create-job -f my-job/job.yaml --target local --wait

\b
Exit codes: 0 done, 1 another error, 2 wrong usage, 3 invalid spec, 4 unreachable,
5 name or port in use, 6 not found, 7 job failed, 8 waited too long, 130 interrupted;
of diffs 10 and 11, as their --help says.""",
)
@click.version_option(package_name="hyperpod-ext", prog_name="hp-ext")
def hp_ext() -> None:
    """Training jobs that survive faults: one typed spec, checked and run on any target."""


def main() -> None:
    """Entry point of the command line. Ctrl-C exits with 130, as shells expect."""
    from hyperpod_ext.standard_streams import open_standard_streams

    open_standard_streams()
    try:
        code = hp_ext.main(prog_name="hp-ext", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except click.Abort:
        code = 130
    sys.exit(code)
