"""axolotl's keys that need no line in a recipe, or have no meaning in one."""

from .conversion import By, Conversion, Named, Rule, Same
from .shared_rules import LOSS, PARALLEL, SPEED


def cache(c: Conversion) -> None:
    """Write the folder of prepared data."""
    if c.get("dataset_prepared_path"):
        c.plugin("arrow_cache", "dataset_prepared_path", folder=str(c.get("dataset_prepared_path")))


TOKENS = Named("the tokenizer's own is used; use model.tokenizer = FOLDER with a changed copy")
METHOD = Named("plugsft has no such method; use [plugins.lora], or all weights")
ONLINE = Named("for runs that generate while they train; use axolotl for these")
QUANTIZED = Named("no training for quantized use; use [plugins.fp8], or quantize the trained model")
SWANLAB = Named("[plugins.tracker] does not send to SwanLab; use wandb or tensorboard")
SAME_RESULTS = {
    "kernels": (
        *("use_kernels", "fused_attn_kernel", "flex_attn_compile_kwargs", "flash_optimum"),
        *("flash_attn_cross_entropy", "flash_attn_rms_norm", "flash_attn_fuse_mlp"),
        *("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "unsloth_lora_mlp", "tiled_mlp"),
        *("liger_rms_norm_gated", "gemma4_hybrid_attn_impl", "gptq_disable_exllama"),
    ),
    "experts": (
        *("experts_implementation", "use_scattermoe", "use_sonicmoe", "use_glm_dsa_kernels"),
        *("use_dsv4_kernels", "dsv4_fp4_grouped_mode"),
        *("expert_parallel_num_nvl_bytes", "expert_parallel_token_capacity"),
    ),
    "loading of model and tokenizer": (
        *("model_type", "is_llama_derived_model", "torch_dtype", "low_cpu_mem_usage", "device_map"),
        *("base_model_ignore_patterns", "experimental_skip_move_to_device", "hf_use_auth_token"),
        *("full_finetune", "lora_fan_in_fan_out", "lora_on_cpu"),
        *("tokenizer_type", "tokenizer_use_fast", "special_tokens.pad_token", "tokens.pad_token"),
    ),
    "reading of data": (
        *("dataset_processes", "skip_prepare_dataset", "shuffle_buffer_size"),
        "streaming_multipack_buffer_size",
    ),
    "packing and padding": (
        *("sample_packing_group_size", "sample_packing_bin_size", "sample_packing_eff_est"),
        *("eval_sample_packing", "pad_to_sequence_len"),
        "pad_to_multiple_of",
    ),
    "ranks": ("ddp", "fsdp_version", "accelerator_config.gradient_accumulation_kwargs"),
    "checks and output": ("strict", "debug", "eval_batch_size", "save_safetensors"),
}
"""Subject -> keys that change speed, memory or files, and no result."""
OTHERS: dict[str, Rule] = {
    **{key: SPEED for keys in SAME_RESULTS.values() for key in keys},
    # Model and tokenizer.
    "model_config": Named("use a copy of the model's folder with a changed config.json"),
    "cls_model_config": Named("use model.path; transformers chooses the class"),
    "num_labels": Named("a reward model has one output; use [plugins.reward]"),
    "unfrozen_parameters": Named(
        "all weights are trained, or adapters; use modules_to_save of [plugins.lora]"
    ),
    "freeze_mm_modules": Named("plugsft trains on texts alone; use a text model"),
    "special_tokens": TOKENS,
    "tokens": TOKENS,
    "added_tokens_overrides": TOKENS,
    "tokenizer_legacy": TOKENS,
    "tokenizer_use_mistral_common": Named("transformers' tokenizer is used; use its template"),
    "resize_token_embeddings_to_32x": Named("embeddings grow with model.add_tokens alone; use it"),
    # Quantization and experts.
    "gptq": Same((False,), "plugsft quantizes itself; use [plugins.quantize]"),
    "bnb_config_kwargs.bnb_4bit_use_double_quant": Same((True,), "scales are quantized, too"),
    "bnb_config_kwargs": Named('weights are stored as NF4; use [plugins.quantize] kind = "int8"'),
    "model_quantization_config": Named("use [plugins.quantize] on a model in bfloat16"),
    "model_quantization_config_kwargs": Named("use [plugins.quantize], or a model in bfloat16"),
    "quantize_moe_experts": Named(
        "experts' weights stay in bfloat16; use [plugins.quantize] for the linear layers"
    ),
    **dict.fromkeys(("qat", "quantization", "llmcompressor", "nvfp4_merge_aware"), QUANTIZED),
    "fp8": Named("it rounds otherwise; use [plugins.fp8] with [plugins.compile]"),
    "fp8_enable_fsdp_float8_all_gather": Named("weights move in bfloat16; use [plugins.fp8]"),
    "llama4_linearized_experts": Named("use plugins.lora.experts = true"),
    "lora_target_parameters": Named("use plugins.lora.experts = true"),
    # Methods and losses.
    **dict.fromkeys(
        (
            *("lisa_n_layers", "lisa_step_interval", "lisa_layers_attribute", "use_onebitllms"),
            *("relora", "relora_prune_ratio", "relora_cpu_offload", "reinit_weights"),
            "peft.loftq_config",
        ),
        METHOD,
    ),
    **dict.fromkeys(("use_eaft", "eaft_alpha", "eaft_k", "diffusion"), LOSS),
    **dict.fromkeys(("ebft", "trl", "vllm"), ONLINE),
    # Data.
    "dataset_prepared_path": By(cache),
    "min_sample_len": Named("use data without shorter rows"),
    "dataset_exact_deduplication": Named("`plugsft inspect` counts duplicates; use other data"),
    "pretrain_multipack_attn": Same(
        (True,), "packed documents attend to themselves alone; use them so"
    ),
    "streaming": Named("rows are read once and kept as tokens; use `plugsft prepare`"),
    "sample_packing_sequentially": Named('rows are packed by length; use scope = "step"'),
    "curriculum_sampling": Named("examples are shuffled; use a plugin with `order_examples`"),
    # Schedule.
    "lr_quadratic_warmup": Named("the warm-up is a line; use a plugin with `schedule`"),
    **dict.fromkeys(
        ("jagged_restart_steps", "jagged_restart_warmup_steps", "jagged_restart_anneal_steps"),
        Named('use train.schedule = "cosine_with_restarts"'),
    ),
    "eta_min": Named("axolotl ignores it with this schedule; use train.schedule_options"),
    "adam_eps": Named("axolotl has no such key, and ignores it; use train.eps"),
    # Evaluations and watching.
    "eval_table_size": Named("use [plugins.samples], which writes answers while it trains"),
    "eval_max_new_tokens": Named("use plugins.samples.max_new_tokens"),
    "eval_causal_lm_metrics": Named("evaluations measure the loss; use [plugins.samples]"),
    "do_causal_lm_eval": Named("evaluations measure the loss; use [plugins.samples]"),
    "loss_watchdog_threshold": Named(
        "a loss that is not finite stops the run; use a plugin with `logged` for a threshold"
    ),
    "loss_watchdog_patience": Named("see loss_watchdog_threshold; use a plugin with `logged`"),
    # Trackers.
    **dict.fromkeys(
        ("wandb_entity", "wandb_run_id", "wandb_log_model", "wandb_mode"),
        Named("use the environment variables of wandb"),
    ),
    **dict.fromkeys(
        (
            *("use_swanlab", "swanlab_project", "swanlab_experiment_name", "swanlab_description"),
            *("swanlab_workspace", "swanlab_mode", "swanlab_log_model", "swanlab_log_completions"),
            *("swanlab_completion_log_interval", "swanlab_completion_max_buffer"),
        ),
        SWANLAB,
    ),
    "use_otel_metrics": Named("use [plugins.tracker]"),
    "otel_metrics_host": Named("use [plugins.tracker]"),
    "otel_metrics_port": Named("use [plugins.tracker]"),
    # Ranks and resuming.
    "tensor_parallel_size": Same((1,), PARALLEL),
    "context_parallel_size": Same((1,), PARALLEL),
    "context_parapllel_size": Named("axolotl has no such key; use FSDP2 on more GPUs"),
    "expert_parallel_size": Same((1,), PARALLEL),
    "dp_replicate_size": Same((1,), PARALLEL),
    "use_ray": Named("use `plugsft launch`, or recipes/launch/ for Ray Train"),
    "ray_num_workers": Named("use `plugsft launch RECIPE --ranks N`"),
    "auto_resume_from_checkpoints": Named("use `plugsft RECIPE --resume auto`"),
    "resume_from_checkpoint": Named("use `plugsft RECIPE --resume-from CHECKPOINT`"),
    "test_value": Named("axolotl has no use for it"),
}
