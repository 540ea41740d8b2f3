"""axolotl's keys."""

from ...recipe.tables import TEMPLATES
from . import training
from .conversion import (
    KEYS,
    Conversion,
    Tool,
    hold_out,
    listed_parts,
    places,
    set_eval_source,
    set_sources,
)

IMPOSSIBLE = {
    "processor_type": "plugsft trains on texts, not on images or sounds; use axolotl for this run",
    "process_reward_model": "plugsft scores whole answers; use axolotl",
}
"""Key of runs that plugsft cannot do -> the reason."""
PREFERENCES = {"dpo": "sigmoid", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
"""Value of `rl` -> the loss of [plugins.dpo]."""
ROLES = KEYS["axolotl"]["roles"]
"""Role -> the names of it that plugsft reads."""
COLUMNS = {
    "field": "text",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
}
"""Key of a data set -> plugsft's column."""


def convert(c: Conversion) -> None:
    """Write the recipe."""
    for key, reason in IMPOSSIBLE.items():
        if c.get(key):
            raise c.refuse(key, reason)
    c.require("base_model")
    c.copy("copied", "shared", "axolotl")
    _set_objective(c)
    _set_data(c)
    _set_texts(c)
    if c.get("gradient_accumulation_steps") is None and c.get("batch_size"):
        micro = c.read("micro_batch_size", 1) * c.gpus
        c.flat["gradient_accumulation_steps"] = max(1, c.read("batch_size", 1) // micro)
    training.set_batch(c, "micro_batch_size", "gradient_accumulation_steps", 1)
    training.set_length(c, "num_epochs", 1.0)
    _set_schedule(c)
    training.set_optimizer(c, "optimizer")
    _set_evaluation(c)
    if c.get("saves_per_epoch") is None or c.get("save_steps"):
        training.set_saving(c, "steps" if c.get("save_steps") else "epoch")
    else:
        _set_times(c, "checkpoint.every", "saves_per_epoch")
    training.set_precision(c, default=True)
    _set_lora(c)
    if c.value("model.dtype") == "bfloat16" and c.get("adapter") is None:
        training.remark_weights(c)
    _set_speed(c)
    if c.get("wandb_project"):
        training.set_trackers(c, ["wandb"], "wandb_project", "wandb_name", "wandb_project")
    training.set_launcher(c)


def _set_objective(c: Conversion) -> None:
    """Write the plugin of a preference run, or refuse the run."""
    kind = c.get("rl")
    if kind == "kto":
        c.set("plugins.kto.loss", "kto", "rl")
        c.copy("kto", "axolotl")
    elif kind in PREFERENCES:
        c.set("plugins.dpo.loss", PREFERENCES[kind], "rl")
        c.copy("simpo" if kind == "simpo" else "dpo", "axolotl")
    elif kind is not None:
        raise c.refuse(
            "rl", "plugsft trains on rows, and generates none while it trains; use axolotl"
        )


def _set_data(c: Conversion) -> None:
    """Write the sources, and what is trained in their rows."""
    c.require("datasets")
    columns = {place: _columns_of(c, place) for place in places(c, "datasets")}
    first, *others = columns.values()
    differ = any(other != first for other in others)
    set_sources(c, listed_parts(c, "datasets", columns if differ else None), "datasets")
    for place in columns:
        _check_rows(c, place)
    if first and not differ:
        c.set("data.columns", first, comment="the names of field_messages, field, ...")
    if c.read("train_on_inputs", False):
        c.set("data.train_on", "all", "train_on_inputs")
        c.leave(
            "train_on_inputs",
            'data.train_on = "all" trains every token, and axolotl not the words of the template; '
            'use "assistant" for the answers alone',
        )
    else:
        c.set("data.train_on", "assistant", "train_on_inputs", comment="every answer")


def _check_rows(c: Conversion, place: str) -> None:
    """Name what differs in the rows of a data set."""
    for role, names in c.get(f"{place}.roles", {}).items():
        if not {*names} <= {*ROLES.get(role, ())}:
            c.leave(
                f"{place}.roles.{role}",
                "a row's roles are system, user, assistant or tool; rename them in the data",
            )
    if not {*c.get(f"{place}.roles_to_train", ())} <= {*ROLES["assistant"]}:
        c.leave(f"{place}.roles_to_train", "answers alone are trained; use data.train_on")


def _columns_of(c: Conversion, place: str) -> dict[str, str]:
    """Return the columns that a data set names: ours -> theirs."""
    columns: dict[str, str] = {}
    messages = c.read(f"{place}.field_messages", "messages")
    if messages not in ("messages", "conversations", "conversation"):
        columns["messages"] = messages
    for key, ours in COLUMNS.items():
        theirs = c.read(f"{place}.{key}", ours)
        if theirs != ours:
            columns[ours] = theirs
    return columns


def _set_texts(c: Conversion) -> None:
    """Write the longest example, packing, and the chat template."""
    longest, micro = c.read("sequence_len", 512), c.read("micro_batch_size", 1)
    c.set("data.max_length", longest, "sequence_len")
    c.set("data.too_long", "drop", comment="axolotl drops longer examples")
    if c.read("sample_packing", False) and c.get("rl") is None:
        training.set_packing(c, longest * micro, "sample_packing")
    if c.get("chat_template", "tokenizer_default") not in ("tokenizer_default", *TEMPLATES):
        c.leave(
            "chat_template",
            "axolotl brings a template of this name; here the model's own writes the rows; use "
            "model.chat_template = FILE.jinja for another",
        )


def _set_schedule(c: Conversion) -> None:
    """Write the schedule; a cosine may have a minimum. The warm-up is 3 % by default."""
    training.set_schedule(c, "lr_scheduler", "cosine")
    rate = c.read("cosine_min_lr_ratio", 0.0)
    if rate and c.value("train.schedule") == "cosine":
        c.set("train.final_rate", rate, "cosine_min_lr_ratio")
    unset = c.get("warmup_steps", c.get("warmup_ratio")) is None
    training.set_warmup(c, 0.03 if unset else 0.0)
    warmup = c.lines["train.warmup"]
    warmup.value = min(warmup.value, 100) if unset else warmup.value
    warmup.value = 2 if warmup.value == 1 else warmup.value  # axolotl makes two of one


def _set_times(c: Conversion, to: str, key: str) -> None:
    """Write the interval between saves or evaluations that `key` counts per epoch."""
    times, epochs = c.read(key, 0.0), c.read("num_epochs", 1.0)
    if times in (0, 1):
        c.set(to, "epoch", key)
    else:
        training.set_share(c, to, 1 / (times * epochs), key)


def _set_evaluation(c: Conversion) -> None:
    """Write the rows of evaluations, the steps between these, and what depends on the values."""
    size = c.read("val_set_size", 0.0)
    if c.get("test_datasets"):
        set_eval_source(c, listed_parts(c, "test_datasets"), "test_datasets")
    elif size > 0 and c.get("evals_per_epoch") != 0:
        hold_out(c, "val_set_size", size)
    if "eval.split" not in c.lines:
        return
    if steps := c.read("eval_steps", 0.0):
        training.set_interval(c, "eval.every", steps, "eval_steps")
    else:
        _set_times(c, "eval.every", "evals_per_epoch")
    c.copy("eval", "shared")


def _set_lora(c: Conversion) -> None:
    """Write adapters and quantization."""
    adapter = c.get("adapter")
    if adapter not in (None, "lora", "qlora"):
        raise c.refuse("adapter", "plugsft trains LoRA alone; use [plugins.lora]")
    if adapter:
        c.copy("lora", "axolotl")
        if c.read("lora_target_linear", False):
            c.set("plugins.lora.targets", "all-linear", "lora_target_linear")
        else:
            training.set_targets(c, "lora_target_modules")
    if adapter == "qlora" or c.read("load_in_4bit", False):
        training.set_quantization(c, 4, c.first("load_in_4bit", "adapter"))
    elif c.read("load_in_8bit", False):
        training.set_quantization(c, 8, "load_in_8bit")


def _set_speed(c: Conversion) -> None:
    """Write kernels, axolotl's own plugins, and what saves memory."""
    names = [str(name) for name in c.get("plugins", [])]
    if not all(name.endswith(("LigerPlugin", "CutCrossEntropyPlugin")) for name in names):
        c.leave("plugins", "a plugin of axolotl; look for one of plugsft with `plugsft plugins`")
    if any("CutCross" in name for name in names):
        c.set("plugins.fused_loss", {}, "plugins")
    if "plugins.lora.r" not in c.lines:
        c.copy("liger", "axolotl")
    training.set_attention(c, "attn_implementation")
    checkpointing = c.get("gradient_checkpointing", False)
    if checkpointing not in (False, "false"):
        c.set("plugins.gradient_checkpointing", {}, "gradient_checkpointing")
    if str(checkpointing).startswith("offload") or c.get("activation_offloading"):
        c.set("plugins.activation_offload", {}, "activation_offloading")
    if not training.packs(c):
        c.switch("plugins.length_group", "group_by_length")


TOOL = Tool("axolotl", convert, ("shared", "axolotl"))
