"""State of the kinds that frameworks and their users make beside plain weights, added to a random script.

Each function changes a script, and returns False where the script has no place for it. A job may refuse some kinds by
name before its third step, and must end as the undisturbed run otherwise.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random_scripts import Script

STEPS = 12
SIMPLE = ("alone", "ddp")


def add_kinds(script: Script, draw: random.Random, first: str) -> bool:
    """Add the kind `first`, another one to half of the scripts, and a late fault; False: no place for `first`."""
    if not KINDS[first](script, draw):
        return False
    script.kinds.append(first)
    others = draw.sample([each for each in sorted(KINDS) if each != first], len(KINDS) - 1)
    if draw.random() < 0.5:
        script.kinds += [next(each for each in others if KINDS[each](script, draw))]
    if script.lost_node is not None and script.lost_node[1] <= script.every_steps + 1:
        script.lost_node = None  # it would be lost with the only copy of its first snapshot
    script.overlap = script.lost_node is None and draw.random() < 0.5
    last = STEPS - 3 if "early stop" in script.traits else STEPS
    step, rank = draw.randrange(8, last + 1), draw.randrange(script.ranks)
    phase = "data" if _is_compiled(script) else draw.choice(("data", "forward", "backward"))
    late = f"sigkill:rank={rank},step={step},phase={phase}"
    script.faults = [each for each in script.faults if f"step={step}," not in each] + [late]
    script.traits.append(f"kinds: {', '.join(script.kinds)}; late fault: {late}; overlap {script.overlap}")
    return True


def _extend(script: Script, init: str, forward: str, parts: str = "") -> None:
    """The model's class gets a subclass of the same name."""
    lines = ["class Model(Model):", "    def __init__(self):", "        super().__init__()"]
    lines += [f"        {line}" for line in init.split("\n")]
    if parts and any("def parts" in each for each in script.classes):
        lines += ["", "    def parts(self):", f"        return [*super().parts(), {parts}]"]
    if forward:
        lines += ["", "    def forward(self, x):"] + [f"        {line}" for line in forward.split("\n")]
    script.classes.append("\n".join(lines))


def _wrap(script: Script, *options: str) -> None:
    """Options of `run.data_parallel`, before the loop and in it."""
    for option in options:
        call = re.compile(r"run\.data_parallel\(model(?!.*" + option.split("=")[0] + ")")
        script.before, script.body = (
            [call.sub(f"run.data_parallel(model, {option}", line) for line in lines]
            for lines in (script.before, script.body)
        )


def _build(script: Script, line: str) -> None:
    """A line after all that makes the model, before its optimizers."""
    at = next(
        i for i, each in enumerate(script.build) if "optimizer" in each or "groups = " in each or "inner, " in each
    )
    script.build.insert(at, line)


def _learn(script: Script, row: str) -> None:
    """The targets depend on the variable `row`."""
    script.body = [re.sub(r"wanted = \(?(.+?)\)?\.sum", rf"wanted = (\1 + {row}).sum", each) for each in script.body]


def _hand(script: Script, name: str, made: str = "") -> None:
    if made:
        script.made.append(f"{name} = {made}")
    else:
        script.kept.append(name)
    script.handed.append(name)


def _is_compiled(script: Script) -> bool:
    return "torch.compile" in script.traits


def _is_fused(script: Script) -> bool:
    return "fused" in " ".join(script.build)


def _has_power_sgd(script: Script) -> bool:
    """Whether the script has PowerSGD's hook, with which torch 2.13 cannot look for unused parameters on gloo.

    DDP's collective for unused parameters and those of the hook's callbacks begin in another order on each rank, so
    that the script by itself fails in one run of six: "Received data size doesn't match expected size".
    """
    return any("powerSGD_hook" in line for line in script.before)


