"""axolotl's keys that need no line in a recipe, or have no meaning in one."""

from .conversion import By, Conversion, Named, Rule, Same
from .training_keys import SPEED


def cache(c: Conversion) -> None:
    """Write the folder of prepared data."""
    if c.get("dataset_prepared_path"):
        c.plugin("arrow_cache", "dataset_prepared_path", folder=str(c.get("dataset_prepared_path")))


PARALLEL = "plugsft shards data and weights only; use FSDP2 or ZeRO-3 on more GPUs"
TOKENS = Named("the tokenizer's own is used; use model.tokenizer = FOLDER with a changed copy")
LOSS = Named("plugsft has no such loss; use a plugin that implements `step`")
METHOD = Named("plugsft has no such method; use [plugins.lora], or all weights")
ONLINE = Named("for runs that generate while they train; use axolotl for these")
QUANTIZED = Named("no training for quantized use; use [plugins.fp8], or quantize the trained model")
SWANLAB = Named("[plugins.tracker] does not send to SwanLab; use wandb or tensorboard")
OFFLOAD = Same((False,), "shards stay on the GPU; use more GPUs")
OTHERS: dict[str, Rule] = {
    "dataset_prepared_path": By(cache),
    # Speed, memory and output: the results are the same.
    **dict.fromkeys(
        (
            *("tf32", "strict", "model_type", "tokenizer_type", "pad_to_sequence_len"),
            *("eval_sample_packing", "remove_unused_columns", "gradient_checkpointing_kwargs"),
            *("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "use_kernels", "debug"),
            *("use_scattermoe", "use_sonicmoe", "experts_implementation", "fused_attn_kernel"),
            *("eval_batch_size", "ddp_find_unused_parameters", "ddp_timeout", "low_cpu_mem_usage"),
            *(
                "flex_attn_compile_kwargs",
                "gemma4_hybrid_attn_impl",
                "use_dsv4_kernels",
                "fsdp_version",
            ),
            *(
                "use_glm_dsa_kernels",
                "use_dsv4_kernels",
                "liger_rms_norm_gated",
                "lora_fan_in_fan_out",
                "ddp",
            ),
            *("flash_attn_cross_entropy", "flash_attn_rms_norm", "flash_attn_fuse_mlp"),
            *("torch_compile_mode", "tokenizer_use_fast", "device_map", "save_safetensors"),
            *("hf_use_auth_token", "shuffle_buffer_size", "skip_prepare_dataset", "tiled_mlp"),
            *("experimental_skip_move_to_device", "dataset_processes", "dataloader_num_workers"),
            *("dataloader_pin_memory", "dataloader_prefetch_factor", "sample_packing_group_size"),
            *("sample_packing_bin_size", "sample_packing_eff_est", "special_tokens.pad_token"),
            *("tokens.pad_token", "pad_to_multiple_of", "is_llama_derived_model", "torch_dtype"),
            *(
                "expert_parallel_num_nvl_bytes",
                "expert_parallel_token_capacity",
                "lora_fan_in_fan_out",
            ),
            *(
                "base_model_ignore_patterns",
                "lora_fan_in_fan_out",
                "flash_optimum",
                "lora_on_cpu",
                "full_finetune",
            ),
            *("streaming_multipack_buffer_size", "dsv4_fp4_grouped_mode", "unsloth_lora_mlp"),
            "accelerator_config.gradient_accumulation_kwargs",
        ),
        SPEED,
    ),
    "gptq": Same((False,), "plugsft quantizes itself; use [plugins.quantize]"),
    "gptq_disable_exllama": SPEED,
    "fsdp_config.offload_params": OFFLOAD,
    "fsdp_config.fsdp_offload_params": OFFLOAD,
    "tensor_parallel_size": Same((1,), PARALLEL),
    "context_parallel_size": Same((1,), PARALLEL),
    "expert_parallel_size": Same((1,), PARALLEL),
    "dp_replicate_size": Same((1,), PARALLEL),
    "bnb_config_kwargs.bnb_4bit_use_double_quant": Same((True,), "scales are quantized, too"),
    "bnb_config_kwargs": Named('weights are stored as NF4; use [plugins.quantize] kind = "int8"'),
    "auto_resume_from_checkpoints": Named("use `plugsft RECIPE --resume auto`"),
    "resume_from_checkpoint": Named("use `plugsft RECIPE --resume-from CHECKPOINT`"),
    # No meaning in a recipe.
    "special_tokens": TOKENS,
    "tokens": TOKENS,
    "added_tokens_overrides": TOKENS,
    "tokenizer_use_mistral_common": Named("transformers' tokenizer is used; use its template"),
    "tokenizer_legacy": TOKENS,
    "resize_token_embeddings_to_32x": Named("embeddings grow with model.add_tokens alone; use it"),
    "model_config": Named("use a copy of the model's folder with a changed config.json"),
    "cls_model_config": Named("use model.path; transformers chooses the class"),
    "model_quantization_config": Named("use [plugins.quantize] on a model in bfloat16"),
    "model_quantization_config_kwargs": Named("use [plugins.quantize], or a model in bfloat16"),
    "quantize_moe_experts": Named(
        "experts' weights stay in bfloat16; use [plugins.quantize] for the linear layers"
    ),
    "llama4_linearized_experts": Named("use plugins.lora.experts = true"),
    "lora_target_parameters": Named("use plugins.lora.experts = true"),
    "unfrozen_parameters": Named(
        "all weights are trained, or adapters; use modules_to_save of [plugins.lora]"
    ),
    "freeze_mm_modules": Named("plugsft trains on texts alone; use a text model"),
    "num_labels": Named("a reward model has one output; use [plugins.reward]"),
    "loss_watchdog_threshold": Named(
        "a loss that is not finite stops the run; use a plugin with `logged` for a threshold"
    ),
    "loss_watchdog_patience": Named("see loss_watchdog_threshold; use a plugin with `logged`"),
    "min_sample_len": Named("use data without shorter rows"),
    "dataset_exact_deduplication": Named("`plugsft inspect` counts duplicates; use other data"),
    "streaming": Named("rows are read once and kept as tokens; use `plugsft prepare`"),
    "pretrain_multipack_attn": SPEED,
    "sample_packing_sequentially": Named('rows are packed by length; use scope = "step"'),
    "curriculum_sampling": Named("examples are shuffled; use a plugin with `order_examples`"),
    "lr_quadratic_warmup": Named("the warm-up is a line; use a plugin with `schedule`"),
    "eta_min": Named("axolotl ignores it with this schedule; use train.schedule_options"),
    "adam_eps": Named("axolotl has no such key, and ignores it; use train.eps"),
    **dict.fromkeys(
        ("jagged_restart_steps", "jagged_restart_warmup_steps", "jagged_restart_anneal_steps"),
        Named('use train.schedule = "cosine_with_restarts"'),
    ),
    "save_only_model": Same(
        (False,),
        "checkpoints hold what a resumed run needs; use checkpoint.every = 0 for none but the last",
    ),
    "eval_table_size": Named("use [plugins.samples], which writes answers while it trains"),
    "eval_max_new_tokens": Named("use plugins.samples.max_new_tokens"),
    "eval_causal_lm_metrics": Named("evaluations measure the loss; use [plugins.samples]"),
    "do_causal_lm_eval": Named("evaluations measure the loss; use [plugins.samples]"),
    **dict.fromkeys(
        ("use_comet", "comet_project_name", "comet_workspace"),
        Named("[plugins.tracker] does not send to Comet; use wandb or tensorboard"),
    ),
    "mlflow_tracking_uri": Named("use the environment variable MLFLOW_TRACKING_URI"),
    "mlflow_experiment_name": Named("use plugins.tracker.project"),
    **dict.fromkeys(
        ("wandb_entity", "wandb_run_id", "wandb_log_model", "wandb_mode"),
        Named("use the environment variables of wandb"),
    ),
    "use_otel_metrics": Named("use [plugins.tracker]"),
    "otel_metrics_host": Named("use [plugins.tracker]"),
    "otel_metrics_port": Named("use [plugins.tracker]"),
    "use_ray": Named("use `plugsft launch`, or recipes/launch/ for Ray Train"),
    "ray_num_workers": Named("use `plugsft launch RECIPE --ranks N`"),
    "fp8": Named("it rounds otherwise; use [plugins.fp8] with [plugins.compile]"),
    "fp8_enable_fsdp_float8_all_gather": Named("weights move in bfloat16; use [plugins.fp8]"),
    "context_parapllel_size": Named("axolotl has no such key; use FSDP2 on more GPUs"),
    "test_value": Named("axolotl has no use for it"),
    **dict.fromkeys(
        (
            "swanlab_project",
            "swanlab_experiment_name",
            "swanlab_description",
            "swanlab_mode",
            "swanlab_log_completions",
            "swanlab_completion_log_interval",
            "swanlab_workspace",
            "swanlab_completion_max_buffer",
            "swanlab_log_model",
            "use_swanlab",
        ),
        SWANLAB,
    ),
    **dict.fromkeys(("qat", "quantization", "llmcompressor", "nvfp4_merge_aware"), QUANTIZED),
    **dict.fromkeys(("ebft", "trl", "vllm"), ONLINE),
    **dict.fromkeys(("use_eaft", "eaft_alpha", "eaft_k", "diffusion"), LOSS),
    **dict.fromkeys(
        (
            "lisa_n_layers",
            "lisa_step_interval",
            "lisa_layers_attribute",
            "peft.loftq_config",
            "relora",
            "relora_prune_ratio",
            "relora_cpu_offload",
            "reinit_weights",
            "use_onebitllms",
        ),
        METHOD,
    ),
}
