"""What a user does first with a release: commands in a fresh environment, without torch and with it."""

from __future__ import annotations

import json

from release.fresh import Fresh
from release.steps import StepFailedError, step

WRONG = "name: tiny\nscript: train.py\nnodez: 2\n"


def without_torch(fresh: Fresh, name: str, version: str) -> None:
    """Try the commands that need neither torch nor a compiler."""
    with step(f"{name}: hp-ext --version and --help"):
        _expect(fresh.run("hp-ext", "--version"), f"version {version}")
        _expect(fresh.run("hp-ext", "--help"), "create-job")
    with step(f"{name}: py.typed is installed, and torch is not"):
        code = "import hyperpod_ext; from importlib.resources import files; print(files(hyperpod_ext) / 'py.typed')"
        _expect(fresh.run("python", "-c", code), "site-packages/hyperpod_ext/py.typed")
        _expect(fresh.run("python", "-c", "from importlib.util import find_spec; print(find_spec('torch'))"), "None")
    with step(f"{name}: hp-ext init, validate"):
        fresh.run("hp-ext", "init", "tiny")
        _expect(fresh.run("hp-ext", "validate", "tiny/job.yaml"), "valid")
    with step(f"{name}: hp-ext render"):
        fresh.run("hp-ext", "init", "pods", "--target", "hyperpod-eks")
        rendered = fresh.run("hp-ext", "render", "pods/job.yaml", "--target", "hyperpod-eks")
        _expect(rendered, "kind: HyperPodPyTorchJob")
    with step(f"{name}: hp-ext plan"):
        plan = ("plan", "--model", "llama3-8b", "--nodes", "4", "--instance-type", "ml.p5.48xlarge")
        _expect(fresh.run("hp-ext", *plan), "goodput")
    with step(f"{name}: mistakes are reported without a traceback"):
        (fresh.work / "wrong.yaml").write_text(WRONG)
        _expect(fresh.run("hp-ext", "validate", "wrong.yaml", code=3), "did you mean `nodes`?")
        _expect(fresh.run("hp-ext", "validate", "missing.yaml", code=6), "there is no file missing.yaml")
        _expect(fresh.run("hp-ext", "plan", "--nodes", "4", code=2), "Give the model's size")
        _expect(fresh.run("hp-ext", "create-job", "-f", "tiny/job.yaml", code=7), "pip install torch")


def with_torch(fresh: Fresh, name: str) -> None:
    """Run a job on this machine in which a worker is killed, and compare its result with the undisturbed run's."""
    with step(f"{name}: hp-ext create-job --target local --kill rank=1@step=20"):
        fresh.run("hp-ext", "init", "tiny")
        job = ("-f", "tiny/job.yaml", "--target", "local", "--wait", "--kill", "rank=1@step=20", "-o", "json")
        report, _ = json.JSONDecoder().raw_decode(fresh.run("hp-ext", "create-job", *job))
        equal = report["loss_equal"] and report["weights_equal"]
        if not equal or len(report["recoveries"]) != 1 or report["steps_lost"] != 0:
            raise StepFailedError(f"the job did not continue as without the kill:\n{json.dumps(report, indent=1)}")


def _expect(output: str, wanted: str) -> None:
    if wanted not in output:
        raise StepFailedError(f"the output lacks `{wanted}`:\n{output}")
