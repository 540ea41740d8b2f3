"""Optimizers as other projects write them, with state of every kind."""

import torch
from torch.optim import Optimizer


class ScheduleFree(Optimizer):
    """Averages the weights itself: its counters and sums are values of the parameter groups."""

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
            for one in group["params"]:
                if one.grad is None:
                    continue
                state = self.state[one]
                if not state:
                    state["z"], state["exp_avg_sq"] = one.clone(), torch.zeros_like(one)
                beta = group["betas"][1]
                state["exp_avg_sq"].mul_(beta).addcmul_(one.grad, one.grad, value=1 - beta)
                update = one.grad / (state["exp_avg_sq"].sqrt() + 1e-8)
                one.lerp_(state["z"], share)
                state["z"].sub_(update, alpha=lr)
                one.sub_(update, alpha=lr * (1 - share))


class Quantized(Optimizer):
    """Has its momentum as one byte a number, with a scale for each block of eight."""

    block = 8

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                grad = one.grad.to_local() if hasattr(one.grad, "to_local") else one.grad
                local = one.to_local() if hasattr(one, "to_local") else one
                if not local.numel():
                    continue
                state = self.state[one]
                if not state:
                    blocks = -(-local.numel() // self.block)
                    state["codes"] = torch.full(local.shape, 128, dtype=torch.uint8)
                    state["scale"] = torch.zeros(blocks)
                    state["seen"] = 0
                state["seen"] += 1
                scale = state["scale"].repeat_interleave(self.block)[: local.numel()]
                momentum = (state["codes"].flatten().float() - 128) / 127 * scale
                momentum = momentum * 0.9 + grad.flatten()
                padded = torch.zeros(len(state["scale"]) * self.block)
                padded[: local.numel()] = momentum
                state["scale"] = padded.view(-1, self.block).abs().amax(1) + 1e-12
                scale = state["scale"].repeat_interleave(self.block)[: local.numel()]
                codes = (momentum / scale * 127 + 128).round().to(torch.uint8)
                state["codes"] = codes.view(local.shape)
                local.sub_(momentum.view(local.shape), alpha=group["lr"])


class Masters(Optimizer):
    """Updates float32 masters of bfloat16 weights."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                state = self.state[one]
                if not state:
                    state["master"] = one.float()
                    state["compensation"] = torch.zeros_like(one)
                state["master"].sub_(one.grad.float(), alpha=group["lr"])
                state["compensation"].add_(one.grad)
                one.copy_(state["master"])


class Odd(Optimizer):
    """Has values of every kind, in every place."""

    def __init__(self, params, lr=1e-3, rate=0.5):
        added = {"factors": torch.tensor([1.0, 0.5, 0.25]), "history": [], "on": False}
        super().__init__(params, {"lr": lr, "rate": rate, "schedule": (1, 2.5, None), **added})
        self.total = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.total += 1
        self.state["steps"] = self.state.get("steps", 0) + 1
        for group in self.param_groups:
            group["factors"] *= 0.9
            group["history"].append(float(group["lr"]))
            group["on"] = not group["on"]
            for one in group["params"]:
                if one.grad is None:
                    continue
                state = self.state[one]
                if not state:
                    rows = one.new_zeros([one.shape[0], 1][: one.dim()])
                    state["nested"] = {"rows": [rows, None], "count": torch.tensor(0)}
                    state["flags"], state["worst"] = (True, "text"), float("-inf")
                    state["mask"] = torch.zeros_like(one, dtype=torch.bool)
                    plain = one.dim() == 2 and not hasattr(one, "to_local")
                    state["twisted"] = torch.zeros_like(one).t() if plain else None
                rows = state["nested"]["rows"][0]
                rows += one.grad.mean(1, keepdim=True) if one.dim() == 2 else one.grad
                state["nested"]["count"] += 1
                state["mask"] |= one.grad > 0
                if state["twisted"] is not None:
                    state["twisted"] += one.grad.t()
                scale = float(group["factors"].sum()) * len(group["history"]) * self.total
                step = one.grad * scale + rows * self.state["steps"] + state["mask"].float()
                one.sub_(step, alpha=group["lr"] * (2 if group["on"] else 1))

    def state_dict(self):
        """Add what no group and no parameter has."""
        return super().state_dict() | {"total": self.total}

    def load_state_dict(self, state_dict):
        """Take it back."""
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "total"})
        self.total = state_dict["total"]


def own_groups(model):
    """Give two groups with settings of their own."""
    params = [one for one in model.parameters() if one.requires_grad]
    matrices = [one for one in params if one.dim() > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2]},
    ]


def of_torch(name, **options):
    """Make one of torch's own."""
    return lambda model: getattr(torch.optim, name)(own_groups(model), lr=1e-3, **options)


def muon(model):
    """Muon is for matrices alone."""
    return torch.optim.Muon([p for p in model.parameters() if p.requires_grad], lr=1e-3)


TORCH = {
    "AdamW": of_torch("AdamW"),
    "AdamW fused": of_torch("AdamW", fused=True),
    "AdamW amsgrad": of_torch("AdamW", amsgrad=True),
    "AdamW foreach": of_torch("AdamW", foreach=True),
    "SGD": of_torch("SGD", momentum=0.9, nesterov=True),
    "Adagrad": of_torch("Adagrad"),
    "NAdam": of_torch("NAdam"),
    "RAdam": of_torch("RAdam"),
    "ASGD": of_torch("ASGD", t0=2),
    "Adadelta": of_torch("Adadelta"),
    "Adamax": of_torch("Adamax"),
    "RMSprop": of_torch("RMSprop", centered=True, momentum=0.5),
    "Rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=1e-3),
    "Adafactor": of_torch("Adafactor"),
    "Muon": muon,
}
OWN = {
    "ScheduleFree": lambda model: ScheduleFree(own_groups(model)),
    "Quantized": lambda model: Quantized(own_groups(model)),
    "Masters": lambda model: Masters(own_groups(model)),
    "Odd": lambda model: Odd(own_groups(model)),
}
ALL = TORCH | OWN
