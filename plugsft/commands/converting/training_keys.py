"""Arguments of transformers' trainer, which TRL and LLaMA-Factory share."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...base.errors import RecipeError, reason_of
from ...base.limits import read_json_object
from . import steps
from .conversion import By, Conversion, Copy, Named, Rule, Same, name, real, share
from .shared_rules import SHARED, SPEED


def batch(c: Conversion) -> None:
    """Write global batch and micro-batch."""
    steps.set_batch(c, "per_device_train_batch_size", "gradient_accumulation_steps", 8)


def length(c: Conversion) -> None:
    """Write epochs or steps."""
    steps.set_length(c, "num_train_epochs", "max_steps", 3)


def schedule(c: Conversion) -> None:
    """Write the schedule with its options."""
    name = str(c.get("lr_scheduler_type", "linear"))
    options = dict(c.get("lr_scheduler_kwargs", {}))
    steps.set_schedule(c, name, options, "lr_scheduler_type", "lr_scheduler_kwargs")
    if "lr_scheduler_type" in c.left and options:
        c.leave("lr_scheduler_kwargs", "options of the schedule above; use train.schedule_options")


def warmup(c: Conversion) -> None:
    """Write the warm-up: steps win over the ratio."""
    count = c.number("warmup_steps", 0)
    ratio = c.read("warmup_ratio", 0, share)
    key = "warmup_steps" if count > 0 else c.first("warmup_ratio", "warmup_steps")
    steps.set_warmup(c, count if count > 0 else ratio, key)


def optimizer(c: Conversion) -> None:
    """Write the optimizer."""
    steps.set_optimizer(c, "optim", "adamw_torch_fused")


def logging(c: Conversion) -> None:
    """Write the steps between console lines."""
    value = c.number("logging_steps", 10 if c.tool == "TRL" else 500)
    if value < 1:
        c.leave("logging_steps", "a share of the run; use train.log_every, a number of steps")
    else:
        c.set("train.log_every", int(value), "logging_steps")


def saving(c: Conversion) -> None:
    """Write the steps between checkpoints, and how many to keep."""
    strategy = str(c.get("save_strategy", "steps"))
    if strategy == "no":
        c.set("checkpoint.every", 0, "save_strategy")
    elif strategy == "steps":
        steps.set_interval(c, "checkpoint.every", c.number("save_steps", 500), "save_steps")
    elif strategy == "epoch":
        each_epoch(c, "checkpoint.every", "save_strategy")
    else:
        c.leave("save_strategy", 'use checkpoint.keep_best = "eval_loss" for the best checkpoint')
    if strategy != "no" and c.get("save_total_limit"):
        c.set("checkpoint.keep", c.whole("save_total_limit", 0), "save_total_limit")
    if c.on("load_best_model_at_end"):
        metric = str(c.get("metric_for_best_model", "loss"))
        name = metric if metric.startswith("eval_") else f"eval_{metric}"
        c.set("checkpoint.keep_best", name, "load_best_model_at_end", "metric_for_best_model")
        if c.get("greater_is_better", False):
            c.set("checkpoint.best", "highest", "greater_is_better")


def each_epoch(c: Conversion, to: str, key: str) -> None:
    """Write an interval of one epoch, if its steps are known."""
    count = steps.epoch_steps(c)
    if count:
        c.set(to, count, key)
    else:
        c.leave(key, steps.per_epoch(to))


def evaluates(c: Conversion) -> str:
    """Return when evaluations happen: "no", "steps" or "epoch"."""
    strategy = c.get(c.first("eval_strategy", "evaluation_strategy"), "no")
    return "no" if strategy is False else str(strategy)


def evaluation(c: Conversion) -> None:
    """Write the steps between evaluations, if [eval] has rows."""
    key = c.first("eval_strategy", "evaluation_strategy")
    if not any(line.startswith("eval.") for line in c.lines):
        return
    if evaluates(c) == "epoch":
        each_epoch(c, "eval.every", key)
    else:
        name = c.first("eval_steps", "logging_steps")
        default = 10 if c.tool == "TRL" else 500
        steps.set_interval(c, "eval.every", c.number(name, default), name)


def precision(c: Conversion) -> None:
    """Write the type of computation."""
    bfloat16 = c.on("bf16", default=c.tool == "TRL" and not c.on("fp16"))
    steps.set_precision(c, bfloat16, "bf16")


def checkpointing(c: Conversion) -> None:
    """Write gradient checkpointing."""
    if c.on("gradient_checkpointing", default=c.tool == "TRL"):
        c.plugin("gradient_checkpointing", "gradient_checkpointing")


def trackers(c: Conversion) -> None:
    """Write where metrics are sent."""
    value = c.get("report_to", "none")
    names = [value] if isinstance(value, str) else [str(each) for each in value]
    steps.set_trackers(c, names, "report_to", "run_name", "project")


def push(c: Conversion) -> None:
    """Write the upload to the hub."""
    if not c.on("push_to_hub"):
        return
    folder = str(c.get("output_dir", "model")).rstrip("/")
    name = str(c.get("hub_model_id") or folder.split("/")[-1])
    every = "checkpoint" if c.get("hub_strategy", "every_save") != "end" else "model"
    c.plugin("push", "push_to_hub", "hub_model_id", to=name)
    c.plugin("push", "hub_strategy", every=every)
    c.plugin("push", "hub_private_repo", private=bool(c.get("hub_private_repo", False)))


def group(c: Conversion) -> None:
    """Write the grouping of examples by length."""
    strategy = c.get("train_sampling_strategy")
    if (c.on("group_by_length") or strategy == "group_by_length") and not steps.packs(c):
        key = c.first("group_by_length", "train_sampling_strategy")
        c.plugin("length_group", key, comment="inside each step: the order stays random")


def kernels(c: Conversion) -> None:
    """Write Liger's kernels and the fused loss."""
    key = c.first("use_liger_kernel", "enable_liger_kernel", "use_liger")
    if c.on(key):
        if "plugins.lora.r" not in c.lines:
            c.plugin("liger", key)
        c.plugin("fused_loss", key)


