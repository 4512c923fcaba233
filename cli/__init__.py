"""The command line `hp-ext`. Each command is a module, which is imported only when the command is called.

`hp-ext --help` therefore imports only click. Import `hyperpod_ext` only inside functions, to keep `--help` fast.
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
            "validate": "Check a job spec, and report all mistakes at once.",
            "render": "Show or write the files that would be submitted.",
            "diff": "Show the changes that a spec would make to a job on Kubernetes.",
            "create-job": "Submit a job; with --wait, wait for its result.",
            "run": "Run a script without changes on this machine, and restart it after a fault.",
            "wait": "Wait until a job has ended, and show its result.",
            "list": "List the jobs of a target.",
            "status": "Show the state of one job, or of all.",
            "logs": "Show the output of a job's workers.",
            "cancel": "Stop a job, and wait until its processes have ended.",
            "resize": "Resize a running job to more or fewer nodes.",
            "move": "Move the ranks of a node to a spare, and stop the node.",
            "chaos": "Inject a fault into a running job, to test its recovery.",
            "import": "Convert a job file of another tool to a spec.",
        },
    ),
    Section(
        "Jobs on a cluster",
        f"{__name__}.cluster_jobs",
        {
            "describe": "Show a job's state, its pods and why they wait, and its events.",
            "exec": "Run a command on a node of a running job.",
            "port-forward": "Forward ports of a job's pod to this machine.",
            "delete": "Delete the Kubernetes objects of an ended job.",
        },
    ),
    Section(
        "Before a job",
        f"{__name__}.plan",
        {
            "plan": "Show the size of a job's state, the best save intervals, and their cost.",
            "simulate": "Simulate a job with random failures, for example over a month.",
            "scales": "Show how evenly a global batch divides for each number of nodes.",
        },
    ),
    Section(
        "What happens to a job",
        f"{__name__}.report",
        {
            "report": "Show a job's faults and their cost.",
            "top": "Follow a running job: step, goodput, faults, ranks.",
            "dashboards": "Write a Grafana dashboard and alert rules for jobs with metrics.",
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
            "cluster": "Create, deploy, update, list, show and delete clusters.",
            "node": "Reboot, replace and drain nodes of a cluster.",
        },
    ),
    Section(
        "Reference",
        f"{__name__}.reference",
        {
            "schema": "Print the JSON schema of a spec, of an output, or of events.",
            "explain": "Explain a rule, a field of a spec, or an AWS term.",
            "instances": "List instance types, with CPUs and memory for pods.",
            "templates": "List, show, compare and copy the templates of submitted files.",
            "doctor": "Check the installation and reachable services.",
            "completion": "Print a shell's completion script.",
        },
    ),
]


@click.group(
    cls=LazyGroup,
    sections=SECTIONS,
    moved={"create-cluster": ["cluster", "create"], "update-cluster": ["cluster", "update"]},
    guessed={
        "submit": "create-job",
        "start": "create-job",
        "ps": "list",
        "get": "list",
        "stop": "cancel",
        "kill": "cancel",
    },
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Example:
  hp-ext init my-job
  hp-ext create-job -f my-job/job.yaml --target local --wait

\b
Exit codes: 0 done, 1 other error, 2 wrong usage, 3 invalid spec, 4 unreachable,
5 name or port in use, 6 not found, 7 job failed, 8 timed out, 130 interrupted.
The diff commands also exit with 10 and 11: see their --help.""",
)
@click.version_option(package_name="hyperpod-ext", prog_name="hp-ext")
def hp_ext() -> None:
    """Training jobs that survive faults: one typed spec, checked and run on any target."""


def main() -> None:
    """Run the command line. After Ctrl-C, the exit code is 130, as shells expect."""
    from hyperpod_ext.standard_streams import open_standard_streams

    open_standard_streams()
    try:
        code = hp_ext.main(prog_name="hp-ext", standalone_mode=False)
    except click.ClickException as error:
        from .output import print_click_error

        print_click_error(error)
        code = error.exit_code
    except click.Abort:
        code = 130
    sys.exit(code)
