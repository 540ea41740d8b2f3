"""TRL's keys: `trl sft`, `trl dpo`, `trl kto` and `trl reward`, and alignment-handbook's."""

from . import lora_settings, sources, steps
from .conversion import By, Conversion, Copy, Named, Rule, Rules, Same, name, real
from .shared_rules import SPEED
from .training_keys import TRAINING, revision, workers
from .trl_data import data
from .trl_trainers import RATES, objective


def texts(c: Conversion) -> None:
    """Write the longest example, packing, and the tokens that are trained."""
    key = c.first("max_length", "max_seq_length")
    limit = c.get(key, 1024)
    unlimited = limit in ("None", "none", "null") or (key in c.settings and c.get(key) is None)
    longest = 1024 if unlimited else c.whole(key, 1024)
    if unlimited:
        c.set("data.too_long", "error", key, comment="no example is cut; raise data.max_length")
    else:
        c.set("data.max_length", longest, key)
    if c.trainer == "reward":
        c.set("data.too_long", "drop", comment="TRL drops longer pairs of `trl reward`")
    if c.trainer == "sft":
        _packing(c, longest)
        _trained_tokens(c)
    column = c.get("dataset_text_field", "text")
    if column != "text":
        c.set("data.columns", {"text": str(column)}, "dataset_text_field")


def _packing(c: Conversion, longest: int) -> None:
    if not c.on("packing"):
        return
    strategy = str(c.get("packing_strategy", "bfd"))
    if strategy not in ("bfd", "bfd_split", "bfd-requeue", "ffd"):
        c.leave(
            "packing_strategy",
            'it cuts examples anywhere; use "bfd", as written here, which keeps them whole',
        )
    steps.set_packing(c, longest, "packing", "packing_strategy")
    if strategy in ("bfd_split", "bfd-requeue"):
        c.leave(
            "packing_strategy",
            'examples are cut at data.max_length; use overlong = "split" with a larger one',
        )


def _trained_tokens(c: Conversion) -> None:
    row = sources.first_row(c)
    completion, pairs = c.get("completion_only_loss"), {"prompt", "completion"} <= row.keys()
    if c.on("assistant_only_loss"):
        c.set("data.train_on", "assistant", "assistant_only_loss")
    elif c.on("completion_only_loss") or (completion is None and pairs):
        c.set("data.train_on", "assistant", "completion_only_loss", comment="the completion alone")
    else:
        c.set("data.train_on", "all", "assistant_only_loss", comment="every token of a chat")
        if completion is None and not row:
            c.remarks.append(
                "TRL trains every token of a chat or text, but only the completion of rows with "
                'prompt and completion; if yours have these, set data.train_on = "assistant"'
            )


def template(c: Conversion) -> None:
    """Write the chat template: a text becomes a file."""
    path, text = c.get("chat_template_path"), c.get("chat_template")
    if path is not None and str(path).endswith((".jinja", ".j2")):
        c.set("model.chat_template", str(path), "chat_template_path")
    elif path is not None:
        c.leave("chat_template_path", "use model.chat_template with that tokenizer's Jinja file")
    elif text is not None and ("{{" in str(text) or "{%" in str(text)):
        c.files["jinja"] = str(text)
        c.set("model.chat_template", "FILE.jinja", comment="chat_template")
    elif text is not None:
        c.leave("chat_template", "use model.chat_template with a Jinja file")


def precision(c: Conversion) -> None:
    """Remark on weights that TRL stores in bfloat16."""
    key = c.first("dtype", "torch_dtype")
    kind = str(c.get(key, "float32"))
    if kind == "float16":
        c.leave(key, 'weights stay in float32; use model.dtype = "float16" to compute in float16')
    elif kind in ("bfloat16", "auto") and not c.on("use_peft"):
        c.remarks.append(
            f"{key}: {kind}: plugsft stores trained weights in float32, which loses no small steps "
            'and takes 16 bytes a weight; model.weights = "bfloat16" stores them as TRL does'
        )


def lora(c: Conversion) -> None:
    """Write adapters and quantization."""
    adapters = c.on("use_peft")
    if adapters:
        lora_settings.set_lora(c, r=16, alpha=32, dropout=0.05)
        if c.trainer != "sft" and c.get("disable_dropout", True):
            c.set(
                "plugins.lora.dropout",
                0.0,
                "lora_dropout",
                comment=f"disable_dropout: true of `trl {c.trainer}`",
            )
        _targets(c)
        lora_settings.set_variants(c, "use_rslora", "use_dora")
    for bits in (4, 8):
        if c.on(f"load_in_{bits}bit"):
            lora_settings.set_quantization(c, bits, adapters, f"load_in_{bits}bit")


def _targets(c: Conversion) -> None:
    value = c.get("lora_target_modules")
    if value is not None:
        lora_settings.set_targets(c, value, "lora_target_modules")
        return
    names = lora_settings.peft_default(c, str(c.get("model_name_or_path", "")))
    comment = "peft's default for Llama, Mistral, Qwen and Gemma"
    c.set("plugins.lora.targets", names or ["q_proj", "v_proj"], comment=comment)