def attention(c: Conversion) -> None:
    """Write the attention kernel."""
    key = c.first("attn_implementation", "flash_attn")
    if str(c.get(key, "sdpa")) in FLASH:
        c.plugin("flash_attention", key, comment="the best kernel that can run")


FLASH = (
    *("flash_attention_2", "flash_attention_3", "flash_attention", "fa2", "fa3", "flex_attention"),
    *("kernels-community/flash-attn", "kernels-community/flash-attn2", "xformers"),
    *("kernels-community/flash-attn3", "kernels-community/vllm-flash-attn3"),
)


def compiled(c: Conversion) -> None:
    """Write torch.compile."""
    if c.on("torch_compile"):
        c.plugin("compile", "torch_compile")


def launcher(c: Conversion) -> None:
    """Choose the strategy of `plugsft launch`."""
    if c.get("deepspeed"):
        name, settings = _deepspeed(c)
        written = re.search(r"z(?:ero)?(?:_?stage)?[-_]?([0-3])", name)
        stage = settings.get("zero_optimization", {}).get("stage", 0) if settings else None
        c.launcher = "zero3" if (stage or int(written[1] if written else 3)) == 3 else ""
        if "offload" in name or re.search(r'"device": "(cpu|nvme)"', json.dumps(settings)):
            c.leave("deepspeed", "optimizer states stay on the GPU; use more GPUs")
    elif c.get("fsdp") or c.get("fsdp_config"):
        c.launcher = "fsdp2"
    if c.launcher and any(line.startswith("plugins.quantize") for line in c.lines):
        c.leave(
            c.first("deepspeed", "fsdp", "fsdp_config"),
            "quantized weights are not sharded; each GPU has them whole (ddp)",
        )
        c.launcher = ""
    key = c.first(
        "fsdp_config.activation_checkpointing", "fsdp_config.fsdp_activation_checkpointing"
    )
    if c.on(key):
        c.plugin("gradient_checkpointing", key)


def revision(value: Any) -> str | None:
    """Read a revision on the hub; "main" needs no line."""
    return None if value == "main" else name(value)


def _deepspeed(c: Conversion) -> tuple[str, dict[str, Any]]:
    """Return DeepSpeed's settings: the name of their file, and what it holds if it lies here."""
    value = c.get("deepspeed")
    if isinstance(value, dict):
        return "", value
    files = (Path(str(value)), c.path.parent / str(value))
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return str(value), {}
    try:
        return "", read_json_object(file)
    except (OSError, ValueError) as error:
        raise RecipeError(f"{file}: cannot be read ({reason_of(error)}); mend it") from error