def _unfreezes(script: Script, draw: random.Random) -> bool:
    """Parameters whose `requires_grad` changes in a step."""
    if script.parallel not in SIMPLE or _is_compiled(script) or "weight_norm" in " ".join(script.traits):
        return False
    if any("register_comm_hook" in line for line in script.before):  # its second wrapper would have none
        return False
    step, first = draw.randrange(2, 7), draw.random() < 0.5
    script.build = [line for line in script.build if "requires_grad_(False)" not in line]
    if not first:
        _build(script, "for each in list(model.parameters())[:2]:\n    each.requires_grad_(False)")
    again = next((line for line in script.before if "parallel = " in line), "")
    lines = (
        f"if step == {step}:\n    for each in list(model.parameters())[:2]:\n        each.requires_grad_({not first})"
    )
    script.body.insert(0, f"{lines}\n    {again}")
    script.traits.append(f"{'freezes' if first else 'unfreezes'} in step {step}")
    return True


def _late(script: Script, draw: random.Random) -> bool:
    """A part of the model that is used from a step on: its optimizer state appears then."""
    if _is_compiled(script) or _has_power_sgd(script):
        return False
    step = draw.randrange(2, 8)
    head = "y + self.late(x).squeeze(-1)"
    same = "y + 0 * self.late(x).squeeze(-1)" if script.parallel == "fsdp2" and draw.random() < 0.5 else "y"
    _extend(
        script,
        "self.late, self.begun = nn.Linear(8, 1), False",
        f"y = super().forward(x)\nreturn {head} if self.begun else {same}",
    )
    script.body.insert(0, f"model.begun = step >= {step}")
    _wrap(script, "find_unused_parameters=True")
    script.traits.append(f"a head from step {step} on")
    return True


def _experts(script: Script, draw: random.Random) -> bool:
    """Experts that some steps, or all, give no gradient."""
    if _is_compiled(script) or _has_power_sgd(script):
        return False
    never = draw.random() < 0.5
    init = "self.gate = nn.Linear(8, 2, bias=False)\nself.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))"
    if script.parallel == "fsdp2" or never:
        chosen = "torch.where(choice == 0, self.experts[0](x), self.experts[1](x))"
        forward = f"with torch.no_grad():\n    choice = self.gate(x).argmax(1, keepdim=True)\nx = {chosen}"
    else:
        forward = "with torch.no_grad():\n    choice = int(self.gate(x).sum() > 0)\nx = self.experts[choice](x)"
    _extend(script, init, f"{forward}\nreturn super().forward(x)")
    _wrap(script, "find_unused_parameters=True")
    return True


def _growing_buffer(script: Script, draw: random.Random) -> bool:
    """A buffer that is longer after each step."""
    if script.parallel == "fsdp2" or _is_compiled(script) or "AveragedModel" in script.traits:
        return False
    _extend(script, 'self.register_buffer("history", torch.zeros(0))', "")
    every = draw.choice((1, 1, 3))
    script.body.append(f"if step % {every} == 0:\n    model.history = torch.cat([model.history, mean.view(1)])")
    _wrap(script, "broadcast_buffers=False")
    script.refusable.append(r"history")
    return True


def _growing_object(script: Script, draw: random.Random) -> bool:
    """An object whose state has more tensors, or larger ones, at each step."""
    way = draw.choice(("list", "cat", "dict"))
    adds = {
        "list": "self.seen.append(value)",
        "cat": "self.seen = [torch.cat([*self.seen, value])]",
        "dict": "self.seen[str(len(self.seen))] = value",
    }
    script.classes.append(
        f"""class Archive:
    def __init__(self):
        self.seen = {"{}" if way == "dict" else "[]"}

    def add(self, value):
        {adds[way]}

    def state_dict(self):
        return {{"seen": self.seen}}

    def load_state_dict(self, state):
        self.seen = {"dict" if way == "dict" else "list"}(state["seen"])"""
    )
    _hand(script, "archive", "Archive()")
    script.body.append("archive.add(mean.view(1).clone())")
    script.refusable.append(r"archive")
    script.traits.append(f"an archive: {way}")
    return True


