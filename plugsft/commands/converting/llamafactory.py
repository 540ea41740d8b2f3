"""LLaMA-Factory's keys."""

from ...base.errors import RecipeError
from . import lora_settings, steps
from .conversion import By, Conversion, Copy, Named, Rule, Rules, Same, name
from .llamafactory_data import data, names_of
from .shared_rules import LOSS, PARALLEL, SPEED
from .training_keys import TRAINING, revision, workers

LOSSES = {name: name for name in ("sigmoid", "hinge", "ipo", "orpo", "simpo")}
STAGES = ("sft", "pt", "rm", "dpo", "kto")


def stage(c: Conversion) -> None:
    """Refuse runs that plugsft cannot do; write the objective."""
    name = c.get("stage", "sft")
    if c.get("export_dir") and not c.get("dataset"):
        raise c.refuse("export_dir", "merges adapters; use `plugsft export MODEL --merge --to OUT`")
    if name not in STAGES:
        raise c.refuse(
            "stage",
            "plugsft trains on rows, and generates none while it trains; use "
            "LLaMA-Factory for this run",
        )
    kind = c.get("finetuning_type", "lora")
    if kind not in ("lora", "full"):
        raise c.refuse("finetuning_type", "plugsft trains all weights or LoRA; use one of them")
    if name == "dpo":
        _preferences(c)
    elif name == "kto":
        c.plugin("kto", "pref_beta", beta=float(c.number("pref_beta", 0.1)))
        for ours, theirs in (("desirable", "chosen"), ("undesirable", "rejected")):
            key = f"kto_{theirs}_weight"
            c.set(f"plugins.kto.{ours}_weight", float(c.number(key, 1.0)), key)
    elif name == "rm":
        c.plugin("reward", "stage")


def _preferences(c: Conversion) -> None:
    loss = str(c.get("pref_loss", "sigmoid"))
    if loss not in LOSSES:
        raise c.refuse("pref_loss", f"plugsft has no such loss; use {', '.join(LOSSES)}")
    c.plugin("dpo", "pref_loss", loss=LOSSES[loss])
    c.set("plugins.dpo.beta", float(c.number("pref_beta", 0.1)), "pref_beta")
    if loss == "simpo":
        c.set("plugins.dpo.gamma", float(c.number("simpo_gamma", 0.5)), "simpo_gamma")
    if c.number("dpo_label_smoothing", 0):
        smoothing = float(c.number("dpo_label_smoothing", 0))
        c.set("plugins.dpo.label_smoothing", smoothing, "dpo_label_smoothing")
    if c.number("pref_ftx", 0):
        c.set("plugins.dpo.nll", float(c.number("pref_ftx", 0)), "pref_ftx")


def texts(c: Conversion) -> None:
    """Write the longest example, packing, and the tokens that are trained."""
    longest = c.whole("cutoff_len", 2048)
    c.set("data.max_length", longest, "cutoff_len", comment="longer ones are cut at their end")
    plain = c.get("stage", "sft") == "pt"
    if c.on("packing", default=plain) or c.on("neat_packing"):
        steps.set_packing(c, longest, "neat_packing", "packing")
        if not c.on("neat_packing"):
            c.remarks.append(
                "packed examples attend to themselves alone, as with neat_packing: true; with "
                "packing alone, LLaMA-Factory lets them attend to each other"
            )
    if plain or c.on("train_on_prompt"):
        c.set("data.train_on", "all", "train_on_prompt", comment="every token")
    elif c.on("mask_history"):
        c.set("data.train_on", "last", "mask_history")
    else:
        c.set("data.train_on", "assistant", "train_on_prompt", comment="every answer")


def lora(c: Conversion) -> None:
    """Write adapters and quantization."""
    adapters = c.get("finetuning_type", "lora") == "lora"
    if adapters:
        _adapters(c)
    if c.get("quantization_bit"):
        bits = c.whole("quantization_bit", 0)
        lora_settings.set_quantization(c, bits, adapters, "quantization_bit")


def _adapters(c: Conversion) -> None:
    r = c.whole("lora_rank", 8)
    c.set("plugins.lora.r", r, "lora_rank")
    alpha = c.whole("lora_alpha", 2 * r)
    c.set("plugins.lora.alpha", alpha, "lora_alpha")
    dropout = 0.0 if c.get("stage") in ("dpo", "kto") else float(c.number("lora_dropout", 0.0))
    c.set("plugins.lora.dropout", dropout, "lora_dropout")
    targets = names_of(c, "lora_target", "all")
    targets = ["all-linear"] if targets == ["all"] else targets
    lora_settings.set_targets(c, targets, "lora_target")
    if c.get("additional_target"):
        extra = names_of(c, "additional_target")
        c.set("plugins.lora.modules_to_save", extra, "additional_target")
    lora_settings.set_variants(c, "use_rslora", "use_dora")
    lora_settings.set_loraplus(c)
    lora_settings.set_adapter(c, "adapter_name_or_path")


