"""axolotl's keys."""

from ...base.errors import RecipeError
from . import steps, training_keys
from .axolotl_data import DATASET_RULES, chat_template, data
from .axolotl_intervals import evaluation, saving
from .axolotl_method import lora, objective
from .axolotl_other import OTHERS
from .conversion import By, Conversion, Copy, Named, Rule, Rules, Same, name, real, share, whole
from .shared_rules import SHARED


def packing(c: Conversion) -> None:
    """Write the longest example, and packing: a row has micro_batch_size x sequence_len tokens."""
    longest = c.whole("sequence_len", 512)
    c.set("data.max_length", longest, "sequence_len")
    strategy = str(c.get("excess_length_strategy", "drop"))
    too_long = "error" if strategy == "raise" else strategy
    c.set("data.too_long", too_long, "excess_length_strategy")
    if c.on("sample_packing") and c.get("rl") is None:
        rows = c.whole("micro_batch_size", 1)
        c.plugin("bfd_packing", "sample_packing", scope="dataset")
        c.set("plugins.bfd_packing.capacity", longest * rows, "micro_batch_size", "sequence_len")


def batch(c: Conversion) -> None:
    """Write the global batch; batch_size stands in for the accumulation."""
    micro = c.whole("micro_batch_size", 1)
    total = c.get("batch_size")
    if total is not None and c.get("gradient_accumulation_steps") is None:
        c.settings["gradient_accumulation_steps"] = max(1, whole(total) // micro // c.gpus)
    rows = micro if steps.packs(c) else 1
    steps.set_batch(c, "micro_batch_size", "gradient_accumulation_steps", 1, rows)


def length(c: Conversion) -> None:
    """Write epochs or steps."""
    steps.set_length(c, "num_epochs", "max_steps", 1)


def schedule(c: Conversion) -> None:
    """Write the schedule; a cosine may have a minimum."""
    name, options = str(c.get("lr_scheduler", "cosine")), dict(c.get("lr_scheduler_kwargs", {}))
    if c.get("cosine_constant_lr_ratio"):
        c.leave("cosine_constant_lr_ratio", "no schedule stays at its minimum; write a plugin")
    if name == "cosine" and c.get("cosine_min_lr_ratio"):
        rate = float(c.number("cosine_min_lr_ratio", 0))
        c.set("train.schedule", "cosine_with_min_lr", "lr_scheduler")
        c.set("train.schedule_options", {"min_lr_rate": rate}, "cosine_min_lr_ratio")
    else:
        steps.set_schedule(c, name, options, "lr_scheduler", "lr_scheduler_kwargs")


def warmup(c: Conversion) -> None:
    """Write the warm-up: by default 3 % of the run, at most 100 steps."""
    count, total = c.get("warmup_steps"), steps.total_steps(c)
    if count is not None:
        steps.set_warmup(c, c.number("warmup_steps", 0), "warmup_steps")
    elif c.get("warmup_ratio") is None and total:
        steps.set_warmup(c, min(int(0.03 * total), 100), "warmup_ratio")
    else:
        steps.set_warmup(c, c.read("warmup_ratio", 0.03, share), "warmup_ratio", rounds_up=False)
    line = c.lines["train.warmup"]
    line.value = 2.0 if line.value == 1 else line.value  # axolotl makes two of one


def precision(c: Conversion) -> None:
    """Write the type of computation."""
    key = c.first("bf16", "bfloat16")
    float16 = c.on("fp16") or c.on("float16")
    bfloat16 = c.get(key) == "full" or c.on(key, not float16)
    steps.set_precision(c, bfloat16, key)
    if bfloat16 and not c.get("adapter"):
        c.remarks.append(
            "axolotl loads the model in bfloat16, and trains it so; plugsft stores trained weights "
            'in float32 (16 bytes a weight), or with model.weights = "bfloat16" as axolotl does'
        )


def integrations(c: Conversion) -> None:
    """Write what axolotl's own plugins do."""
    names = [str(name) for name in c.get("plugins", [])]
    others = [name for name in names if not name.endswith(("LigerPlugin", "CutCrossEntropyPlugin"))]
    if others:
        c.leave("plugins", "a plugin of axolotl; look for one of plugsft with `plugsft plugins`")
    if c.on("cut_cross_entropy") or any("CutCross" in name for name in names):
        c.plugin("fused_loss", "cut_cross_entropy" if c.get("cut_cross_entropy") else "plugins")
    for key in ("liger_fused_linear_cross_entropy", "liger_cross_entropy"):
        if c.on(key):
            c.plugin("fused_loss", key)
    if "plugins.lora.r" not in c.lines:
        for key, option in LIGER.items():
            if c.get(key) is not None:
                c.set(f"plugins.liger.{option}", c.on(key), key)


LIGER = {
    "liger_rms_norm": "rms_norm",
    "liger_layer_norm": "layer_norm",
    "liger_glu_activation": "mlp",
    "liger_rope": "rope",
}


def attention(c: Conversion) -> None:
    """Write the attention kernel."""
    old = ("flash_attention", "xformers_attention", "flex_attention")
    key = next((key for key in old if c.on(key)), "attn_implementation")
    if key != "attn_implementation" or str(c.get(key)) in training_keys.FLASH:
        c.plugin("flash_attention", key, comment="the best kernel that can run")


def memory(c: Conversion) -> None:
    """Write gradient checkpointing and offloading."""
    value = c.get("gradient_checkpointing", False)
    if value not in (False, "false"):
        c.plugin("gradient_checkpointing", "gradient_checkpointing")
    if str(value).startswith("offload") or c.get("activation_offloading") not in (None, False):
        key = c.first("activation_offloading", "gradient_checkpointing")
        c.plugin("activation_offload", key)


def trackers(c: Conversion) -> None:
    """Write where metrics are sent."""
    names = [name for name in steps.TRACKERS if c.on(f"use_{name}")]
    if c.get("wandb_project") and c.get("use_wandb") is None:
        names.append("wandb")
    if names:
        key = "wandb_project" if c.get("wandb_project") else f"use_{names[0]}"
        steps.set_trackers(c, names, key, "wandb_name", "wandb_project")


def stopping(c: Conversion) -> None:
    """Write early stopping."""
    if c.get("early_stopping_patience"):
        patience = c.whole("early_stopping_patience", 0)
        c.plugin("early_stopping", "early_stopping_patience", patience=patience)


def push(c: Conversion) -> None:
    """Write the upload to the hub."""
    if c.get("hub_model_id"):
        c.plugin("push", "hub_model_id", to=str(c.get("hub_model_id")))
        every = "model" if c.get("hub_strategy") == "end" else "checkpoint"
        c.plugin("push", "hub_strategy", every=every)


def optimizer(c: Conversion) -> None:
    """Write the optimizer."""
    steps.set_optimizer(c, "optimizer", "adamw_torch_fused")


def sharding(c: Conversion) -> None:
    """Choose the strategy of `plugsft launch`."""
    training_keys.launcher(c)
    if c.number("dp_shard_size", 1) > 1 and not c.launcher:
        c.launcher = "fsdp2"


def model(c: Conversion) -> None:
    """Write the tokenizer, where it is another model's."""
    if not c.get("base_model"):
        raise RecipeError(f"{c.path}: names no model; set base_model")
    if c.get("tokenizer_config") and c.get("tokenizer_config") != c.get("base_model"):
        c.set("model.tokenizer", c.read("tokenizer_config", "", name), "tokenizer_config")


RULES: dict[str, Rule] = {
    "base_model": Copy("model.path", read=name),
    "revision_of_model": Copy("model.revision", read=name),
    "tokenizer_config": By(model),
    "output_dir": Copy("output", "./model-out", name),
    "rl": By(objective),
    "processor_type": By(objective),
    "reward_model": By(objective),
    "process_reward_model": By(objective),
    "center_rewards_coefficient": By(objective),
    "precompute_ref_log_probs": By(objective),
    **dict.fromkeys(("rl_beta", "dpo_beta", "orpo_alpha", "trl.beta"), By(objective)),
    **dict.fromkeys(("kto_desirable_weight", "kto_undesirable_weight"), By(objective)),
    "datasets": By(data),
    "pretraining_dataset": By(data),
    "train_on_inputs": By(data),
    **DATASET_RULES,
    "chat_template": By(chat_template),
    "chat_template_jinja": By(chat_template),
    "sequence_len": By(packing),
    "excess_length_strategy": By(packing),
    "sample_packing": By(packing),
    "max_packed_sequence_len": Named("axolotl no longer has it; use plugins.bfd_packing.capacity"),
    "micro_batch_size": By(batch),
    "gradient_accumulation_steps": By(batch),
    "batch_size": By(batch),
    "num_epochs": By(length),
    "max_steps": By(length),
    "learning_rate": Copy("train.learning_rate", read=real),
    "lr_scheduler": By(schedule),
    "lr_scheduler_kwargs": By(schedule, whole=True),
    "cosine_min_lr_ratio": By(schedule),
    "cosine_constant_lr_ratio": By(schedule),
    "warmup_steps": By(warmup),
    "warmup_ratio": By(warmup),
    "optimizer": By(optimizer),
    "logging_steps": Copy("train.log_every", read=whole),
    **dict.fromkeys(("save_steps", "saves_per_epoch", "save_strategy"), By(saving)),
    "save_total_limit": By(saving),
    "val_set_size": By(evaluation),
    "test_datasets": By(evaluation),
    **dict.fromkeys(("eval_steps", "evals_per_epoch", "eval_strategy"), By(evaluation)),
    "evaluation_strategy": Same(("no",), "axolotl no longer has it; use eval.every"),
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "float16"), By(precision)),
    "adapter": By(lora),
    **{f"lora_{name}": By(lora) for name in ("r", "alpha", "dropout", "target_modules")},
    "lora_target_linear": By(lora),
    "lora_modules_to_save": By(lora),
    "lora_model_dir": By(lora),
    **dict.fromkeys(("peft_use_rslora", "peft_use_dora", "loraplus_lr_ratio"), By(lora)),
    "load_in_4bit": By(lora),
    "load_in_8bit": By(lora),
    "plugins": By(integrations),
    "cut_cross_entropy": By(integrations),
    **dict.fromkeys(("liger_fused_linear_cross_entropy", "liger_cross_entropy"), By(integrations)),
    **dict.fromkeys(LIGER, By(integrations)),
    "attn_implementation": By(attention),
    **dict.fromkeys(("flash_attention", "xformers_attention", "flex_attention"), By(attention)),
    "gradient_checkpointing": By(memory),
    "activation_offloading": By(memory),
    **dict.fromkeys(("wandb_project", "wandb_name"), By(trackers)),
    **{f"use_{name}": By(trackers) for name in steps.TRACKERS},
    "early_stopping_patience": By(stopping),
    **dict.fromkeys(("hub_model_id", "hub_strategy"), By(push)),
    "torch_compile": By(training_keys.compiled),
    "group_by_length": By(training_keys.group),
    "tf32": By(training_keys.tf32),
    "fsdp": By(sharding),
    **dict.fromkeys(("deepspeed", "fsdp_config"), By(sharding, whole=True)),
    "dp_shard_size": By(sharding),
}
"""The keys that are converted. Functions run in this order."""


def rules(c: Conversion) -> Rules:
    """Return axolotl's table."""
    return {**RULES, **SHARED, **OTHERS}