def _swapped_average(script: Script, draw: random.Random) -> bool:
    """Averages that take the place of weights for an evaluation, through `.data`."""
    if script.parallel not in SIMPLE or "average" in script.handed or _is_compiled(script):
        return False
    script.classes.append(_SWAPPED)
    script.build.append("ema = Swapped(model)")
    script.kept.append("ema")
    script.handed.insert(draw.randrange(len(script.handed) + 1), "ema")
    where = draw.choice(("first", "last"))
    swap = (
        "if step % 3 == 1 and step > 1:\n    ema.swap(model)\n    model.eval()\n    with torch.no_grad():\n"
        "        for _ in range(5):\n            model(torch.ones(4, 8))\n    model.train()\n    ema.swap(model)"
    )
    if where == "first":
        script.body.insert(0, swap)
    script.body.append("ema.update(model)")
    if where == "last":
        script.body.append(swap)
    script.traits.append(f"swaps {where}")
    return True


_SWAPPED = """class Swapped:
    def __init__(self, model):
        self.shadow = [value.detach().clone() for value in model.parameters()]

    def update(self, model):
        with torch.no_grad():
            for mean, value in zip(self.shadow, model.parameters()):
                mean.mul_(0.9).add_(value, alpha=0.1)

    def swap(self, model):
        for mean, value in zip(self.shadow, model.parameters()):
            held = value.data.clone()
            value.data.copy_(mean)
            mean.copy_(held)

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state):
        for mean, value in zip(self.shadow, state["shadow"]):
            mean.copy_(value)"""


def _comm_hook(script: Script, draw: random.Random) -> bool:
    """DDP's communication hooks, with and without a state of their own."""
    if script.parallel != "ddp" or _is_compiled(script) or "unfreezes" in script.kinds:
        return False
    hook = draw.choice(("fp16_compress_hook", "allreduce_hook", "powerSGD", "powerSGD"))
    if hook == "powerSGD" and any("find_unused_parameters" in line for line in script.before):
        hook = "allreduce_hook"  # see `_has_power_sgd`
    if hook == "powerSGD":
        script.imports.append("from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power")
        script.before.append(
            "compressed = power.PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2)\n"
            "parallel.register_comm_hook(compressed, power.powerSGD_hook)"
        )
        script.refusable.append(r"PowerSGD|powerSGD|compressed")
        script.traits = [each for each in script.traits if each != "gradient_as_bucket_view"]
    else:
        script.imports.append("from torch.distributed.algorithms.ddp_comm_hooks import default_hooks")
        script.before.append(f"parallel.register_comm_hook(None, default_hooks.{hook})")
    script.traits.append(hook)
    return True


def _own_loader(script: Script, draw: random.Random) -> bool:
    """A DataLoader of one's own, begun where the run goes on, with or without a generator of its own."""
    if "elastic" in " ".join(script.traits):
        return False
    workers, generator = draw.choice((0, 1, 2)), draw.random() < 0.6
    ways = f", num_workers={workers}" + (", generator=torch.Generator()" if generator else "")
    script.imports.append("from torch.utils.data import DataLoader, TensorDataset")
    script.classes.append("rows = TensorDataset(torch.sin(torch.arange(1600.0)).view(200, 8))")
    script.before.append(
        f"through = DataLoader(rows, batch_size=4, sampler=range(run.step * 4, 200){ways})\nrun.leave_out(through)\n"
        "read = None"
    )
    script.body.insert(0, "if read is None:\n    read = iter(through)\n(row,) = next(read)")
    _learn(script, "row")
    if not generator:
        script.may_warn = r"\b(through|read)\b"
    script.traits.append(f"a loader with {workers} workers{', a generator' if generator else ''}")
    return True


def _loader_by_step(script: Script, draw: random.Random) -> bool:
    """A DataLoader that shuffles anew in each step."""
    if "elastic" in " ".join(script.traits):
        return False
    workers = draw.choice((0, 1))
    script.imports.append("from torch.utils.data import DataLoader, TensorDataset")
    script.classes.append("rows = TensorDataset(torch.sin(torch.arange(1600.0)).view(200, 8))")
    script.before.append(f"shuffled = DataLoader(rows, batch_size=4, shuffle=True, num_workers={workers})")
    script.body.insert(0, "chosen_row = next(iter(shuffled))[0]")
    _learn(script, "chosen_row")
    script.traits.append(f"shuffled in each step, {workers} workers")
    return True


