"""TRL's runs of gpu.py: trl-default and trl-best."""

import importlib.util
import time
from pathlib import Path
from typing import Any

import numpy as np
import shared
import torch
from datasets import Dataset, disable_progress_bars
from gpu_cases import RATE, WARM, Case, parse_case
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from plugsft.base.machine import peak_memory
from plugsft.base.types import Ints
from plugsft.batches.plan import shuffle


def train(arguments: dict) -> dict[str, Any]:
    """Train with TRL's trainer; nothing is logged or saved."""
    case, folder, cpu = parse_case(arguments["case"]), Path(arguments["folder"]), arguments["cpu"]
    tokens = shared.Tokens(Path(arguments["tokens"]))
    token_counts: list[list[Any]] = [[]]
    times: list[float] = []

    class Counted(SFTTrainer):
        """Counts tokens without padding, on the device, without waiting for it."""

        def compute_loss(self, model: Any, inputs: dict, *arguments: Any, **options: Any) -> Any:
            mask = inputs.get("attention_mask")
            token_counts[-1].append(inputs["input_ids"].numel() if mask is None else mask.sum())
            return super().compute_loss(model, inputs, *arguments, **options)

    class Clock(TrainerCallback):
        """Times each step until the device finishes, as plugsft's loop does."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if not cpu:
                torch.cuda.synchronize()
            now = time.perf_counter()
            times.append(now - self.started)
            self.started = now
            token_counts.append([])

    disable_progress_bars()
    settings, model_options, notes = choose_trl_settings(
        case, arguments["best"], cpu, tokens.lengths
    )
    adapters = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
    trainer: Any = Counted(
        str(folder / "model"),
        SFTConfig(
            output_dir=str(folder / "trl"),
            model_init_kwargs=model_options,
            max_steps=arguments["steps"],
            learning_rate=RATE,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **settings,
        ),
        train_dataset=Dataset(shared.trl_table(tokens)),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        peft_config=adapters if case.lora else None,
        callbacks=[Clock()],
    )
    loss = compute_first_loss(trainer, case, tokens)
    token_counts[:] = [[]]
    if not cpu:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    counts = [float(sum(parts)) for parts in token_counts[: arguments["steps"]]]
    peak = peak_memory() / 2**30
    return {
        "loss": loss,
        "seconds": times,
        "speed": sum(counts[WARM:]) / sum(times[WARM:]),
        "median_step_speed": float(np.median(np.divide(counts[WARM:], times[WARM:]))),
        "peak_gib": peak if cpu else torch.cuda.max_memory_allocated() / 2**30,
        "notes": notes,
    }


def choose_trl_settings(case: Case, best: bool, cpu: bool, lengths: Ints) -> tuple[dict, dict, str]:
    """Return TRL's settings, the options of its model, and a note about both."""
    settings: dict[str, Any] = {"use_cpu": cpu, "max_length": case.longest}
    model: dict[str, Any] = {"dtype": case.dtype}
    if cpu:
        settings["bf16"] = False
    if not best:
        micro_batch = min(8, case.batch)
        settings["per_device_train_batch_size"] = micro_batch
        settings["gradient_accumulation_steps"] = case.batch // micro_batch
        return settings, model, "defaults, but for max_length, steps, batch and dtype"
    installed = importlib.util.find_spec
    flash = {"flash_attn_interface": "flash_attention_3", "flash_attn": "flash_attention_2"}
    kernels = [name for module, name in flash.items() if not cpu and installed(module)]
    model["attn_implementation"] = kernels[0] if kernels else "sdpa"
    liger = not case.lora and not cpu and installed("liger_kernel") is not None
    settings |= {
        "packing": True,
        "max_length": case.capacity,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": max(1, round(case.batch * lengths.mean() / case.capacity)),
        "gradient_checkpointing": case.checkpointed,
        "use_liger_kernel": liger,
    }
    missing = "" if kernels else "; flash-attn is not installed, so its rows have a dense mask"
    notes = (
        f"packing, {model['attn_implementation']}, {'Liger layers, ' if liger else ''}its chunked "
        f"loss, gradient checkpointing {'on' if case.checkpointed else 'off'}{missing}"
    )
    return settings, model, notes


def compute_first_loss(trainer: Any, case: Case, tokens: Any) -> float:
    """Return TRL's loss on the chats of plugsft's first step, before any update."""
    chosen = shuffle([(len(tokens), 1.0)], 0, 0)[: case.batch]
    examples = []
    for number in chosen.tolist():
        ids, mask = tokens.example(number)
        labels = np.where(mask, ids, -100)
        examples.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    micro = trainer.args.per_device_train_batch_size
    batches = [
        trainer.data_collator(examples[start : start + micro])
        for start in range(0, len(examples), micro)
    ]
    total = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    device, summed = trainer.args.device, 0.0
    with torch.no_grad():
        for batch in batches:
            inputs = {k: v.to(device) if hasattr(v, "to") else v for k, v in batch.items()}
            summed += float(trainer.compute_loss(trainer.model, inputs, num_items_in_batch=total))
    return summed
