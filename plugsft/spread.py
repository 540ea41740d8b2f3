"""A model over its ranks, by DDP, FSDP2 or ZeRO-3: spread, saved and restored by what each holds.

Nobody asks elsewhere which of them it is: to the loop they are all one model and one optimizer.
"""

import copy
import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, fsdp2_prepare_model
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from .agree import agreed
from .errors import PluginError
from .models import Load
from .parts import Part, Stored, local_part, part_of

WEIGHTS, STATES = "model", "optimizer"


def is_sharded(accelerator: Accelerator) -> bool:
    """Tell whether no rank is to hold the whole model."""
    return accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)


def casts(accelerator: Accelerator) -> bool:
    """Tell whether weights are loaded in bfloat16, beside which DeepSpeed stores float32 ones."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return False
    return bool(accelerator.mixed_precision == "bf16")


def spread(
    accelerator: Accelerator, load: Load, model: Module, make: Callable[[Module], Optimizer]
) -> tuple[Module, Optimizer]:
    """Shard or copy a model over the ranks; make the optimizer of the weights of this one."""
    names = load.names_in(model)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        _hand_out(model, accelerator, names, load)
        engine, zero = accelerator.prepare(model, _checked(model, make(model)))
        if casts(accelerator):
            _fill_float32(model, names, load)
        return engine, zero
    if accelerator.is_fsdp2:
        fsdp2_prepare_model(accelerator, model)
        if names:
            _fetch(model, accelerator, names, load)
        return model, _checked(model, make(model))
    model = accelerator.prepare_model(model)
    plain = accelerator.unwrap_model(model)
    return model, _checked(plain, make(plain))


def _checked(model: Module, optimizer: Optimizer) -> Optimizer:
    """Refuse an optimizer that would not update every trainable weight, and nothing else."""
    updated = [one for group in optimizer.param_groups for one in group["params"]]
    trained = {one: name for name, one in model.named_parameters() if one.requires_grad}
    known = {*updated}
    if left := [name for one, name in trained.items() if one not in known]:
        raise PluginError(
            f"the plugin that makes the optimizer leaves out {len(left)} trainable weights "
            f"({left[0]} first); give them to a parameter group, or freeze them in optimize_model "
            "(requires_grad_(False))"
        )
    if foreign := [one for one in updated if one not in trained]:
        raise PluginError(
            f"the plugin that makes the optimizer gives it {len(foreign)} tensors that are no "
            f"trainable weights of the model (of shape {list(foreign[0].shape)} first), which no "
            "checkpoint would hold; take them out of its parameter groups"
        )
    return optimizer


def spread_frozen(accelerator: Accelerator, load: Load, model: Any) -> Module:
    """Spread a model that is never trained, as the one that is."""
    names = load.names_in(model)
    model.requires_grad_(False).eval()
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        _hand_out(model, accelerator, names, load)
        deepspeed: Any = importlib.import_module("deepspeed")
        config = copy.deepcopy(accelerator.state.deepspeed_plugin.deepspeed_config)
        engine: Module = deepspeed.initialize(model=model, config=config)[0]
        return engine
    if accelerator.is_fsdp2:
        fsdp2_prepare_model(accelerator, model)
        if names:
            _fetch(model, accelerator, names, load)
        return model  # type: ignore[no-any-return]
    return accelerator.prepare_model(model, evaluation_mode=True)  # type: ignore[no-any-return]


def _fetch(model: Any, accelerator: Accelerator, names: dict[str, str], load: Load) -> None:
    """Give a model that has no weights yet its own rows of each, from the files."""
    present = {name: one.detach() for name, one in _tensors(model).items() if not one.is_meta}
    model.to_empty(device=accelerator.device)
    model.tie_weights()
    tensors = _tensors(model)
    with torch.no_grad(), load.weights() as weights:
        for name, tensor in present.items():
            tensors[name].copy_(tensor)
        for name, stored in names.items():
            part = part_of(tensors[name])
            row = tensors[name][:1].numel()
            start, stop = part.start // row, (part.start + part.values.numel()) // row
            part.values.copy_(weights.rows(stored, start, stop).reshape(-1))
    parts = {stored: part_of(tensors[name]) for name, stored in names.items()}
    with agreed(accelerator, "comparing the model with its files"):
        load.ensure_same(parts, accelerator.process_index)


def _hand_out(model: Module, accelerator: Accelerator, names: dict[str, str], load: Load) -> None:
    """Read each tensor on one rank, and let DeepSpeed give every other its stretch of it."""
    if not names:
        return
    deepspeed: Any = importlib.import_module("deepspeed")
    tensors = dict(model.named_parameters())
    with torch.no_grad(), load.weights() as weights:
        for name, stored in names.items():
            one: Any = tensors[name]
            with deepspeed.zero.GatheredParameters([one], modifier_rank=0):
                if accelerator.is_main_process:
                    one.copy_(weights.rows(stored, 0, one.ds_shape[0]))
    parts = {stored: local_part(tensors[name]) for name, stored in names.items()}
    with agreed(accelerator, "comparing the model with its files"):
        load.ensure_same(parts, accelerator.process_index)


def _fill_float32(model: Module, names: dict[str, str], load: Load) -> None:
    """Copy float32 files into DeepSpeed's float32 weights, which it made of rounded ones."""
    access: Any = importlib.import_module("deepspeed").utils
    tensors: dict[str, Any] = {
        name: one for name, one in model.named_parameters() if name in names and one.requires_grad
    }
    if not tensors:
        return
    with torch.no_grad(), load.weights() as weights:
        for name, one in tensors.items():
            part, row = local_part(one), math.prod(one.ds_shape[1:])
            if not part.values.numel():
                continue
            first, stop = part.start // row, part.start + part.values.numel()
            rows = weights.rows(names[name], first, -(-stop // row))
            if rows.dtype == torch.float32:
                values = torch.zeros_like(one.ds_tensor, dtype=torch.float32)
                mine = rows.reshape(-1)[part.start - first * row : stop - first * row]
                values.view(-1)[: len(mine)].copy_(mine)
                access.safe_set_local_fp32_param(one, values)


def _tensors(model: Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class Held:
    """What this rank holds of a model and its optimizer: whole tensors, or under FSDP2 rows."""

    def __init__(self, accelerator: Accelerator, model: Module, optimizer: Any) -> None:
        self.rank, self.optimizer = accelerator.process_index, optimizer
        self._wrapped, self.plain = model, accelerator.unwrap_model(model)

    def parameters(self, trained: bool = True) -> dict[str, Any]:
        """Return the parameters, or those that are trained, by their names in the plain model."""
        for module in self._wrapped.modules():
            if isinstance(module, FSDPModule):
                # After an evaluation the last ones stand whole, which the optimizer never sees.
                module.reshard()
        named = self.plain.named_parameters()
        return {name: one for name, one in named if one.requires_grad or not trained}

    def parts(self) -> dict[str, Part]:
        """Return the parts of all that is trained, and of the optimizer's state."""
        found = {}
        for name, one in self.parameters().items():
            found[f"{WEIGHTS}/{name}"] = self.part(one)
            for key, part in self.states(one).items():
                found[f"{STATES}/{name}/{key}"] = part
        return found

    def restore(self, stored: Stored) -> None:
        """Bring model and optimizer to where a checkpoint left them."""
        named = self.parameters()
        ensure_same(stored, named)
        keys: dict[str, list[str]] = {name: [] for name in named}
        for there in sorted(stored.of(STATES)):
            name, _, key = there.rpartition("/")
            keys[name].append(key)
        with torch.no_grad():
            self.fill(stored, named, keys)

    def part(self, one: Any) -> Part:
        """Return what this rank holds of a parameter."""
        return part_of(one)

    def states(self, one: Any) -> dict[str, Part]:
        """Return what it holds of the optimizer's state for a parameter."""
        states = self.optimizer.state[one].items()
        return {key: part_of(torch.as_tensor(value)) for key, value in states}

    def whole(self, one: Any) -> Tensor:
        """Return all of a parameter; all ranks ask for it together."""
        return one.full_tensor() if isinstance(one, DTensor) else one.detach()

    def fill(self, stored: Stored, named: dict[str, Any], keys: dict[str, list[str]]) -> None:
        """Read the parameters, and their states of such names."""
        fill_weights(stored, named)
        names = {id(one): name for name, one in named.items()}
        states: dict[int, dict[str, Tensor]] = {}
        for group in self.optimizer.param_groups:
            for one in group["params"]:
                name = names[id(one)]
                states[len(states)] = {
                    key: _state(stored, f"{STATES}/{name}/{key}", one) for key in keys[name]
                }
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": states, "param_groups": groups})


def ensure_same(stored: Stored, named: dict[str, Any]) -> None:
    """Refuse a checkpoint in which other parameters were trained."""
    if differing := {*named} ^ stored.of(WEIGHTS):
        raise stored.strange(min(differing))


def fill_weights(stored: Stored, named: dict[str, Any]) -> None:
    """Read parameters, of which this process holds all, or under FSDP2 its rows."""
    for name, one in named.items():
        stored.fill(f"{WEIGHTS}/{name}", part_of(one))


def _state(stored: Stored, name: str, like: Tensor) -> Tensor:
    """Read a state: it has the shape of its parameter, or counts something."""
    shape = stored.shapes[name]
    alike = shape == tuple(like.shape)
    value = torch.empty_like(like, requires_grad=False) if alike else torch.empty(shape)
    stored.fill(name, part_of(value))
    return value


class HeldByZero(Held):
    """DeepSpeed keeps of each tensor an equal stretch, the last one padded, in float32.

    The forward reads other copies, in the type of the weights, of which small ones stand whole.
    """

    def __init__(self, accelerator: Accelerator, model: Module, optimizer: Any) -> None:
        super().__init__(accelerator, model, optimizer)
        self._zero = optimizer.optimizer
        self._deepspeed: Any = importlib.import_module("deepspeed")
        self._access = self._deepspeed.utils

    def part(self, one: Any) -> Part:
        """Return what this rank holds of a parameter."""
        trained = one.requires_grad
        return self._mine(
            one, self._access.safe_get_local_fp32_param(one) if trained else one.ds_tensor
        )

    def states(self, one: Any) -> dict[str, Part]:
        """Return what it holds of the optimizer's state for a parameter."""
        # DeepSpeed joins many parameters to one, and steps them together.
        joined: dict[str, Tensor] = next(iter(self._zero.optimizer.state.values()), {})
        read = self._access.safe_get_local_optimizer_state
        return {
            key: self._mine(one, read(one, key)) if value.dim() else part_of(value)
            for key, value in joined.items()
        }

    def whole(self, one: Any) -> Tensor:
        """Return all of a parameter; all ranks ask for it together."""
        if one.requires_grad:
            return self._access.safe_get_full_fp32_param(one)  # type: ignore[no-any-return]
        with self._deepspeed.zero.GatheredParameters([one]):
            return one.detach().clone()  # type: ignore[no-any-return]

    def fill(self, stored: Stored, named: dict[str, Any], keys: dict[str, list[str]]) -> None:
        """Read the parameters, and their states of such names."""
        first = next(iter(named))
        counts = {key for key in keys[first] if not stored.shapes[f"{STATES}/{first}/{key}"]}
        for joined in self._zero.fp32_partitioned_groups_flat:
            self._zero.optimizer.state[joined] = {
                key: _state(stored, f"{STATES}/{first}/{key}", joined).to(joined.device)
                if key in counts
                else torch.zeros_like(joined)
                for key in keys[first]
            }
        for name, one in named.items():
            held = torch.zeros_like(one.ds_tensor, dtype=torch.float32)
            stored.fill(f"{WEIGHTS}/{name}", self._mine(one, held))
            self._access.safe_set_local_fp32_param(one, held)
            for key in {*keys[name]} - counts:
                stored.fill(f"{STATES}/{name}/{key}", self._mine(one, held))
                self._access.safe_set_local_optimizer_state(one, held, key)
            with self._deepspeed.zero.GatheredParameters([one], modifier_rank=0):
                if self.rank == 0:
                    stored.fill(f"{WEIGHTS}/{name}", part_of(one.data))

    def _mine(self, one: Any, values: Tensor) -> Part:
        start = self.rank * one.ds_tensor.ds_numel
        here = max(0, min(values.numel(), one.ds_numel - start))
        return Part(values[:here], start, tuple(one.ds_shape))


def held_by(accelerator: Accelerator, model: Module, optimizer: Any) -> Held:
    """Return what this rank holds."""
    zero = accelerator.distributed_type == DistributedType.DEEPSPEED
    return (HeldByZero if zero else Held)(accelerator, model, optimizer)
