"""TRL's runs of gpu.py, in a process of their own, with the settings that suit TRL best.

trl packs rows, with TRL's chunked loss (its only one) and the attention kernel that plugsft uses:
flash-attn if it is installed, or torch's own. Features: liger, checkpointing, compile, float32.
trl-default keeps TRL's own settings except for length, batch and dtype.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import shared
import torch
from datasets import Dataset, disable_progress_bars
from gpu_cases import RATE, WARM, Case, Contender, parse_case
from gpu_train import rows_per_step
from peft import LoraConfig
from torch import Tensor
from transformers import AttentionInterface, AutoTokenizer, TrainerCallback
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available
from trl import SFTConfig, SFTTrainer

from plugsft.base.machine import peak_memory
from plugsft.batches.plan import shuffle
from plugsft.plugins.bfd_packing.attention import attend as attend_documents
from plugsft.plugins.flash_attention import varlen
from plugsft.tokens.store import Tokens

ATTENTION = "plugsft_for_trl"
"""Name of plugsft's attention in transformers, as TRL calls it."""
FEATURES: dict[str, dict[str, Any]] = {
    "liger": {"use_liger_kernel": True},
    "checkpointing": {"gradient_checkpointing": True},
    "compile": {"torch_compile": True},
    "float32": {},
}


def main(arguments: dict[str, Any]) -> None:
    """Train, and write the figures."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # it would plan for each new length
    result = train(arguments)
    with Path(arguments["lines"]).open("a") as file:
        file.write(json.dumps(result) + "\n")


def train(arguments: dict[str, Any]) -> dict[str, Any]:
    """Train with TRL's trainer; nothing is logged or saved."""
    case, cpu = parse_case(arguments["case"]), arguments["cpu"]
    contender = Contender.parse(arguments["contender"])
    tokens = Tokens(Path(arguments["tokens"]))
    settings, options, notes = choose_settings(case, contender, cpu, float(tokens.lengths.mean()))
    settings["max_steps"] = WARM + case.steps
    trainer, clock = make_trainer(Path(arguments["folder"]), tokens, settings, options, case.lora)
    loss, grad_norm = run_first_step(trainer, tokens, case.chats(contender.rows))
    clock.reset()
    if not cpu:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    counts, seconds = clock.counts(), clock.seconds
    peak = peak_memory() if cpu else torch.cuda.max_memory_allocated()
    return {
        "loss": loss,
        "grad_norm": grad_norm,
        "seconds": seconds,
        "speed": sum(counts[WARM:]) / sum(seconds[WARM:]),
        "median_step_speed": float(np.median(np.divide(counts[WARM:], seconds[WARM:]))),
        "peak_gib": peak / 2**30,
        "notes": notes,
    }


class Clock(TrainerCallback):
    """Counts tokens without padding, and times the steps.

    It waits for the device after the steps that warm up and after the last, but not in between.
    """

    def __init__(self, steps: int) -> None:
        self.ends = (WARM, steps)
        self.reset()

    def reset(self) -> None:
        """Forget all steps."""
        self.seconds = list[float]()
        self.parts: list[list[Any]] = [[]]

    def count(self, inputs: dict[str, Any]) -> None:
        """Count a micro-batch's tokens, without waiting for the device."""
        mask = inputs.get("attention_mask")
        self.parts[-1].append(inputs["input_ids"].numel() if mask is None else mask.sum())

    def counts(self) -> list[float]:
        """Return the tokens of each step."""
        return [float(sum(parts)) for parts in self.parts[: len(self.seconds)]]

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self.started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note a step's seconds."""
        if torch.cuda.is_available() and len(self.seconds) + 1 in self.ends:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self.started)
        self.started = now
        self.parts.append([])


