"""TRL's keys: `trl sft`, `trl dpo`, `trl kto` and `trl reward`."""

from ...base.errors import RecipeError
from . import training
from .conversion import (
    KEYS,
    Conversion,
    Tool,
    hold_out,
    listed_parts,
    part,
    rows_of,
    set_sources,
    with_subset,
)

TRAINERS = ("sft", "dpo", "kto", "reward")
OF_KTO = ("kto", "apo_zero_unpaired")
OF_SFT = ("nll", "chunked_nll", "dft")
"""Losses of `trl sft`."""
MARKS = KEYS["trl"]["marks_of"]
"""Trainer -> the keys that only it has; `trl kto` has some of those of `trl dpo`."""
ONLINE = ("num_generations", "reward_funcs", "max_completion_length", "use_vllm")
"""Keys of trainers that generate while they train."""


def choose_trainer(c: Conversion, named: str) -> None:
    """Choose the trainer: the one named, or that of its keys."""
    online = next((key for key in ONLINE if c.settings.get(key) is not None), "")
    if online:
        raise RecipeError(
            f"{c.path}: {online}: plugsft trains on rows, and generates none "
            "while it trains (PPO, GRPO, RLOO, distillation); use TRL for this run"
        )
    given = {key for key, value in c.settings.items() if value is not None}
    marked = (name for name, keys in MARKS.items() if given & {*keys})
    loss = ", ".join(c.names("loss_type"))
    if loss in OF_KTO:
        trainer = "kto"
    elif loss:
        trainer = "sft" if loss in OF_SFT else "dpo"
    else:
        trainer = next(marked, "sft")
    c.trainer = named or trainer
    if not named:
        c.remarks.append(f"read as a configuration of `trl {c.trainer}`; --trainer names another")


def convert(c: Conversion) -> None:
    """Write the recipe."""
    _set_data(c)
    _set_texts(c)
    _set_objective(c)
    if c.read("use_peft", False):
        _set_lora(c)
    for bits in (4, 8):
        if c.read(f"load_in_{bits}bit", False):
            training.set_quantization(c, bits, f"load_in_{bits}bit")
    training.set_training(c, "trl")
    if c.read("gradient_checkpointing", True):
        c.set("plugins.gradient_checkpointing", {}, "gradient_checkpointing")
    key = c.first("dtype", "torch_dtype")
    if c.get(key) == "float16":
        c.leave(key, 'weights stay in float32; use model.dtype = "float16" to compute in float16')
    elif c.get(key) in ("bfloat16", "auto") and "plugins.lora.r" not in c.lines:
        training.remark_weights(c)


def _set_data(c: Conversion) -> None:
    """Write the sources, one name or a mixture, and the rows that are held out."""
    mixture = c.first("dataset_mixture.datasets", "datasets")
    if c.get(mixture):
        set_sources(c, listed_parts(c, mixture), mixture)
    elif c.get("dataset_name"):
        source = with_subset(c.get("dataset_name"), c.get("dataset_config"))
        set_sources(c, [part(source, c.get("dataset_train_split"))], "dataset_name")
    else:
        raise RecipeError(f"{c.path}: names no data; set dataset_name or datasets")
    if c.read("eval_strategy", "no") == "no":
        return
    size = c.first("dataset_mixture.test_split_size", "test_split_size")
    if c.get(size) is not None:
        hold_out(c, size, c.read(size, 0.0))
    elif "data.source" in c.lines and rows_of(c.value("data.source")) is None:
        c.set("eval.split", c.read("dataset_test_split", "test"), "dataset_test_split")
    else:
        c.leave_evaluations(
            "eval_strategy",
            "a mixture or a file has no split for evaluations; use eval.source and eval.split",
        )


def _set_texts(c: Conversion) -> None:
    """Write the longest example, packing, the template, and the tokens that are trained."""
    key = c.first("max_length", "max_seq_length")
    longest = 1024
    if c.get(key, 1024) in ("None", "none", "null") or c.settings.get(key, 1024) is None:
        c.set("data.too_long", "error", key, comment="no example is cut; raise data.max_length")
    else:
        longest = c.read(key, 1024)
        c.set("data.max_length", longest, key)
    if c.trainer == "reward":
        c.set("data.too_long", "drop", comment="TRL drops longer pairs of `trl reward`")
    if c.trainer == "sft" and c.read("packing", False):
        training.set_packing(c, longest, "packing")
    if c.trainer == "sft":
        _set_trained_tokens(c)
    if c.get("chat_template"):
        c.leave("chat_template", "write it to a file, and use model.chat_template = FILE.jinja")


def _set_trained_tokens(c: Conversion) -> None:
    sources = c.value("data.sources") or [{"source": c.value("data.source")}]
    rows = rows_of(sources[0]["source"])
    first = rows.read(0, 1)[0] if rows else {}  # unknown, where no file lies here
    row = first if isinstance(first, dict) else {}
    completion, pairs = c.get("completion_only_loss"), {"prompt", "completion"} <= row.keys()
    if c.read("assistant_only_loss", False):
        c.set("data.train_on", "assistant", "assistant_only_loss")
    elif c.read("completion_only_loss", pairs):
        c.set("data.train_on", "assistant", "completion_only_loss", comment="the completion alone")
    else:
        c.set("data.train_on", "all", "assistant_only_loss", comment="every token of a chat")
        if completion is None and not row:
            c.remarks.append(
                "TRL trains every token of a chat or text, but only the completion of rows with "
                'prompt and completion; if yours have these, set data.train_on = "assistant"'
            )


def _set_objective(c: Conversion) -> None:
    """Write the plugin of a preference run."""
    if c.trainer == "dpo":
        losses = c.names("loss_type") or ["sigmoid"]
        if losses[1:] == ["sft"]:
            weight, nll = c.get("loss_weights", [1.0, 1.0])
            c.set("plugins.dpo.nll", nll / weight, "loss_weights", comment="of the loss sft")
            losses.pop()
        loss = ", ".join(losses)
        c.set(
            "plugins.dpo.loss", "length_normalized" if loss == "sigmoid_norm" else loss, "loss_type"
        )
    c.copy(c.trainer, "trl")
    if c.trainer == "sft" and c.get("loss_type", "nll") not in ("nll", "chunked_nll"):
        c.leave("loss_type", "trained with the usual loss; write a plugin that implements `step`")


def _set_lora(c: Conversion) -> None:
    """Write adapters."""
    c.copy("lora", "trl")
    if c.trainer != "sft" and c.read("disable_dropout", True):
        comment = f"disable_dropout: true of `trl {c.trainer}`"
        c.set("plugins.lora.dropout", 0.0, "lora_dropout", comment=comment)
    training.set_targets(c, "lora_target_modules")
    if "plugins.lora.targets" not in c.lines and c.get("lora_target_modules") is None:
        comment = "peft's default for Llama, Mistral, Qwen and Gemma"
        c.set("plugins.lora.targets", ["q_proj", "v_proj"], comment=comment)


TOOL = Tool("TRL", convert, ("shared", "trainer", "trl"))
