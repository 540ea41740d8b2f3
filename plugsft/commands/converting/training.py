"""Settings of training that the tools share, and arguments of transformers' trainer."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

from ...base.console import format_count
from ...recipe.schedule_names import NAMES, keys_of_schedule
from .conversion import KEYS, Conversion, rows_of

ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "paged_adamw", "paged_adamw_32bit")
IN_8_BITS = KEYS["shared"]["in_8_bits"]
"""Name in transformers -> kind of [plugins.low_memory_adam]."""
OF_TORCH = ("sgd", "adagrad", "rmsprop")
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
FLASH = ("flash_attention", "fa2", "fa3", "flex_attention", "xformers", "kernels-community/")
"""How the names of fast attention kernels begin."""


def set_batch(c: Conversion, micro_key: str, accumulation: str, default: int) -> None:
    """Write the global batch: micro-batch x accumulation x GPUs."""
    micro = c.read(micro_key, default)
    packed, total = packs(c), micro * c.read(accumulation, 1) * c.gpus
    if packed and c.tool == "axolotl":
        total //= micro  # a packed row has micro_batch_size x sequence_len tokens
    gpus = f"x {c.gpus} GPUs" if c.gpus > 1 else "on 1 GPU"
    batch = format_count(total, "packed row" if packed else "example")
    c.set("train.batch_size", total, micro_key, accumulation, comment=f"{batch} {gpus}")
    if micro > 1 and not packed:
        c.set("train.micro_batch", micro, micro_key)
    c.remarks.append(
        f"global batch: {batch}, for {format_count(c.gpus, 'GPU')}; for another number, convert "
        "with --gpus"
    )


def packs(c: Conversion) -> bool:
    """Tell whether the recipe packs rows."""
    return "plugins.bfd_packing.scope" in c.lines


def set_packing(c: Conversion, capacity: int, *keys: str) -> None:
    """Write packing over the whole data set: batch_size counts packed rows, as in other tools."""
    c.set("plugins.bfd_packing.scope", "dataset", *keys)
    c.set("plugins.bfd_packing.capacity", capacity, comment="tokens of a packed row")


def set_schedule(c: Conversion, key: str, default: str) -> None:
    """Write the schedule with its options, or name it if transformers has none of this name."""
    name, options = c.read(key, default), c.get("lr_scheduler_kwargs", {})
    if name not in NAMES:
        c.leave(key, "plugsft has no schedule of this name; use cosine, linear, ...")
        return
    for to, value in keys_of_schedule(name, options, c.value("train.learning_rate")).items():
        c.set(to, value, key, "lr_scheduler_kwargs")


def set_warmup(c: Conversion, ratio: float) -> None:
    """Write the warm-up: steps win over the ratio, which becomes steps where these are known."""
    warmup, key = c.read("warmup_steps", 0.0), "warmup_steps"
    if warmup == 0:
        key = c.first("warmup_ratio", key)
        warmup = c.read("warmup_ratio", ratio)
        if not 0 <= warmup < 1:
            raise c.refuse(key, "it should be a share: at least 0, and less than 1")
    if c.get(c.first("lr_scheduler", "lr_scheduler_type")) == "constant":
        warmup = 0.0  # transformers' schedule "constant" has none
    total = total_steps(c)
    if total and key == "warmup_ratio" and c.tool == "axolotl" and 0 < warmup < 1:
        warmup = int(total * warmup)  # the others round up, as plugsft does
    c.set("train.warmup", warmup if warmup < 1 else int(warmup), key)


def set_length(c: Conversion, epochs: str, default: float) -> None:
    """Write the length of the run."""
    count, limit, one_epoch = c.read(epochs, default), c.read("max_steps", -1), epoch_steps(c)
    if limit > 0:
        c.set("train.steps", limit, "max_steps")
    elif count.is_integer():
        c.set("train.epochs", int(count), epochs)
    elif one_epoch:
        c.set("train.steps", math.ceil(count * one_epoch), epochs)
    else:
        c.leave(epochs, "epochs are whole; use train.steps (`plugsft check` prints an epoch's)")


def total_steps(c: Conversion) -> int | None:
    """Return the steps of the run, if they are known."""
    steps, epochs = epoch_steps(c), c.value("train.epochs")
    return c.value("train.steps") or (steps * epochs if steps and epochs else None)


def epoch_steps(c: Conversion) -> int | None:
    """Return the steps of an epoch, if the rows can be counted here."""
    if packs(c) or c.value("data.split") not in (None, "train"):
        return None
    rows = rows_of(c.value("data.source") or "")
    return math.ceil(len(rows) / c.value("train.batch_size")) if rows else None


def set_optimizer(c: Conversion, key: str) -> None:
    """Write the optimizer; AdamW needs no line."""
    name = c.read(key, "adamw_torch")
    if name in IN_8_BITS:
        c.set("plugins.low_memory_adam.kind", IN_8_BITS[name], key)
    elif name in OF_TORCH:
        c.set("plugins.torch_optimizer.name", name, key)
    elif name not in ADAMW:
        c.leave(
            key,
            "plugsft has no such optimizer, and trains with AdamW; use [plugins.low_memory_adam], "
            "[plugins.torch_optimizer], or a plugin of your own",
        )


def set_interval(c: Conversion, to: str, value: float, key: str) -> None:
    """Write an interval in steps, or a share of the run."""
    if value >= 1:
        c.set(to, int(value), key)
    else:
        set_share(c, to, value, key)


def set_share(c: Conversion, to: str, share: float, key: str) -> None:
    """Write an interval that is a share of the run, if its steps are known."""
    if total := total_steps(c):
        c.set(to, max(1, math.ceil(total * share)), key)
    else:
        c.leave(key, f'plugsft counts steps; use {to} = "epoch", or the steps between two')


def set_saving(c: Conversion, default: str) -> None:
    """Write the steps between checkpoints."""
    strategy = c.read("save_strategy", default)
    if strategy == "no":
        c.set("checkpoint.every", 0, "save_strategy")
        c.lines.pop("checkpoint.keep", None)
    elif strategy == "steps":
        set_interval(c, "checkpoint.every", c.read("save_steps", 500.0), "save_steps")
    elif strategy == "epoch":
        c.set("checkpoint.every", "epoch", "save_strategy")
    else:
        c.leave("save_strategy", 'use checkpoint.keep_best = "eval_loss" for the best checkpoint')


def set_trackers(c: Conversion, names: Sequence[str], key: str, name: str, project: str) -> None:
    """Write where metrics are sent."""
    known = [each for each in names if each in TRACKERS]
    if not {*names} <= {*TRACKERS, "none"}:
        c.leave(key, f"[plugins.tracker] sends to {', '.join(TRACKERS)}; use one of these")
    if known:
        c.set("plugins.tracker.to", known, key)
        for of, to in ((name, "plugins.tracker.name"), (project, "plugins.tracker.project")):
            if text := c.read(of, ""):
                c.set(to, text, of)


def set_precision(c: Conversion, default: bool) -> None:
    """Write the type of computation; without bfloat16, float16 or float32."""
    float16 = c.read("fp16", False)
    key = c.first("bf16", "pure_bf16")
    if c.get(key) == "full" or c.read(key, default and not float16):
        c.set("model.dtype", "bfloat16", key)
    elif float16:
        c.set("model.dtype", "float16", "fp16", comment="with loss scaling")
    else:
        c.set("model.dtype", "float32", "bf16")
    if c.read("tf32", False) and c.value("model.dtype") == "float32":
        c.leave(
            "tf32",
            "products are exact in float32; set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 in the "
            "environment for TF32",
        )


def remark_weights(c: Conversion) -> None:
    """Say how trained weights are stored, which the other tools load in bfloat16."""
    c.remarks.append(
        f"{c.tool} trains weights in bfloat16; plugsft stores them in float32 (16 bytes a weight), "
        'which loses no small steps, or with model.weights = "bfloat16" as the other tool does'
    )


def set_attention(c: Conversion, key: str) -> None:
    """Write the attention kernel."""
    if c.read(key, "sdpa").startswith(FLASH):
        c.set("plugins.flash_attention", {}, key, comment="the best kernel that can run")


def set_targets(c: Conversion, key: str, default: Sequence[str] = ()) -> None:
    """Write the adapted layers: a list of names, or all linear layers."""
    names = c.names(key) or default
    if any({*name} & {*"\\^$.*+|()[]"} for name in names):
        c.leave(key, 'a pattern; use the names\' ends: plugins.lora.targets = ["q_proj", ...]')
    elif names in (["all"], ["all-linear"]):
        c.set("plugins.lora.targets", "all-linear", key)
    elif names:
        c.set("plugins.lora.targets", names, key)


def set_quantization(c: Conversion, bits: int, key: str) -> None:
    """Write [plugins.quantize]."""
    if "plugins.lora.r" not in c.lines:
        raise c.refuse(key, "quantized weights cannot be trained; use adapters (LoRA) on them")
    c.set("plugins.quantize.kind", {4: "nf4", 8: "int8"}[bits], key)


def set_launcher(c: Conversion) -> None:
    """Choose the strategy of `plugsft launch`."""
    if c.get("deepspeed"):
        text = json.dumps(c.get("deepspeed"))
        stage = re.search(r'(?:"stage": |z(?:ero)?(?:_?stage)?[-_]?)([0-3])', text)
        c.launcher = "zero3" if stage is None or stage[1] == "3" else ""
        if not c.launcher:
            c.leave("deepspeed", "without stage 3 each GPU has the model whole (ddp)")
        if re.search(r'^[^{]*offload|"device": "(cpu|nvme)"', text):
            c.leave("deepspeed", "optimizer states stay on the GPU; use more GPUs")
    elif c.get("fsdp") or c.get("fsdp_config") or c.read("dp_shard_size", 1) > 1:
        c.launcher = "fsdp2"
    if c.launcher and "plugins.quantize.kind" in c.lines:
        key = c.first("deepspeed", "fsdp", "fsdp_config")
        c.leave(key, "quantized weights are not sharded; each GPU has them whole (ddp)")
        c.launcher = ""


def set_training(c: Conversion, section: str) -> None:
    """Write what the trainer reads; sources, packing and adapters come before."""
    c.copy("copied", "shared", "trainer", section)
    set_batch(c, "per_device_train_batch_size", "gradient_accumulation_steps", 8)
    set_length(c, "num_train_epochs", 3.0)
    set_schedule(c, "lr_scheduler_type", "linear")
    set_warmup(c, 0.0)
    set_optimizer(c, "optim")
    set_precision(c, default=c.tool == "TRL")
    set_attention(c, c.first("attn_implementation", "flash_attn"))
    set_saving(c, "steps")
    if "eval.split" in c.lines:
        _set_evaluation(c)
    set_trackers(c, c.names("report_to"), "report_to", "run_name", "project")
    _set_push(c)
    liger = c.first("use_liger_kernel", "enable_liger_kernel")
    if "plugins.lora.r" not in c.lines:
        c.switch("plugins.liger", liger)
    c.switch("plugins.fused_loss", liger)
    if not packs(c):
        c.switch("plugins.length_group", "group_by_length")
    set_launcher(c)


def _set_evaluation(c: Conversion) -> None:
    """Write when the model is evaluated, and what depends on the values."""
    if c.read("eval_strategy", "no") == "epoch":
        c.set("eval.every", "epoch", "eval_strategy")
    else:
        name = c.first("eval_steps", "logging_steps")
        set_interval(c, "eval.every", c.read(name, float(c.value("train.log_every"))), name)
    c.copy("eval", "shared")


def _set_push(c: Conversion) -> None:
    """Write the upload to the hub."""
    if c.read("push_to_hub", False):
        name = c.read("hub_model_id", Path(c.read("output_dir", "model")).name)
        c.set("plugins.push.to", name, "push_to_hub", "hub_model_id")
        every = "model" if c.get("hub_strategy") == "end" else "checkpoint"
        c.set("plugins.push.every", every, "hub_strategy")