def memory(c: Conversion) -> None:
    """Write gradient checkpointing, which is on by default."""
    if not c.on("disable_gradient_checkpointing"):
        c.plugin("gradient_checkpointing", "disable_gradient_checkpointing")
    else:
        c.lines.pop("plugins.gradient_checkpointing", None)


def weights(c: Conversion) -> None:
    """Write bfloat16 weights, if all are to be stored so."""
    if c.on("pure_bf16"):
        c.set("model.dtype", "bfloat16", "pure_bf16")
        if c.get("finetuning_type", "lora") == "full":
            c.set("model.weights", "bfloat16", "pure_bf16")


def tokens(c: Conversion) -> None:
    """Write the tokens that are added."""
    keys = ("add_tokens", "add_special_tokens")
    if names := [name for key in keys for name in names_of(c, key)]:
        c.set("model.add_tokens", names, *keys)


def model(c: Conversion) -> None:
    """Refuse a configuration without a model."""
    if not c.get("model_name_or_path"):
        raise RecipeError(f"{c.path}: names no model; set model_name_or_path")


def stopping(c: Conversion) -> None:
    """Write early stopping."""
    if c.get("early_stopping_steps"):
        patience = c.whole("early_stopping_steps", 0)
        c.plugin("early_stopping", "early_stopping_steps", patience=patience)