def tf32(c: Conversion) -> None:
    """Name TF32 where it would change the products of a run in float32."""
    if c.on("tf32") and c.lines["model.dtype"].value == "float32":
        c.leave(
            "tf32",
            "products are exact in float32; set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 in the "
            "environment for TF32",
        )


def workers(key: str) -> Callable[[Conversion], None]:
    """Return a function that writes the number of tokenizing processes."""

    def write(c: Conversion) -> None:
        if c.get(key):
            c.plugin("multiprocess_tokenize", key, workers=c.whole(key, 0))

    return write


TRAINING: dict[str, Rule] = {
    **SHARED,
    "output_dir": Copy("output", "trainer_output", name),
    "per_device_train_batch_size": By(batch),
    "gradient_accumulation_steps": By(batch),
    "learning_rate": Copy("train.learning_rate", 5e-5, real),
    "num_train_epochs": By(length),
    "max_steps": By(length),
    "lr_scheduler_type": By(schedule),
    "lr_scheduler_kwargs": By(schedule, whole=True),
    "warmup_ratio": By(warmup),
    "warmup_steps": By(warmup),
    "optim": By(optimizer),
    "data_seed": Named("one seed is for all; use train.seed"),
    "bf16": By(precision),
    "fp16": By(precision),
    "gradient_checkpointing": By(checkpointing),
    "logging_steps": By(logging),
    "logging_strategy": Same(("steps",), "plugsft counts steps; use train.log_every"),
    "logging_first_step": SPEED,
    "log_level": SPEED,
    "log_level_replica": SPEED,
    "disable_tqdm": SPEED,
    "plot_loss": SPEED,  # report.html has the curves
    "save_strategy": By(saving),
    "save_steps": By(saving),
    "save_total_limit": By(saving),
    "load_best_model_at_end": By(saving),
    "metric_for_best_model": By(saving),
    "greater_is_better": By(saving),
    "do_train": Same((True,), "use `plugsft check`, which trains nothing"),
    "do_eval": SPEED,  # eval_strategy and the rows decide
    "eval_strategy": By(evaluation),
    "evaluation_strategy": By(evaluation),
    "eval_steps": By(evaluation),
    "eval_on_start": Named("the first evaluation comes after eval.every steps; use few"),
    "per_device_eval_batch_size": SPEED,
    "eval_accumulation_steps": SPEED,
    "report_to": By(trackers),
    "run_name": By(trackers),
    "project": By(trackers),
    "push_to_hub": By(push),
    "hub_model_id": By(push),
    "hub_strategy": By(push),
    "hub_private_repo": By(push),
    "hub_token": Named("a recipe holds no secrets; use the environment variable HF_TOKEN"),
    "hub_revision": Named("[plugins.push] uploads to the main branch; use `hf upload`"),
    "group_by_length": By(group),
    "train_sampling_strategy": By(group),
    "use_liger_kernel": By(kernels),
    "enable_liger_kernel": By(kernels),
    "attn_implementation": By(attention),
    "flash_attn": By(attention),
    "torch_compile": By(compiled),
    "neftune_noise_alpha": Named("plugsft adds no noise; write a plugin that adds it"),
    "label_smoothing_factor": Same((0, 0.0), "use a plugin that smooths labels"),
    "average_tokens_across_devices": Same(
        (True,), "the loss is always a mean over all ranks' tokens; there is no other mean"
    ),
    "overwrite_output_dir": SPEED,
    "resume_from_checkpoint": Named("use `plugsft RECIPE --resume auto`"),
    "auto_find_batch_size": Named("use `plugsft tune`, which measures micro-batches"),
    "dataloader_persistent_workers": SPEED,
    "dataloader_drop_last": Same(
        (False,), "the last step of an epoch has fewer examples; set train.steps"
    ),
    "ddp_backend": SPEED,
    "tf32": By(tf32),
    "deepspeed": By(launcher, whole=True),
    "fsdp": By(launcher),
    "fsdp_config": By(launcher, whole=True),
    "fsdp_transformer_layer_cls_to_wrap": SPEED,
}
"""The rules of the trainer's keys. Functions run in this order."""
