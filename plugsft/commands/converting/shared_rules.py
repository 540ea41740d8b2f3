"""Rules of keys that have one meaning and one default in all tools."""

from .conversion import Copy, Named, Rule, Same, real, switch, whole

SPEED = Same(())
"""For keys that change speed or memory alone."""
PARALLEL = "plugsft shards data and weights only; use FSDP2 or ZeRO-3 on more GPUs"
LOSS = Named("plugsft has no such loss; use a plugin that implements `step`")
OFFLOAD = Same((False,), "shards stay on the GPU; use more GPUs")
SHARED: dict[str, Rule] = {
    "trust_remote_code": Copy("model.trust_remote_code", read=switch),
    "weight_decay": Copy("train.weight_decay", 0.0, real),
    "adam_beta1": Copy("train.beta1", 0.9, real),
    "adam_beta2": Copy("train.beta2", 0.999, real),
    "adam_epsilon": Copy("train.eps", 1e-8, real),
    "max_grad_norm": Copy("train.max_grad_norm", 1.0, real),
    "seed": Copy("train.seed", 42, whole),
    "save_only_model": Same(
        (False,),
        "checkpoints hold what a resumed run needs; use checkpoint.every = 0 for none but the last",
    ),
    "fsdp_config.offload_params": OFFLOAD,
    "fsdp_config.fsdp_offload_params": OFFLOAD,
    "torch_compile_mode": SPEED,
    "gradient_checkpointing_kwargs": SPEED,
    "remove_unused_columns": SPEED,
    "dataloader_num_workers": SPEED,
    "dataloader_pin_memory": SPEED,
    "dataloader_prefetch_factor": SPEED,
    "ddp_timeout": SPEED,
    "ddp_find_unused_parameters": SPEED,
}