TEMPLATE = Named(
    "LLaMA-Factory brings a template of this name; here the model's own writes the rows; use "
    "model.chat_template = FILE.jinja for another, and `plugsft inspect` to see it"
)
MEDIA = Named("for images and videos, which plugsft does not read; use LLaMA-Factory for these")
OPTIMIZER = Named(
    "plugsft has no such optimizer, and trains with AdamW; use "
    "[plugins.torch_optimizer], or a plugin of your own"
)
EXPORT = Named("use `plugsft export MODEL --merge --to OUT`")
KT = Named("plugsft computes experts on the GPU alone; use plugins.lora.experts")
RULES: dict[str, Rule] = {
    "model_name_or_path": Copy("model.path", read=name),
    "model_revision": Copy("model.revision", read=revision),
    "stage": By(stage),
    "finetuning_type": By(stage),
    **dict.fromkeys(
        ("pref_loss", "pref_beta", "pref_ftx", "simpo_gamma", "dpo_label_smoothing"), By(stage)
    ),
    **dict.fromkeys(("kto_chosen_weight", "kto_rejected_weight"), By(stage)),
    **dict.fromkeys(
        ("dataset", "dataset_dir", "eval_dataset", "val_size", "max_samples"), By(data)
    ),
    **dict.fromkeys(("cutoff_len", "packing", "neat_packing"), By(texts)),
    **dict.fromkeys(("train_on_prompt", "mask_history"), By(texts)),
    "use_packed_sequences": Same((False,), "use packing: true"),
    "preprocessing_num_workers": By(workers("preprocessing_num_workers")),
    **{f"lora_{name}": By(lora) for name in ("rank", "alpha", "dropout", "target")},
    **dict.fromkeys(("additional_target", "use_rslora", "use_dora"), By(lora)),
    **dict.fromkeys(("loraplus_lr_ratio", "adapter_name_or_path", "quantization_bit"), By(lora)),
    "pissa_init": Same((False,), "adapters start from zero; use LLaMA-Factory for PiSSA"),
    "pissa_iter": SPEED,
    "pissa_convert": SPEED,
    "quantization_method": Same(("bnb", "bitsandbytes"), "use [plugins.quantize]"),
    "quantization_type": Same(("nf4",), 'use kind = "nf4"'),
    "double_quantization": Same((True,), "scales are quantized, too; use the default"),
    **TRAINING,
    "disable_gradient_checkpointing": By(memory),
    "pure_bf16": By(weights),
    "add_tokens": By(tokens),
    "add_special_tokens": By(tokens),
    "early_stopping_steps": By(stopping),
    "template": TEMPLATE,
    "default_system": Named("add a system message to the rows; use the data, or a template"),
    "tool_format": Named("the model's chat template writes calls; use model.chat_template"),
    "enable_thinking": Named("use data.template_kwargs = { enable_thinking = false }"),
    "ref_model": Copy("plugins.dpo.reference", read=name),
    **dict.fromkeys(
        (
            *("overwrite_cache", "preprocessing_batch_size", "use_reentrant_gc", "use_v1_kernels"),
            *("use_fast_tokenizer", "low_cpu_mem_usage", "use_unsloth", "use_unsloth_gc"),
            *("resize_vocab", "include_effective_tokens_per_second", "print_param_status"),
            *("overlap_param_gather", "overlap_grad_reduce", "bias_activation_fusion"),
            *("apply_rope_fusion", "moe_grouped_gemm", "moe_token_dispatcher_type"),
            *("recompute_granularity", "use_distributed_optimizer", "export_hf_on_finish"),
            *("infer_backend", "infer_dtype", "cache_dir", "data_shared_file_system"),
        ),
        SPEED,
    ),
    "mixed_precision": Same(("bf16_mixed",), 'use model.dtype = "bfloat16"'),
    **dict.fromkeys(
        (
            *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
            *("expert_model_parallel_size", "context_parallel_size"),
        ),
        Same((1,), PARALLEL),
    ),
    "sequence_parallel": Same((False,), PARALLEL),
    "tokenized_path": Named("use data.tokens = FOLDER of `plugsft prepare`"),
    "streaming": Same((False,), "rows are read once and kept as tokens; use `plugsft prepare`"),
    "mix_strategy": Same(("concat",), "use the weight of each of [[data.sources]]"),
    "do_predict": Named("use `plugsft chat`, or [plugins.samples] while it trains"),
    "predict_with_generate": Named("use [plugins.samples], which writes answers while it trains"),
    "disable_shuffling": Same((False,), "use a plugin with `order_examples`"),
    "rope_scaling": Named("use a copy of the model's folder with a changed config.json"),
    "moe_aux_loss_coef": Named("use [plugins.router_loss] weight; it counts per example"),
    "ray_num_workers": Named("use `plugsft launch RECIPE --ranks N`"),
    "fp8": Named("it rounds otherwise; use [plugins.fp8] with [plugins.compile]"),
    "fp8_backend": Named("use [plugins.fp8], which has torchao's kernels"),
    "fp8_enable_fsdp_float8_all_gather": Same(
        (False,), "weights move in bfloat16; use [plugins.fp8]"
    ),
    **dict.fromkeys(("image_max_pixels", "image_min_pixels", "video_max_pixels"), MEDIA),
    **dict.fromkeys(("video_min_pixels", "video_fps", "video_maxlen", "media_dir"), MEDIA),
    **dict.fromkeys(("freeze_vision_tower", "freeze_multi_modal_projector"), MEDIA),
    "freeze_language_model": Same((False,), MEDIA.reason),
    **dict.fromkeys(
        (
            *("use_galore", "galore_layerwise", "galore_target", "galore_rank", "galore_scale"),
            *("use_apollo", "apollo_layerwise", "apollo_target", "apollo_rank", "apollo_scale"),
            *("apollo_scale_type", "use_adam_mini", "use_muon", "use_badam", "badam_mode"),
            *("badam_switch_mode", "badam_switch_interval", "badam_verbose"),
        ),
        OPTIMIZER,
    ),
    **dict.fromkeys(("use_dft_loss", "use_asft_loss", "asft_alpha", "use_eaft_loss"), LOSS),
    **dict.fromkeys(
        ("oft_block_size", "oft_target", "oft_rank"), Named("for OFT; use [plugins.lora]")
    ),
    **dict.fromkeys(
        ("freeze_trainable_layers", "freeze_trainable_modules", "use_llama_pro"),
        Named("plugsft trains all layers, or adapters; use [plugins.lora]"),
    ),
    "mixture_of_depths": Named("use a copy of the model that has it"),
    "use_kt": KT,
    "kt_config": KT,
    **dict.fromkeys(("kt_cpu_activation", "kt_weight_path", "kt_non_expert_weight_path"), KT),
    **{f"export_{name}": EXPORT for name in ("dir", "size", "device", "legacy_format")},
    "export_quantization_bit": Named("use a server's own quantization: see docs/serving.md"),
    "export_quantization_dataset": Named("use a server's own quantization: see docs/serving.md"),
}
"""LLaMA-Factory's table. Functions run in its order."""


def rules(c: Conversion) -> Rules:
    """Return LLaMA-Factory's table."""
    return RULES
