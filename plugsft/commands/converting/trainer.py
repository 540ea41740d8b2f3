"""Arguments of transformers' trainer, which TRL and LLaMA-Factory share."""

from . import training
from .conversion import Conversion, Copied

COPIED: Copied = {
    **training.SHARED,
    "output_dir": ("output", "trainer_output"),
    "save_total_limit": ("checkpoint.keep", int),
    "torch_compile": ("plugins.compile", dict),
    "dataset_num_proc": ("plugins.multiprocess_tokenize.workers", int),
    "preprocessing_num_workers": ("plugins.multiprocess_tokenize.workers", int),
}
SAME = (
    *training.SAME,
    *("ddp_timeout", "dataloader_num_workers", "overwrite_output_dir", "plot_loss"),
    *("do_eval", "per_device_eval_batch_size", "log_level"),
    *("hub_model_id", "hub_strategy", "eval_steps", "eval_strategy"),
    *("save_steps", "warmup_ratio", "fsdp", "group_by_length"),
)
"""Keys that need no line."""
USUAL = {"do_train": (True,), "logging_strategy": ("steps",)}
"""Keys that need no line if they have these values."""
UNLIKE = {
    **training.UNLIKE,
    "hub_token": "a recipe holds no secrets; use the environment variable HF_TOKEN",
}
"""Keys that are not converted."""


def set_training(c: Conversion, rate: float) -> None:
    """Write what the trainer reads; sources, packing and adapters come before."""
    c.copy(COPIED)
    c.copy(
        {"learning_rate": ("train.learning_rate", rate), "model_name_or_path": ("model.path", str)}
    )
    if c.get("model_revision") != "main":
        c.copy({"model_revision": ("model.revision", str)})
    training.set_batch(c, "per_device_train_batch_size", "gradient_accumulation_steps", 8)
    training.set_length(c, "num_train_epochs", 3.0)
    training.set_schedule(c, "lr_scheduler_type", "linear")
    training.set_warmup(c, 0.0)
    training.set_optimizer(c, "optim")
    training.set_precision(c, default=c.tool == "TRL")
    training.set_attention(c, c.first("attn_implementation", "flash_attn"))
    every = 10 if c.tool == "TRL" else 500
    c.copy({"logging_steps": ("train.log_every", every)})
    training.set_saving(c, "steps")
    _set_evaluation(c, float(every))
    training.set_trackers(c, c.names("report_to"), "report_to", "run_name", "project")
    _set_push(c)
    if "plugins.lora.r" not in c.lines:
        c.copy({"use_liger_kernel": ("plugins.liger", dict)})
    c.copy({"use_liger_kernel": ("plugins.fused_loss", dict)})
    if not training.packs(c):
        c.copy({"group_by_length": ("plugins.length_group", dict)})
    training.set_launcher(c)


def _set_evaluation(c: Conversion, every: float) -> None:
    """Write the steps between evaluations, if [eval] has rows."""
    if c.value("eval.split") is None:
        return
    if c.read("eval_strategy", "no") == "epoch":
        training.set_each_epoch(c, "eval.every", "eval_strategy")
    else:
        name = c.first("eval_steps", "logging_steps")
        training.set_interval(c, "eval.every", c.read(name, every), name)


def _set_push(c: Conversion) -> None:
    """Write the upload to the hub."""
    if c.read("push_to_hub", False):
        folder = c.read("output_dir", "model").rstrip("/")
        name = c.read("hub_model_id", folder.rpartition("/")[2])
        c.set("plugins.push.to", name, "push_to_hub", "hub_model_id")
        every = "model" if c.get("hub_strategy") == "end" else "checkpoint"
        c.set("plugins.push.every", every, "hub_strategy")
