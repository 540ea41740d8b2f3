"""The launcher of this process, found in its environment: its settings, the signal of its death.

A launcher's file may set what the recipe sets, too. `allowed_settings` lists what it may say, as
variables, in accelerate's file or in DeepSpeed's. Nothing here imports torch.
"""

import os
import signal
from collections.abc import Mapping
from typing import Any

from ..base.errors import LaunchError
from ..base.machine import Machine
from ..recipe.capabilities import Capability
from ..recipe.tables import Recipe

ACCELERATE_TYPES = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}
"""`model.dtype` -> accelerate's name for it."""
VARIABLES = {
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "dynamo_backend": "ACCELERATE_DYNAMO_BACKEND",
    "use_parallelism_config": "ACCELERATE_USE_PARALLELISM_CONFIG",
    "use_megatron_lm": "ACCELERATE_USE_MEGATRON_LM",
    "use_sagemaker": "ACCELERATE_USE_SAGEMAKER",
    "torch_device": "ACCELERATE_TORCH_DEVICE",
    "fsdp_version": "FSDP_VERSION",
    "fsdp_activation_checkpointing": "FSDP_ACTIVATION_CHECKPOINTING",
}
"""Setting, as accelerate's file names it -> the variable by which ranks get it."""

LAUNCHER_ENDED = signal.SIGUSR2
"""What the system sends to a rank when its launcher ends; without a handler, it ends the rank."""


def started_too_few() -> bool:
    """Whether `accelerate launch` was asked for several processes and started one.

    It does so, without a message, on a machine without GPU. Its environment then has the address
    of a main process, but no number of ranks.
    """
    return by_accelerate() and "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ


def by_accelerate() -> bool:
    """Whether `accelerate launch` started this process, alone.

    It always sets this variable. The precision's is no sign: people export that one themselves.
    """
    return "ACCELERATE_DYNAMO_BACKEND" in os.environ


def ensure_environment(recipe: Recipe) -> None:
    """Refuse variables, of a launcher or of the user, that contradict the recipe."""
    settings = {name: os.environ.get(variable) for name, variable in VARIABLES.items()}
    ensure_settings(settings, recipe, "the launcher's file or the environment")


def without_fsdp2(recipe: Recipe, machine: Machine) -> str:
    """Say what of a recipe needs FSDP2, where the launch is another; `check` need not know it."""
    if machine.strategy == "fsdp2" or not recipe.train.keep_whole_gradients:
        return ""
    return (
        "train.keep_whole_gradients is for FSDP2, and this launch is another: `plugsft launch "
        "RECIPE --strategy fsdp2`, or remove the key"
    )


def ensure_settings(settings: Mapping[str, Any], recipe: Recipe, where: str) -> None:
    """Refuse settings of a launch that contradict the recipe, all at once."""
    wrong = []
    for name, (decides, *allowed) in allowed_settings(recipe).items():
        given = settings.get(name)
        # Of an empty device, torch makes an error.
        is_unset = given is None or (given == "" and allowed)
        if not is_unset and str(given).lower() not in allowed:
            variable = VARIABLES.get(name, "DeepSpeed")
            cure = f"set it to '{allowed[0]}'" if allowed else "unset it"
            wrong.append(f"{name} = {given} ({variable}), which {decides} decides: {cure}")
    if wrong:
        raise LaunchError(f"{where} sets {'; and '.join(wrong)}")


def allowed_settings(recipe: Recipe) -> dict[str, tuple[str, ...]]:
    """List settings of launches: what decides them instead, and the values that agree with it."""
    dtype, train = f'model.dtype = "{recipe.model.dtype}"', recipe.train
    computes = ACCELERATE_TYPES[recipe.model.dtype]
    batches = "train.batch_size and train.micro_batch"
    strategy = "plugsft (by DDP, FSDP2 or ZeRO-3)"
    compiled, recomputed = map(Capability.bundled, ("compiled_layers", "recomputed_activations"))
    return {
        "mixed_precision": (dtype, "no", computes),
        "gradient_accumulation_steps": (batches, "1"),
        "dynamo_backend": (compiled.table, "no"),
        "use_parallelism_config": (strategy, "false"),
        "use_megatron_lm": (strategy, "false"),
        "use_sagemaker": (strategy, "false"),
        "torch_device": ("device (with CUDA_VISIBLE_DEVICES)",),
        "fsdp_version": ("plugsft (FSDP2)", "2"),
        "fsdp_activation_checkpointing": (recomputed.table, "false"),
        # DeepSpeed's own names.
        "zero_optimization.stage": ("plugsft (ZeRO-3)", "3"),
        "bf16.enabled": (dtype, str(computes == "bf16").lower()),
        "bf16.bf16_master_weights_and_grads": ("model.weights", "false"),
        "fp16.enabled": (dtype, "false"),
        "torch_autocast.enabled": (dtype, "false"),
        "data_types.grad_accum_dtype": (dtype, "fp32"),
        "communication_data_type": (dtype, "fp32"),
        "train_batch_size": (batches, "auto"),
        "train_micro_batch_size_per_gpu": (batches, str(train.micro_batch)),
        "gradient_clipping": ("train.max_grad_norm", str(train.max_grad_norm)),
    }
