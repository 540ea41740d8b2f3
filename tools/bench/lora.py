"""Time a LoRA step on packed rows: plugsft with its own layers, with peft's, and TRL.

    tools/bench/lora.py [--rounds 20] [--dtype bfloat16] [--processor] [--json FILE]

All run in one process, in turn, with the same weights, adapters and documents. The losses of the
first step are compared before the timing. TRL runs with its best settings on a CPU (sdpa, no
gradient checkpointing, the faster of its losses); its preparation is not timed. --processor takes
the processor time of one thread, for a busy machine.
"""

import os
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "DS_ACCELERATOR": "cpu"}
warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
import shared  # noqa: E402
import torch  # noqa: E402
from datasets import Dataset, disable_progress_bars  # noqa: E402
from peft import LoraConfig  # noqa: E402
from peft.tuners import lora as layers  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from transformers.utils import logging  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

from plugsft.base.types import Rendered  # noqa: E402
from plugsft.data.jsonl import RowList  # noqa: E402
from plugsft.data.load_tokenizer import train_tokenizer  # noqa: E402
from plugsft.model.defaults import ModelDefaults  # noqa: E402
from plugsft.model.load import ModelLoad, make_scratch_model  # noqa: E402
from plugsft.plugins.bfd_packing.attention import attend_per_document  # noqa: E402
from plugsft.plugins.bfd_packing.documents import pack  # noqa: E402
from plugsft.plugins.lora import Lora  # noqa: E402
from plugsft.plugins.lora.layers import FastLinear  # noqa: E402
from plugsft.recipe.tables import Scratch, Train  # noqa: E402

RATE = 1e-4
SIZES = {"hidden": 256, "layers": 4, "heads": 4, "context": 4096}
ROOM = 2048
"""Tokens per packed row."""
R, ALPHA = 16, 32
Step = Callable[[], float]
"""Take one step; return its loss."""


def main() -> None:
    """Compare the losses, then the times."""
    parser = shared.command_line(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--processor", action="store_true")
    options = parser.parse_args()
    if options.processor:
        torch.set_num_threads(1)
    clock = time.process_time if options.processor else time.perf_counter
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # untyped upstream
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # as above
    disable_progress_bars()
    dtype = getattr(torch, options.dtype)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_model(folder, options.vocab, dtype)
        tokens = write_documents(folder / "tokens", options.vocab)
        steps = {
            "plugsft": plugsft_step(folder, tokens, dtype),
            "plugsft, peft's layers": plugsft_step(folder, tokens, dtype, peft=True),
            **{
                f"TRL, {loss}": trl_step(folder, tokens, dtype, loss)
                for loss in ("nll", "chunked_nll")
            },
        }
        losses = {name: step() for name, step in steps.items()}
        reference_loss = losses["plugsft"]
        print(f"{len(tokens)} documents, {ROOM:,} tokens; losses of the first step: {losses}")
        assert all(
            abs(loss / reference_loss - 1) < 1e-5 or dtype != torch.float32
            for loss in losses.values()
        )
        for _ in range(3):
            for step in steps.values():
                step()

        def timed(step: Step) -> float:
            start = clock()
            step()
            return clock() - start

        contenders = {name: partial(timed, step) for name, step in steps.items()}
        seconds = shared.collect_rounds(options.rounds, contenders)
    for name, times in seconds.items():
        print(f"{name:>24}: {shared.spread([seconds * 1e3 for seconds in times], '.0f')} ms")
    best = min((name for name in steps if name.startswith("TRL")), key=lambda n: sum(seconds[n]))
    for other in (best, "plugsft, peft's layers"):
        print(
            f"plugsft against {other}: {shared.compare_speed(seconds['plugsft'], seconds[other])}"
        )
    shared.write_report({"losses": losses, "seconds": seconds}, options.json)


def save_model(folder: Path, vocab: int, dtype: torch.dtype) -> None:
    """Save a model and the tokenizer that TRL needs."""
    text = Rendered([" ".join(map(str, range(2000)))])
    tokenizer = train_tokenizer([RowList([{}])], lambda *_: text, 300)
    model = make_scratch_model(Scratch(**SIZES, vocab=vocab), tokenizer, seed=0)
    model.resize_token_embeddings(vocab)
    model.to(dtype).save_pretrained(folder / "model")  # type: ignore[arg-type]
    tokenizer.save_pretrained(folder / "model")


def write_documents(folder: Path, vocab: int) -> Any:
    """Write documents that fill exactly one row."""
    lengths = shared.draw_lengths(400, 5.0, 0.8, 16, ROOM)
    lengths = lengths[np.cumsum(lengths) <= ROOM - 16]
    shared.VOCAB = vocab
    return shared.write_tokens(folder, np.append(lengths, ROOM - lengths.sum()), 1)


def plugsft_step(folder: Path, tokens: Any, dtype: torch.dtype, peft: bool = False) -> Step:
    """Return a step of plugsft's loop, on a batch that is made already."""
    plugin, core = Lora(r=R, alpha=ALPHA), ModelDefaults()
    plugin.dtype = str(dtype).removeprefix("torch.")
    load = ModelLoad(str(folder / "model"), {"dtype": dtype})
    load.kwargs["attn_implementation"] = attend_per_document()
    wrapper = plugin.optimize_model(load)
    next(wrapper)
    try:
        wrapper.send(load.load_model())
    except StopIteration as ended:
        model: Any = ended.value
    if peft:
        for layer in model.modules():
            if isinstance(layer, FastLinear):
                layer.__class__ = layers.Linear
                for half in (layer.lora_A, layer.lora_B):
                    half["default"].__class__ = torch.nn.Linear
    model.train()
    optimizer = core.optimizer(model, Train(batch_size=1, learning_rate=RATE))
    batch = pack(tokens, np.arange(len(tokens)))
    total = int((batch["labels"] >= 0).sum())
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step() -> float:
        loss = core.step(model, batch, total, core.token_nll)
        loss.backward()  # type: ignore[no-untyped-call]  # untyped upstream
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def trl_step(folder: Path, tokens: Any, dtype: torch.dtype, loss_type: str) -> Step:
    """Return a step of TRL's trainer, on a batch collated beforehand."""
    settings = SFTConfig(
        output_dir=str(folder / "trl"),
        model_init_kwargs={"attn_implementation": "sdpa", "dtype": str(dtype)[6:]},
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        packing=True,
        max_length=ROOM,
        per_device_train_batch_size=1,
        learning_rate=RATE,
        loss_type=loss_type,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer: Any = SFTTrainer(
        str(folder / "model"),
        settings,
        train_dataset=Dataset(shared.trl_table(tokens)),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        peft_config=LoraConfig(
            task_type="CAUSAL_LM", r=R, lora_alpha=ALPHA, target_modules="all-linear"
        ),
    )
    [row] = trainer.train_dataset
    batch = trainer.data_collator([row])
    total = (batch["labels"] >= 0).sum()
    trainer.create_optimizer_and_scheduler(num_training_steps=1000)
    model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    copy_adapters(model, folder, dtype)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step() -> float:
        loss = trainer.training_step(model, dict(batch), num_items_in_batch=total)
        trainer.accelerator.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def copy_adapters(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """Give TRL's model the adapters of plugsft."""
    plugin = Lora(r=R, alpha=ALPHA)
    wrapper = plugin.optimize_model(ModelLoad(str(folder / "model")))
    next(wrapper)
    try:
        wrapper.send(AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype))
    except StopIteration as ended:
        adapters = dict(ended.value.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(adapters[name])


if __name__ == "__main__":
    main()
