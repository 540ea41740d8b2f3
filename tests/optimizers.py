"""Optimizers like those of other projects, with every kind of state."""

from typing import Any

import schedulefree
import torch
from torch.optim import Optimizer

from plugsft import hookimpl, plugin, state


@plugin()
class Keeper:
    """Keeps what an optimizer has outside of the states of its weights."""

    made: Any = state()

    @hookimpl
    def optimizer(self):
        return self.made

    @hookimpl
    def state_dict(self):
        return self.made.kept()

    @hookimpl
    def load_state_dict(self, state):
        self.made.put_back(state)


class KeepsGroups:
    """Hands out values of its parameter groups."""

    counters = ()

    def kept(self):
        groups = [{key: group[key] for key in self.counters} for group in self.param_groups]
        return {"groups": groups}

    def put_back(self, kept):
        for group, values in zip(self.param_groups, kept["groups"], strict=True):
            group.update(values)


class RealScheduleFree(KeepsGroups, schedulefree.AdamWScheduleFree):
    """The published schedule-free AdamW."""

    counters = ("k", "weight_sum", "lr_max", "scheduled_lr", "train_mode")


class ScheduleFree(KeepsGroups, Optimizer):
    """Averages the weights; its counters and sums are values of the parameter groups."""

    counters = ("k", "weight_sum", "lr_max")
    elementwise = True  # with one group

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), warmup=2):
        counters = {"k": 0, "weight_sum": 0.0, "lr_max": -1.0, "train_mode": True, "note": None}
        super().__init__(params, {"lr": lr, "betas": betas, "warmup": warmup, **counters})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            lr = group["lr"] * min(1.0, group["k"] / group["warmup"])
            group["lr_max"] = max(lr, group["lr_max"])
            group["weight_sum"] += group["lr_max"] ** 2
            share = group["lr_max"] ** 2 / group["weight_sum"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["z"], state["exp_avg_sq"] = parameter.clone(), torch.zeros_like(parameter)
                beta = group["betas"][1]
                state["exp_avg_sq"].mul_(beta).addcmul_(
                    parameter.grad, parameter.grad, value=1 - beta
                )
                update = parameter.grad / (state["exp_avg_sq"].sqrt() + 1e-8)
                parameter.lerp_(state["z"], share)
                state["z"].sub_(update, alpha=lr)
                parameter.sub_(update, alpha=lr * (1 - share))


class Quantized(Optimizer):
    """Stores momentum in one byte per number, with a scale per block of eight."""

    block = 8

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                grad = (
                    parameter.grad.to_local()
                    if hasattr(parameter.grad, "to_local")
                    else parameter.grad
                )
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                if not local.numel():
                    continue
                state = self.state[parameter]
                if not state:
                    blocks = -(-local.numel() // self.block)
                    state["codes"] = torch.full([blocks, self.block], 128, dtype=torch.uint8)
                    state["signs"] = torch.zeros(blocks * self.block, dtype=torch.int8)
                    state["scale"] = torch.zeros(blocks)
                    state["seen"] = 0
                state["seen"] += 1
                scale = state["scale"].repeat_interleave(self.block)[: local.numel()]
                codes = state["codes"].flatten()[: local.numel()]
                momentum = (codes.float() - 128) / 127 * scale
                momentum = momentum * 0.9 + grad.flatten()
                padded = torch.zeros(len(state["scale"]) * self.block)
                padded[: local.numel()] = momentum
                state["scale"] = padded.view(-1, self.block).abs().amax(1) + 1e-12
                scale = state["scale"].repeat_interleave(self.block)[: local.numel()]
                padded[: local.numel()] = momentum / scale
                state["codes"] = (padded * 127 + 128).round().to(torch.uint8).view(-1, self.block)
                state["signs"] -= padded.sign().to(torch.int8)
                local.sub_(momentum.view(local.shape), alpha=group["lr"])


class Masters(Optimizer):
    """Updates float32 copies of bfloat16 weights."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["master"] = parameter.float()
                    state["compensation"] = torch.zeros_like(parameter)
                state["master"].sub_(parameter.grad.float(), alpha=group["lr"])
                state["compensation"].add_(parameter.grad)
                parameter.copy_(state["master"])


class Odd(KeepsGroups, Optimizer):
    """Has values of every kind in its state, its groups and itself."""

    counters = ("factors", "history", "on", "seen", "share")

    def __init__(self, params, lr=1e-3, rate=0.5):
        added = {"factors": torch.tensor([1.0, 0.5, 0.25]), "history": [], "on": False}
        added |= {"seen": {"dict": 0}, "share": 0.1, "dtype": [torch.float32]}
        super().__init__(params, {"lr": lr, "rate": rate, "schedule": (1, 2.5, None), **added})
        self.total, self.last = 0, None

    @torch.no_grad()
    def step(self, closure=None):
        self.total += 1
        self.last = f"step {self.total} after {self.last}"
        self.state["steps"] = self.state.get("steps", 0) + 1
        for group in self.param_groups:
            group["factors"] *= 0.9
            group["history"] = [*group["history"], float(group["lr"])]
            group["on"] = not group["on"]
            group["seen"] = {"dict": group["seen"]["dict"] + 1}
            group["share"] *= 0.9
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    rows = parameter.new_zeros([parameter.shape[0], 1][: parameter.dim()])
                    state["nested"] = {"rows": [rows, None], "count": torch.tensor(0)}
                    state["flags"], state["worst"] = [True, "text"], float("-inf")
                    state["mask"] = torch.zeros_like(parameter, dtype=torch.bool)
                    plain = parameter.dim() == 2 and not hasattr(parameter, "to_local")
                    state["twisted"] = torch.zeros_like(parameter).t() if plain else None
                rows = state["nested"]["rows"][0]
                rows += (
                    parameter.grad.mean(1, keepdim=True) if parameter.dim() == 2 else parameter.grad
                )
                state["nested"]["count"] += 1
                state["mask"] |= parameter.grad > 0
                if state["twisted"] is not None:
                    state["twisted"] += parameter.grad.t()
                scale = float(group["factors"].sum()) * len(group["history"]) * self.total
                scale *= group["seen"]["dict"] * group["share"]
                step = parameter.grad * scale + rows * self.state["steps"] + state["mask"].float()
                parameter.sub_(step, alpha=group["lr"] * (2 if group["on"] else 1))

    def kept(self):
        own = {"total": self.total, "last": self.last, "steps": self.state["steps"]}
        return super().kept() | own

    def put_back(self, kept):
        for group, values in zip(self.param_groups, kept["groups"], strict=True):
            values["factors"] = group["factors"].copy_(values["factors"])  # the groups share it
        super().put_back(kept)
        self.total, self.last = kept["total"], kept["last"]
        self.state["steps"] = kept["steps"]


class Combined(Optimizer):
    """Calls Muon for matrices and AdamW for the rest; they have one state."""

    def __init__(self, model):
        params = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.inner = [
            torch.optim.Muon([parameter for parameter in params if parameter.dim() == 2], lr=1e-3),
            torch.optim.AdamW([parameter for parameter in params if parameter.dim() != 2], lr=1e-3),
        ]
        super().__init__([group for inner in self.inner for group in inner.param_groups], {})
        for inner in self.inner:
            inner.state = self.state

    def step(self, closure=None):
        for inner in self.inner:
            inner.step()


def own_groups(model):
    """Return two parameter groups with different settings."""
    params = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in params if parameter.dim() > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [parameter for parameter in params if parameter.dim() < 2]},
    ]


def make_torch_optimizer(name, **options):
    """Return a factory of one of torch's optimizers."""
    return lambda model: getattr(torch.optim, name)(own_groups(model), lr=1e-3, **options)


def make_muon(model):
    """Return torch's Muon, which takes only matrices."""
    return torch.optim.Muon([p for p in model.parameters() if p.requires_grad], lr=1e-3)


TORCH = {
    "AdamW": make_torch_optimizer("AdamW"),
    "AdamW fused": make_torch_optimizer("AdamW", fused=True),
    "AdamW amsgrad": make_torch_optimizer("AdamW", amsgrad=True),
    "AdamW foreach": make_torch_optimizer("AdamW", foreach=True),
    "SGD": make_torch_optimizer("SGD", momentum=0.9, nesterov=True),
    "Adagrad": make_torch_optimizer("Adagrad"),
    "NAdam": make_torch_optimizer("NAdam"),
    "RAdam": make_torch_optimizer("RAdam"),
    "ASGD": make_torch_optimizer("ASGD", t0=2),
    "Adadelta": make_torch_optimizer("Adadelta"),
    "Adamax": make_torch_optimizer("Adamax"),
    "RMSprop": make_torch_optimizer("RMSprop", centered=True, momentum=0.5),
    "Rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=1e-3),
    "Adafactor": make_torch_optimizer("Adafactor"),
    "Muon": make_muon,
}
OWN = {
    "ScheduleFree": lambda model: ScheduleFree(own_groups(model)),
    "One group": lambda model: ScheduleFree(model.parameters()),
    "Quantized": lambda model: Quantized(own_groups(model)),
    "Masters": lambda model: Masters(own_groups(model)),
    "Combined": Combined,
    "Odd": lambda model: Odd(own_groups(model)),
}
ALL = TORCH | OWN