def _dtype(script: Script, draw: random.Random) -> bool:
    """A buffer, and an object's counter, whose dtype changes in the first step."""
    if _is_compiled(script) or script.parallel not in SIMPLE or "AveragedModel" in script.traits or draw.random() < 0.5:
        script.classes.append(
            """class Seen:
    def __init__(self):
        self.count = torch.zeros(1, dtype=torch.uint8)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"].clone()"""
        )
        _hand(script, "seen", "Seen()")
        script.body.append("seen.count = seen.count + torch.tensor([100])")
        script.refusable.append(r"seen")
        return True
    _extend(
        script,
        'self.register_buffer("mean", torch.zeros(8))',
        "if self.training:\n    self.mean = 0.9 * self.mean + 0.1 * x.double().mean(0).detach()\n"
        "return super().forward(x - self.mean.float())",
    )
    _wrap(script, "broadcast_buffers=False")
    script.refusable.append(r"mean")
    return True


def _low_precision(script: Script, draw: random.Random) -> bool:
    """A part of the model in another precision, from its start."""
    if script.parallel not in SIMPLE or _is_compiled(script) or "clipping" in script.traits or _is_fused(script):
        return False
    _extend(
        script,
        "self.small = nn.Linear(8, 8).to(torch.bfloat16)\n"
        "self.register_buffer('exact', torch.ones(8, dtype=torch.float64))",
        "return super().forward(x + self.small(x.to(torch.bfloat16)).float() * self.exact.float())",
    )
    return True


def _added_group(script: Script, draw: random.Random) -> bool:
    """`add_param_group` in a step."""
    at = next(
        (i for i, each in enumerate(script.build) if re.match(r"optimizer = .*\(model\.parameters\(\)", each)), None
    )
    if at is None or "schedule" in script.handed or script.parallel not in SIMPLE:
        return False
    script.build[at] = script.build[at].replace("model.parameters()", "list(model.parameters())[2:]")
    step = draw.randrange(2, 8)
    # else gradients of parameters that no optimizer has add up, in no snapshot
    adds = "optimizer.add_param_group({'params': list(model.parameters())[:2], 'lr': 1e-3})"
    script.body.insert(0, f"model.zero_grad()\nif step == {step}:\n    {adds}")
    script.traits.append(f"a group in step {step}")
    return True


def _expanded(script: Script, draw: random.Random) -> bool:
    """Buffers that are expanded views."""
    if script.parallel not in SIMPLE or "AveragedModel" in script.traits:  # torch's own cannot average them
        return False
    _extend(
        script,
        'self.register_buffer("spread", torch.ones(1).expand(8))\n'
        'self.register_buffer("mask", torch.tril(torch.ones(8, 8)).expand(4, 8, 8))',
        "return super().forward(x * self.spread * self.mask[0, -1])",
    )
    _wrap(script, "broadcast_buffers=False")
    return True


def _strided(script: Script, draw: random.Random) -> bool:
    """A weight that is not contiguous."""
    if script.parallel not in SIMPLE or _is_compiled(script) or _is_fused(script):
        return False
    _extend(script, "self.turned = nn.Linear(8, 8)", "return super().forward(self.turned(x))")
    _build(script, "model.turned.weight.data = model.turned.weight.data.t().contiguous().t()")
    return True


def _sparse(script: Script, draw: random.Random) -> bool:
    """An embedding with sparse gradients."""
    plain = [i for i, each in enumerate(script.build) if re.match(r"optimizer = .*\(model\.parameters\(\)", each)]
    body = "\n".join(script.body)
    if script.parallel not in SIMPLE or not plain or "scaler" in body or "clip_grad" in body or _is_compiled(script):
        return False
    if "an optimizer's step every other step" in script.traits or "average" in script.handed:
        return False
    _extend(
        script,
        "self.table = nn.Embedding(50, 8, sparse=True)",
        "return super().forward(x + self.table((x.sum(1).abs() * 10).long() % 50))",
    )
    rest = "[value for name, value in model.named_parameters() if name != 'table.weight']"
    script.build[plain[0]] = script.build[plain[0]].replace("model.parameters()", rest)
    script.build.append("sparse_optimizer = torch.optim.SparseAdam([model.table.weight])")
    _hand(script, "sparse_optimizer")
    at = next(i for i, each in enumerate(script.body) if each == "optimizer.step()")
    script.body.insert(at, "sparse_optimizer.step()")
    script.body.insert(0, "sparse_optimizer.zero_grad()")
    return True