def offload(c: Conversion) -> None:
    """Write the offloading of activations."""
    if c.on("activation_offloading"):
        c.plugin("activation_offload", "activation_offloading")


SYNC = "the reference is the model before training; use plugins.dpo.reference for another"
NOT_DPO = Named("plugsft's DPO has no such term; use the losses of docs/preferences.md")


MIXTURES = ("datasets", "dataset_mixture.datasets")
READ = ("path", "id", "data_files", "config", "name", "split", "weight", "fraction")
"""Keys of a data set that `data` reads."""


RULES: dict[str, Rule] = {
    "model_name_or_path": Copy("model.path", read=name),
    "model_revision": Copy("model.revision", read=revision),
    "torch_dtype": By(precision),
    "dtype": By(precision),
    "dataset_name": By(data),
    "dataset_config": By(data),
    "dataset_train_split": By(data),
    "dataset_test_split": By(data),
    "dataset_splits": By(data),
    "dataset_mixer": By(data, whole=True),
    "dataset_mixture": By(data),
    **{f"{key}[].{name}": By(data) for key in MIXTURES for name in READ},
    **{f"{key}[].columns": SPEED for key in MIXTURES},
    "dataset_mixture.test_split_size": By(data),
    "dataset_mixture.seed": SPEED,  # the order of rows is train.seed's
    "datasets": By(data),
    "datasets[].data_dir": Named("use data.source = FOLDER"),
    "test_split_size": By(data),
    "dataset_streaming": Same(
        (False,), "rows are read once and kept as tokens; use `plugsft prepare`"
    ),
    "streaming": Same((False,), "rows are read once and kept as tokens; use `plugsft prepare`"),
    "max_length": By(texts),
    "max_seq_length": By(texts),
    "packing": By(texts),
    "packing_strategy": By(texts),
    "eval_packing": SPEED,
    "padding_free": SPEED,
    "pad_to_multiple_of": SPEED,
    "dataset_text_field": By(texts),
    "completion_only_loss": By(texts),
    "assistant_only_loss": By(texts),
    "truncation_mode": Same(("keep_start",), "the end is cut; use data.too_long"),
    "max_prompt_length": Named(
        "prompts have no limit of their own; longer examples are cut "
        "at data.max_length, as in TRL 1; use data.too_long"
    ),
    "shuffle_dataset": SPEED,
    "dataset_kwargs": SPEED,
    "chat_template": By(template),
    "chat_template_path": By(template),
    "eos_token": Named(
        "the tokenizer's end-of-text token is used; use model.tokenizer with a "
        "copy that has another"
    ),
    "pad_token": SPEED,
    "dataset_num_proc": By(workers("dataset_num_proc")),
    "preprocessing_num_workers": By(workers("preprocessing_num_workers")),
    "loss_type": By(objective),
    "beta": By(objective),
    "label_smoothing": By(objective),
    "desirable_weight": By(objective),
    "undesirable_weight": By(objective),
    "center_rewards_coefficient": By(objective),
    "precompute_ref_log_probs": By(objective),
    "precompute_ref_batch_size": SPEED,
    "disable_dropout": By(lora),
    "loss_weights": NOT_DPO,
    "ld_alpha": NOT_DPO,
    "f_divergence_type": Same(("reverse_kl",), NOT_DPO.reason),
    "use_weighting": Same((False,), NOT_DPO.reason),
    "sync_ref_model": Same((False,), SYNC),
    "use_peft": By(lora),
    **{f"lora_{name}": By(lora) for name in ("r", "alpha", "dropout", "target_modules")},
    "lora_modules_to_save": By(lora),
    "lora_target_parameters": Named("use plugins.lora.experts = true for experts"),
    "lora_task_type": SPEED,
    "use_rslora": By(lora),
    "use_dora": By(lora),
    "load_in_4bit": By(lora),
    "load_in_8bit": By(lora),
    "bnb_4bit_quant_type": Same(("nf4",), 'use kind = "nf4"'),
    "use_bnb_nested_quant": Same((True,), "scales are quantized, too; use true"),
    "bnb_4bit_quant_storage": SPEED,
    "router_aux_loss_coef": Named("use [plugins.router_loss] weight; it counts per example"),
    "activation_offloading": By(offload),
    "hub_model_revision": Named("[plugins.push] uploads to the main branch; use `hf upload`"),
    "ignore_bias_buffers": SPEED,
    **TRAINING,
}
"""TRL's table. Functions run in its order: packing before batches, rows before steps."""


def rules(c: Conversion) -> Rules:
    """Return the table of a trainer: each has its own default learning rate."""
    rate = Copy("train.learning_rate", RATES[c.trainer], real)
    return RULES | {"learning_rate": rate}
