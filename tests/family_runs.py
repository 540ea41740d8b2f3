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
from families import FAMILIES, VOCABULARY, build, saved_tensors
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from plugsft import loop, run
from plugsft.api import PlugsftError
from plugsft.base import console
from plugsft.base.machine import look
from plugsft.model.load import ModelLoad
from plugsft.registry.load import load
from plugsft.start.before_run import find_checkpoints

COLUMNS = ("whole", "sharded", "trained", "resumed", "read back", "ends", "packed", "fused", "lora")
CLOSE = 2e-5
"""Largest relative difference of loss and gradient norm from the plain run's."""
RESULTS, PAGE = ROOT / "tests/data/families.json", ROOT / "docs/families.md"
FINE = ("yes", "bit for bit")
POPULAR = (
    *("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "mistral", "ministral"),
    *("mixtral", "gemma2", "gemma3_text", "gemma3", "gpt_oss", "deepseek_v3", "phi3", "glm4"),
    *("glm4_moe", "olmo2", "olmo3", "smollm3", "granite", "llama4_text", "cohere2", "falcon_h1"),
    *("gpt2", "gpt_neox"),
)
"""Families that come first on the page."""
MEASURED = re.compile(r"(?<=\bby )\d[\d.e+-]*%?")
"""A measured difference in a refusal's text."""
HEAD = """# Families of models

Decoder families of transformers {version} that build from a tiny configuration: {count}.
Each was trained for two steps in float32 on a CPU, in real runs.
`python tests/family_runs.py` writes this page; tests/test_model_families.py compares with it.

- whole, sharded: each number is that of plain `from_pretrained`; sharded reads rows of the files.
- trained, resumed: two steps; going on after the first ends with the same weights, bit for bit.
- read back: plain transformers finds every tensor of `model/`.
- ends: plain `generate` stops at the chat template's end of a turn.
- packed, fused: loss and gradient norm are those of the plain run, or the run is refused before.
- lora: adapters are trained, saved, and read back by transformers and peft.
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
        loop.train(run.open_run(recipe, active, look(), checkpoint))
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
        self.reference = saved_tensors(read(self.model))

    def whole(self) -> str:
        """Load the whole model: every number equals plain transformers'."""
        tensors = saved_tensors(ModelLoad(str(self.model), {"dtype": torch.float32}).load_model())
        ensure_equal(tensors, self.reference)
        return "yes"

    def sharded(self) -> str:
        """Build the model without weights; read each tensor in two halves, as two ranks would."""
        loading = ModelLoad(str(self.model), {"dtype": torch.float32}, empty=True)
        model = loading.load_model()
        if not loading.files.shapes:
            ensure_equal(saved_tensors(model), self.reference)
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
        ensure_equal(tensors, self.reference)
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
            saved_tensors(read(resumed_run / "model")), saved_tensors(read(self.plain / "model"))
        )
        return "bit for bit"

    def read_back(self) -> str:
        """Plain transformers finds every tensor in `model/`."""
        tensors = saved_tensors(read(self.plain / "model"))
        assert tensors.keys() == self.reference.keys(), min({*tensors} ^ {*self.wanted})
        changed = [name for name in tensors if not torch.equal(tensors[name], self.reference[name])]
        assert changed, "no weight has moved"
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
            tensors = saved_tensors(read(run / "model"))
        assert any("lora_B" in name and tensor.any() for name, tensor in tensors.items())
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


def read(folder: Path) -> Any:
    """Load a model with plain transformers."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


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
        cells = []
        for column in COLUMNS:
            word, _, reason = outcomes.get(column, "").partition(": ")
            # The measured numbers are in families.json; families with the same reason share a line.
            reason = MEASURED.sub("N", reason)
            if reason and reason not in reasons:
                reasons.append(reason)
            cells.append(f"{word} [{reasons.index(reason) + 1}]" if reason else word)
        lines.append(f"| {family} | {' | '.join(cells)} |")
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
    lines += textwrap.wrap(", ".join(fine), 120, break_on_hyphens=False)
    lines += ["", "## Other families", ""]
    lines += table({name: others[name] for name in others if name not in fine}, reasons)
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    other = [
        f"- {name}: {outcomes['built']}"
        for name, outcomes in results.items()
        if "built" in outcomes
    ]
    text = [
        HEAD.format(count=len(built), version=transformers.__version__),
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