def make_trainer(
    folder: Path, tokens: Any, settings: dict[str, Any], options: dict[str, Any], lora: bool
) -> tuple[Any, Clock]:
    """Make TRL's trainer, and the clock that measures it."""
    disable_progress_bars()
    clock = Clock(settings["max_steps"])

    class Counted(SFTTrainer):
        """Counts the tokens of each micro-batch."""

        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
            clock.count(inputs)
            return super().compute_loss(model, inputs, *arguments, **options)  # type: ignore[no-untyped-call]  # untyped upstream

    adapters = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
    quiet: dict[str, Any] = {"logging_strategy": "no", "save_strategy": "no", "report_to": "none"}
    trainer = Counted(
        str(folder / "model"),
        SFTConfig(
            output_dir=str(folder / "trl"),
            model_init_kwargs=options,
            learning_rate=RATE,
            disable_tqdm=True,
            **quiet,
            **settings,
        ),
        train_dataset=Dataset(shared.trl_table(tokens)),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        peft_config=adapters if lora else None,
        callbacks=[clock],
    )
    return trainer, clock


def choose_settings(
    case: Case, contender: Contender, cpu: bool, mean: float
) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return TRL's settings, the options of its model, and a note about both."""
    settings: dict[str, Any] = {"use_cpu": cpu} | ({"bf16": False} if cpu else {})
    model = {"dtype": "float32" if "float32" in contender.features else case.dtype}
    if contender.trainer == "trl-default":
        micro = min(8, case.batch)
        settings |= {"max_length": case.longest, "per_device_train_batch_size": micro}
        settings["gradient_accumulation_steps"] = case.batch // micro
        return settings, model, "defaults, but for max_length, steps, batch and dtype"
    model["attn_implementation"] = choose_attention(cpu)
    settings |= {
        "packing": True,
        "max_length": contender.rows,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": rows_per_step(case, contender.rows, mean),
        "gradient_checkpointing": False,
        "dataloader_num_workers": 0 if cpu else 4,
    }
    for feature in contender.features:
        settings |= FEATURES[feature]
    notes = f"packing, {model['attn_implementation']}, its chunked loss"
    return settings, model, ", ".join([notes, *contender.features])


def choose_attention(cpu: bool) -> str:
    """Return the best attention of this machine; register plugsft's for TRL."""
    if not cpu and is_flash_attn_3_available():
        return "flash_attention_3"
    if not cpu and is_flash_attn_2_available():
        return "flash_attention_2"
    AttentionInterface.register(ATTENTION, attend_on_cpu if cpu else attend)
    return ATTENTION


def attend(*inputs: Any, cu_seq_lens_q: Tensor | None = None, **options: Any) -> Any:
    """Attend with torch's kernel; TRL's collator gives the bounds of documents."""
    if cu_seq_lens_q is None:
        raise ValueError("TRL gave no cu_seq_lens_q: documents would see each other")
    return varlen.attend(*inputs, cu_seq_lens_q=cu_seq_lens_q, **options)


def attend_on_cpu(*inputs: Any, cu_seq_lens_q: Tensor | None = None, **options: Any) -> Any:
    """Attend document by document, by the same bounds: torch's kernel needs a GPU."""
    if cu_seq_lens_q is None:
        raise ValueError("TRL gave no cu_seq_lens_q: documents would see each other")
    for name in ("cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"):
        options.pop(name, None)
    documents = tuple(cu_seq_lens_q.diff().tolist())
    return attend_documents(*inputs, documents=documents, **options)


def run_first_step(trainer: Any, tokens: Any, chats: int) -> tuple[float, float]:
    """Return TRL's loss and gradient norm on the chats of plugsft's first step."""
    examples = []
    for number in shuffle([(len(tokens), 1.0)], 0, 0)[:chats].tolist():
        ids, mask = tokens.example(number)
        examples.append({"input_ids": ids.tolist(), "labels": np.where(mask, ids, -100).tolist()})
    micro = min(4, chats)  # a packed row then holds several documents
    batches = [
        trainer.data_collator(examples[start : start + micro])
        for start in range(0, len(examples), micro)
    ]
    total = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    summed, model = 0.0, trainer.model.to(trainer.args.device).train()
    for batch in batches:
        inputs = {
            name: value.to(trainer.args.device) if isinstance(value, Tensor) else value
            for name, value in batch.items()
        }
        loss = trainer.compute_loss(model, inputs, num_items_in_batch=total)
        loss.backward()
        summed += float(loss.detach())
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    norm = float(torch.stack([gradient.float().norm() for gradient in gradients]).norm())
    model.zero_grad()
    return summed, norm


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
