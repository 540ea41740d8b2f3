"""Real runs of each model family: load, train, resume, pack, fuse, adapt, save, read back.

python tests/family_runs.py                  all families, in one process; writes docs/families.md
python tests/family_runs.py qwen3 mixtral    only these; other families keep their results
"""

import json
import os
import re
import shutil
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from conftest import ROOT, chats, read_metrics, run_plugsft, tiny_tables, write_recipe
from families import DECODERS, VOCABULARY, build, saved_tensors, sees
from peft import PeftModel, get_peft_model_state_dict
from published import stored
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
from transformers.utils import logging

from plugsft import loop
from plugsft.api import PlugsftError
from plugsft.base import console
from plugsft.base.machine import look
from plugsft.model.load import ModelLoad
from plugsft.registry.load import load
from plugsft.start.before_run import find_checkpoints
from plugsft.start.open import open_recipe

SEEING = [family for family in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES if sees(family)]
FAMILIES = sorted({*DECODERS, *SEEING})
COLUMNS = ("whole", "sharded", "trained", "resumed", "read back", "ends", "packed", "fused", "lora")
CLOSE = 2e-5
"""Largest relative difference of loss and gradient norm from the plain run's."""
ADAPTERS = "adapter_model.safetensors"
RESULTS, PAGE = ROOT / "tests/data/families.json", ROOT / "docs/families.md"
FINE = ("yes", "bit for bit")
NAMES = {
    "qwen3_5": "Qwen3.5",
    "qwen3_5_moe": "Qwen3.5",
    "gemma4": "Gemma 4",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "GLM-4.5",
    "glm4v_moe": "GLM-4.5V",
    "glm46v": "GLM-4.6V",
    "glm_moe_dsa": "GLM-5",
    "deepseek_v3": "DeepSeek-V3",
    "deepseek_v32": "DeepSeek-V3.2",
    "deepseek_v4": "DeepSeek-V4",
    "granitemoehybrid": "Granite 4",
    "nemotron_h": "Nemotron 3",
    "nemotron_h_omni": "Nemotron 3",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2",
    "lfm2_vl": "LFM2-VL",
    "mistral3": "Mistral Small 3.1",
    "llama4": "Llama 4",
    "qwen3_vl": "Qwen3-VL",
    "qwen3_vl_moe": "Qwen3-VL",
    "kimi_k25": "Kimi K2.6",
    "minimax_m3_vl": "MiniMax M3",
}
"""Families that people ask for, and what people call them."""
POPULAR = (
    *(*NAMES, "llama", "qwen2", "qwen2_moe", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_next"),
    *("mistral", "ministral", "mixtral", "gemma2", "gemma3_text", "gemma3", "phi3", "glm4"),
    *("olmo2", "olmo3", "smollm3", "granite", "llama4_text", "cohere2", "falcon_h1", "gpt2"),
    *("gpt_neox",),
)
"""Families that come first on the page."""
MEASURED = re.compile(r"(?<=\bby )\d[\d.e+-]*%?")
"""A measured difference in a refusal's text."""
HEAD = """# Families of models

Families of transformers {version} that build from a tiny configuration: {count}.
Those with a star see or hear: {seeing}. They are built whole, as they are published, and
[trained on text](train.md#models-that-see). Others are what `AutoModelForCausalLM` builds.
Each that is not refused was trained for two steps in float32 on a CPU, in real runs.
`python tests/family_runs.py` writes this page; tests/test_model_families.py compares with it.

- whole, sharded: each trained number is that of plain `from_pretrained`; sharded reads rows of the
  files. With a star, whole compares the logits of a text, too.
- trained, resumed: two steps; going on after the first ends with the same weights, bit for bit.
- read back: plain transformers finds every tensor of `model/`. With a star, its published class
  does, and what is not the language model has the bytes of the base's files.
- ends: plain `generate` stops at the chat template's end of a turn.
- packed, fused: loss and gradient norm are those of the plain run, or the run is refused before.
  Which families are faster on padded rows by length, without kernels, is
  [measured](benchmarks.md#models-with-states).
- lora: adapters are trained, saved, and read back by transformers and peft. With a star,
  `AutoModelForMultimodalLM` loads the model that they belong to.
"""


class Bench:
    """Data, tokenizer and recipe that all families share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tables = tiny_tables(folder / "base", chats(8))
        scratch = {"hidden": 16, "layers": 1, "heads": 2, "vocab": VOCABULARY, "context": 128}
        self.tables["model"] = {"scratch": scratch}
        self.tables["data"] |= {"max_length": 128}
        self.tables["train"] |= {"batch_size": 4, "steps": 2}
        process = run_plugsft(write_recipe(folder / "base.toml", self.tables))
        assert process.returncode == 0, process.stderr
        self.tokenizer = folder / "base/run/model"

    def run(self, model: Path, name: str, plugins: dict[str, Any], resume: bool = False) -> Path:
        """Train two steps of a model, in this process; return the run's folder."""
        tables = self.tables | {
            "output": str(self.folder / name),
            "model": {"path": str(model), "tokenizer": str(self.tokenizer)},
            "checkpoint": {"every": 1},
            "plugins": plugins,
        }
        if "bfd_packing" in plugins:
            tables["train"] = tables["train"] | {"micro_batch": 1}
        recipe, active = load(write_recipe(self.folder / "recipe.toml", tables))
        checkpoint = find_checkpoints(recipe, active, resume, None)
        loop.train(open_recipe(recipe, active, look(), checkpoint))
        return Path(tables["output"])


class Trial:
    """The checks of one family, in order; each returns a word for the table."""

    def __init__(self, bench: Bench, family: str) -> None:
        self.bench, self.model = bench, bench.folder / "model"
        shutil.rmtree(self.model, ignore_errors=True)
        model = build(family)
        model(input_ids=torch.arange(9)[None], use_cache=False)  # by transformers alone
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.01)
        model.save_pretrained(self.model)
        self.sees = family in SEEING
        self.reference = saved_tensors(self.read(self.model))
        self.text, self.around = {*self.reference}, dict[str, Any]()
        if self.sees:
            self.text = language_model(model)
            self.around = self.files_around(model)

    def files_around(self, model: Any) -> dict[str, Any]:
        """Return what the files have outside of the language model: what changes with it alone."""
        with torch.no_grad():
            for name, tensor in saved_tensors(model).items():
                tensor.add_(name not in self.text)
        model.save_pretrained(self.bench.folder / "other")
        before, after = stored(self.model), stored(self.bench.folder / "other")
        around = {name: before[name] for name in before if before[name] != after[name]}
        assert 0 < len(around) < len(before)
        return around

    def whole(self) -> str:
        """Load the whole model: every number equals plain transformers', and its logits of text."""
        model = ModelLoad(str(self.model), {"dtype": torch.float32}).load_model()
        self.ensure_loaded(saved_tensors(model))
        if self.sees:
            mine, plain = (logits(one) for one in (model, self.read(self.model)))
            torch.testing.assert_close(mine, plain, rtol=0, atol=1e-5)
        return "yes"

    def sharded(self) -> str:
        """Build the model without weights; read each tensor in two halves, as two ranks would."""
        loading = ModelLoad(str(self.model), {"dtype": torch.float32}, empty=True)
        model = loading.load_model()
        if not loading.files.shapes:
            self.ensure_loaded(saved_tensors(model))
            return "whole on each rank"
        names, tensors = loading.names_in_files(model), saved_tensors(model)
        for name in [name for name, tensor in tensors.items() if tensor.is_meta]:
            parameter = model.get_parameter(name)
            stored = names.get(name) or next(
                names[parameter_name]
                for parameter_name, candidate in model.named_parameters()
                if candidate is parameter
            )
            size = parameter.numel()
            parts = [
                loading.files.numbers(stored, *cut) for cut in ((0, size // 2), (size // 2, size))
            ]
            tensors[name] = torch.cat(parts).view(parameter.shape)
        self.ensure_loaded(tensors)
        return "yes"

    def trained(self) -> str:
        """Train two steps."""
        self.plain = self.bench.run(self.model, "plain", {})
        return "yes"

    def resumed(self) -> str:
        """Resume after step 1: the weights equal those of the uninterrupted run."""
        resumed_run = shutil.copytree(self.plain, self.bench.folder / "again")
        shutil.rmtree(resumed_run / "checkpoints/step-000002")
        shutil.rmtree(resumed_run / "model")
        self.bench.run(self.model, "again", {}, resume=True)
        ensure_equal(
            saved_tensors(self.read(resumed_run / "model")),
            saved_tensors(self.read(self.plain / "model")),
        )
        return "bit for bit"

    def read_back(self) -> str:
        """Plain transformers finds every tensor in `model/`."""
        tensors = saved_tensors(self.read(self.plain / "model"))
        assert tensors.keys() == self.reference.keys(), min({*tensors} ^ {*self.reference})
        changed = [name for name in tensors if not torch.equal(tensors[name], self.reference[name])]
        assert changed, "no weight has moved"
        files = stored(self.plain / "model")
        other = [name for name, tensor in self.around.items() if files.get(name) != tensor]
        assert not other, f"{len(other)} tensors are not the base's: {other[0]}"
        return "yes"

    def ends(self) -> str:
        """Plain `generate` stops at the template's end of a turn."""
        folder = self.plain / "model"
        end = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<|im_end|>")
        ends = GenerationConfig.from_pretrained(folder).eos_token_id
        assert end == ends or end in ends, ends
        return "yes"

    def packed(self) -> str:
        """Pack rows: each step's loss and gradient norm stay the same, or the run is refused."""
        return self.compare_with_plain("packed", {"bfd_packing": {"capacity": 128}})

    def fused(self) -> str:
        """Fuse the loss, with the same comparison."""
        return self.compare_with_plain("fused", {"fused_loss": {}})

    def lora(self) -> str:
        """Train adapters; transformers and peft read them back."""
        run = self.bench.run(self.model, "lora", {"lora": {"r": 2, "alpha": 4}})
        with warnings.catch_warnings():
            # transformers names experts to peft that the adapters do not have.
            warnings.filterwarnings("ignore", r"The following \w+_pattern keys", RuntimeWarning)
            warnings.simplefilter("ignore", FutureWarning)  # peft uses what transformers renamed
            tensors = saved_tensors(self.read(run / "model"))
            model = PeftModel.from_pretrained(self.read(self.model), run / "model")
        assert any("lora_B" in name and tensor.any() for name, tensor in tensors.items())
        ensure_equal(get_peft_model_state_dict(model), load_file(run / "model" / ADAPTERS))
        return "yes"

    def compare_with_plain(self, name: str, plugins: dict[str, Any]) -> str:
        """Compare a run's metrics with the plain run's."""
        run = self.bench.run(self.model, name, plugins)
        error = 0.0
        for metrics, plain_metrics in zip(read_metrics(run), read_metrics(self.plain), strict=True):
            for metric in ("loss", "grad_norm"):
                error = max(error, abs(metrics[metric] / plain_metrics[metric] - 1))
        assert error <= CLOSE, f"{error:.0e} off the plain run"
        return "yes"

    def ensure_loaded(self, tensors: dict[str, Any]) -> None:
        """Compare what is trained with plain transformers' numbers."""
        ensure_equal(tensors, {name: self.reference[name] for name in self.text})

    def read(self, folder: Path) -> Any:
        """Load a model with plain transformers, which finds all of it if it was published."""
        auto: Any = AutoModelForMultimodalLM if self.sees else AutoModelForCausalLM
        model, found = auto.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        lost = [name for names in found.values() for name in names] if self.sees else []
        assert not lost, f"transformers does not load {lost[0]} from {folder.name}/"
        return model


def language_model(model: Any) -> set[str]:
    """Return the names of the tensors that text passes in a model that sees."""
    ends = model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()
    tensors = {
        tensor for end in ends if end is not None for tensor in [*end.parameters(), *end.buffers()]
    }
    return {name for name, tensor in saved_tensors(model).items() if tensor in tensors}


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Return a model's logits of a text."""
    result: torch.Tensor = model.eval()(input_ids=torch.arange(9)[None], use_cache=False).logits
    return result


def ensure_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that all tensors are equal."""
    assert actual.keys() == expected.keys(), min({*actual} ^ {*expected})
    different = [name for name in actual if not torch.equal(actual[name], expected[name])]
    assert not different, f"{different[0]} differs"


def describe_outcome(check: Callable[[], str]) -> str:
    """Run a check; return its word, "refused: ..." or "FAILED: ..."."""
    try:
        return check()
    except PlugsftError as error:
        return f"refused: {first_line(error)}"
    except Exception as error:
        return f"FAILED: {type(error).__name__}: {first_line(error)}"


def first_line(error: Exception) -> str:
    """Return an error's message in one line."""
    line = " ".join(str(error).split()) or "no message"
    return line if len(line) < 400 else f"{line[:397]}..."


def family_results(bench: Bench, family: str) -> dict[str, str]:
    """Run all checks of a family; return one entry "built: reason" if it cannot be built."""
    for old in ("plain", "again", "packed", "fused", "lora"):
        shutil.rmtree(bench.folder / old, ignore_errors=True)
    try:
        trial = Trial(bench, family)
    except Exception as error:
        return {"built": f"{type(error).__name__}: {first_line(error)}"}
    results = {
        name: describe_outcome(getattr(trial, name.replace(" ", "_"))) for name in COLUMNS[:3]
    }
    if results["trained"] == "yes":
        results |= {
            name: describe_outcome(getattr(trial, name.replace(" ", "_"))) for name in COLUMNS[3:]
        }
    return results


def read_committed() -> dict[str, dict[str, str]]:
    """Return the results in tests/data/families.json."""
    return json.loads(RESULTS.read_text("utf8")) if RESULTS.exists() else {}


def table(families: dict[str, dict[str, str]], reasons: list[str]) -> list[str]:
    """Return the lines of a table of families; add the reasons that are new."""
    lines = [f"| family | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for family, outcomes in families.items():
        title = f"{family} ({NAMES[family]})" if family in NAMES else family
        cells = [title + " *" * (family in SEEING)]
        for column in COLUMNS:
            word, _, reason = outcomes.get(column, "").partition(": ")
            # The measured numbers are in families.json; families with the same reason share a line.
            reason = MEASURED.sub("N", reason)
            if reason and reason not in reasons:
                reasons.append(reason)
            cells.append(f"{word} [{reasons.index(reason) + 1}]" if reason else word)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def write_page(results: dict[str, dict[str, str]]) -> None:
    """Write the results, and a page with the table of families and the reasons."""
    PAGE.parent.mkdir(exist_ok=True)
    results = dict(sorted(results.items()))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf8")
    built = {name: outcomes for name, outcomes in results.items() if "built" not in outcomes}
    popular = {name: built[name] for name in POPULAR if name in built}
    others = {name: outcomes for name, outcomes in built.items() if name not in popular}
    fine = [name for name, outcomes in others.items() if {*outcomes.values()} <= {*FINE}]
    reasons: list[str] = []
    lines = ["## Popular families", "", *table(popular, reasons)]
    lines += ["", f"## Other families that do all of it: {len(fine)}", ""]
    lines += textwrap.wrap(
        ", ".join(name + "*" * (name in SEEING) for name in fine), 120, break_on_hyphens=False
    )
    lines += ["", "## Other families", ""]
    lines += table({name: others[name] for name in others if name not in fine}, reasons)
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    other = [
        f"- {name}: {outcomes['built']}"
        for name, outcomes in results.items()
        if "built" in outcomes
    ]
    text = [
        HEAD.format(
            count=len(built), seeing=len({*built} & {*SEEING}), version=transformers.__version__
        ),
        *lines,
        "\n## Reasons\n",
        *notes,
        "\n## Not built from a tiny configuration\n",
        "transformers, or the configuration that tests shrink, is the reason:\n",
        *other,
    ]
    PAGE.write_text("\n".join(text) + "\n", encoding="utf8")


def main(families: list[str]) -> None:
    """Check families, print the problems, and write the page."""
    console.out.quiet = True
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # One thread: these models are so small that threads wait for each other.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for family in families or FAMILIES:
            start = time.monotonic()
            results = family_results(bench, family)
            problems = {name: outcome for name, outcome in results.items() if outcome not in FINE}
            print(f"{family}: {problems or 'fine'} ({time.monotonic() - start:.0f} s)", flush=True)
            write_page(read_committed() | {family: results})


if __name__ == "__main__":
    main(sys.argv[1:])