def _disabled_scaler(script: Script, draw: random.Random) -> bool:
    """`GradScaler(enabled=False)`, as scripts have it that may run in bfloat16."""
    if "scaler" in script.handed:
        script.build = [re.sub(r"init_scale=.*\)", "enabled=False)", each) for each in script.build]
        return True
    script.build.append('scaler = torch.amp.GradScaler("cpu", enabled=False)')
    _hand(script, "scaler")
    script.body = [each.replace("loss.backward()", "scaler.scale(loss).backward()") for each in script.body]
    script.body = [re.sub(r"^(\w*optimizer)\.step\(\)$", r"scaler.step(\1)", each) for each in script.body]
    script.body.append("scaler.update()")
    return True


def _kinds_of_values(script: Script, draw: random.Random) -> bool:
    """A state of named tuples, default dicts and sizes, used as such after it is loaded."""
    script.imports.append("from collections import OrderedDict, defaultdict, deque, namedtuple")
    script.classes.append(
        """Moments = namedtuple("Moments", "mean var")


class Watched:
    def __init__(self):
        self.moments, self.counts = Moments(0.0, torch.ones(2)), defaultdict(int)
        self.size, self.ordered = torch.Size([2, 3]), OrderedDict(first=1)

    def see(self, loss):
        self.moments = self.moments._replace(mean=0.5 * self.moments.mean + loss, var=self.moments.var * 0.9)
        self.counts[int(loss * 10)] += 1
        assert self.size.numel() == 6
        self.ordered.move_to_end("first")

    def state_dict(self):
        return {"moments": self.moments, "counts": self.counts, "size": self.size, "ordered": self.ordered}

    def load_state_dict(self, state):
        self.moments, self.counts = state["moments"], state["counts"]
        self.size, self.ordered = state["size"], state["ordered"]"""
    )
    _hand(script, "watched", "Watched()")
    script.body.append("watched.see(float(mean))")
    script.refusable.append(r"watched")
    return True


def _epochs(script: Script, draw: random.Random) -> bool:
    """Two loops: epochs, and the steps of each."""
    if script.loop != "for step in run.steps(STEPS):" or "early stop" in script.traits:
        return False
    if draw.random() < 0.3:  # as many a script has it; it would make the steps of one epoch alone
        script.loop = "for epoch in range(3):\n        for step in run.steps(4):"
        script.refused = r"steps"
    else:
        script.loop = "for epoch in range(3):\n        for step in run.steps(4 * epoch + 4):"
    script.is_nested = True
    return True


def _late_parameter(script: Script, draw: random.Random) -> bool:
    """A parameter that is made in the second step."""
    if script.parallel != "alone" or "schedule" in script.handed or "optimizer" not in script.handed:
        return False
    if _is_compiled(script):
        return False
    _extend(
        script,
        "self.extra = None",
        "y = super().forward(x)\nreturn y if self.extra is None else y + self.extra",
    )
    script.body.insert(
        0,
        "if step == 2:\n    model.extra = nn.Parameter(torch.ones(1))\n"
        "    optimizer.add_param_group({'params': [model.extra]})",
    )
    script.refusable.append(r"extra")
    return True


KINDS: dict[str, Callable[[Script, random.Random], bool]] = {
    "unfreezes": _unfreezes,
    "late state": _late,
    "experts": _experts,
    "growing buffer": _growing_buffer,
    "growing object": _growing_object,
    "swapped average": _swapped_average,
    "comm hook": _comm_hook,
    "own loader": _own_loader,
    "loader by step": _loader_by_step,
    "dtype": _dtype,
    "low precision": _low_precision,
    "added group": _added_group,
    "expanded": _expanded,
    "strided": _strided,
    "sparse": _sparse,
    "disabled scaler": _disabled_scaler,
    "kinds of values": _kinds_of_values,
    "epochs": _epochs,
    "late parameter": _late_parameter,
}
