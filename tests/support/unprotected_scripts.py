"""Scripts whose training nothing saves: files by name, of which `train.py` is started. Libraries are look-alikes.

Each prints `step N is made` after its Nth step on each rank.
"""

from __future__ import annotations

_LOOP = """
def fit(model, optimizer, backward=lambda loss: loss.backward(), steps=3):
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        print(f"step {step} is made")
"""
_MODEL = """
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
_IMPORTS = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
"""
_RESILIENT = """
from hyperpod_ext.runtime import Run, resilient

@resilient
def train(run: Run) -> None:
    model = run.keep(lambda: torch.nn.Linear(4, 1))
    optimizer = run.keep(lambda: torch.optim.SGD(model.parameters(), lr=0.1))
    run.restore(model=model, optimizer=optimizer)
    wrapped = run.data_parallel(model)
    for _ in run.steps(3):
        fit(wrapped, optimizer, steps=1)

def plain() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1))
"""
_TRAINER = f"""{_IMPORTS}{_LOOP}
class Trainer:
    def __init__(self, model):
        dist.init_process_group("gloo")
        self.model = DistributedDataParallel(model)

    def train(self):
        fit(self.model, torch.optim.AdamW(self.model.parameters()))
"""
_LIGHTNING = f"""{_IMPORTS}{_LOOP}
LightningModule = torch.nn.Module

class Trainer:
    def fit(self, model):
        dist.init_process_group("gloo")
        fit(DistributedDataParallel(model), model.configure_optimizers())
"""
_ACCELERATE = f"""{_IMPORTS}
class AcceleratedOptimizer(torch.optim.Optimizer):
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self, closure=None):
        self.optimizer.step(closure)

class Accelerator:
    def __init__(self):
        dist.init_process_group("gloo")

    def prepare(self, model, optimizer):
        return DistributedDataParallel(model), AcceleratedOptimizer(optimizer)

    def backward(self, loss):
        loss.backward()
"""

PLAIN = {"train.py": f'{_IMPORTS}{_LOOP}\ndist.init_process_group("gloo"){_MODEL}\nfit(model, optimizer)\n'}
HUGGING_FACE = {
    "train.py": "import torch\nfrom transformers import Trainer\nTrainer(model=torch.nn.Linear(4, 1)).train()\n",
    "transformers.py": _TRAINER,
}
LIGHTNING = {
    "train.py": """
import lightning as L
import torch

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

L.Trainer().fit(Model())
""",
    "lightning.py": _LIGHTNING,
}
ACCELERATE = {
    "train.py": f"""
import torch
from accelerate import Accelerator
{_LOOP}
accelerator = Accelerator()
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
fit(model, optimizer, accelerator.backward)
""",
    "accelerate.py": _ACCELERATE,
}
NEVER_CALLED = {"train.py": f"{_IMPORTS}{_LOOP}{_RESILIENT}\nplain()\n"}
CALLED_SOMETIMES = {"train.py": f'{_IMPORTS}{_LOOP}{_RESILIENT}\ntrain() if os.environ.get("PROTECTED") else plain()\n'}

OURS_IS_ABSENT = {"plain": PLAIN, "hugging-face": HUGGING_FACE, "lightning": LIGHTNING, "accelerate": ACCELERATE}
"""Scripts that do not import hyperpod_ext."""
OURS_IS_UNUSED = {"never-called": NEVER_CALLED, "called-sometimes": CALLED_SOMETIMES}

OUTSIDE_STEPS = {
    "train.py": f"""{_IMPORTS}{_LOOP}
from hyperpod_ext.runtime import Run, resilient

@resilient
def train(run: Run) -> None:
    model = run.keep(lambda: torch.nn.Linear(4, 1))
    optimizer = run.keep(lambda: torch.optim.SGD(model.parameters(), lr=0.1))
    run.restore(model=model, optimizer=optimizer)
    fit(run.data_parallel(model), optimizer)

train()
"""
}
"""The training function does not use `run.steps`."""
PROTECTED = {
    "train.py": f"""{_IMPORTS}{_LOOP}
from hyperpod_ext.runtime import Run, resilient

def warmed(model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()  # builds its state
    return optimizer

@resilient
def train(run: Run) -> None:
    model = run.keep(lambda: torch.nn.Linear(4, 1))
    optimizer = run.keep(lambda: warmed(model))
    run.restore(model=model, optimizer=optimizer)
    wrapped = run.data_parallel(model)
    for step in run.steps(6):
        fit(wrapped, optimizer, steps=1)
        model.eval()
        with torch.no_grad():
            run.log(loss=float(model(torch.ones(1, 4))))
        model.train()

train()
"""
}
"""It builds the optimizer's state by a step in `run.keep`, and evaluates the model."""
