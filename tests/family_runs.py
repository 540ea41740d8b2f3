"""Real runs of one family: loaded, packed, fused, adapted, saved, read back, resumed, stopped.

python tests/family_runs.py                  all families, in one process; writes docs/families.md
python tests/family_runs.py qwen3 mixtral    these only; other families stay as they are
"""

import json
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from conftest import ROOT, chats, read_metrics, run_plugsft, tiny_tables, write_recipe
from families import FAMILIES, VOCABULARY, build
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from plugsft import PlugsftError, loop, run
from plugsft.base import console
from plugsft.base.machine import look
from plugsft.commands.runs.start import find_checkpoints
from plugsft.model.load import Load, saved_tensors
from plugsft.registry.active import load

COLUMNS = ("whole", "sharded", "trained", "resumed", "read back", "ends", "packed", "fused", "lora")
CLOSE = 2e-5
"""How far loss and gradient norm may be from the plain run's, as a share."""
RESULTS, PAGE = ROOT / "docs/families.json", ROOT / "docs/families.md"
FINE = ("yes", "bit for bit")
MEASURED = re.compile(r"(?<=\bby )\d[\d.e+-]*%?")
"""How far numbers are off, as refusals say it."""
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
        done = run_plugsft(write_recipe(folder / "base.toml", self.tables))
        assert done.returncode == 0, done.stderr
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
        with active.name_failing_plugin():
            checkpoint = find_checkpoints(recipe, active, resume, None)
            loop.train(run.open(recipe, active, look(), checkpoint))
        return Path(tables["output"])


class Trial:
    """What is tried with one family, in order; each result is a word for the table."""

    def __init__(self, bench: Bench, family: str) -> None:
        self.bench, self.model = bench, bench.folder / "model"
        shutil.rmtree(self.model, ignore_errors=True)
        made = build(family)
        made(input_ids=torch.arange(9)[None], use_cache=False)  # by transformers alone
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.01)
        made.save_pretrained(self.model)
        self.wanted = saved_tensors(read(self.model))

    def whole(self) -> str:
        """Load it whole: every number is that of plain transformers."""
        ours = saved_tensors(Load(str(self.model), {"dtype": torch.float32}).build())
        ensure_equal(ours, self.wanted)
        return "yes"

    def sharded(self) -> str:
        """Make it without weights, and read each tensor in two halves, as two ranks would."""
        how = Load(str(self.model), {"dtype": torch.float32}, empty=True)
        model = how.build()
        if not how.empty:
            ensure_equal(saved_tensors(model), self.wanted)
            return "whole on each rank"
        names, tensors = how.names_in_files(model), saved_tensors(model)
        with how.weights() as weights:
            for name in [name for name, one in tensors.items() if one.is_meta]:
                one = model.get_parameter(name)
                stored = names.get(name) or next(
                    names[n] for n, p in model.named_parameters() if p is one
                )
                middle, rows = one.shape[0] // 2, one.shape[0]
                parts = [weights.rows(stored, *cut) for cut in ((0, middle), (middle, rows))]
                tensors[name] = torch.cat([part for part in parts if len(part)])
        ensure_equal(tensors, self.wanted)
        return "yes"

    def trained(self) -> str:
        """Train two steps."""
        self.plain = self.bench.run(self.model, "plain", {})
        return "yes"

    def resumed(self) -> str:
        """Go on after step 1: the weights are those of the run that was not stopped."""
        again = shutil.copytree(self.plain, self.bench.folder / "again")
        shutil.rmtree(again / "checkpoints/step-000002")
        shutil.rmtree(again / "model")
        self.bench.run(self.model, "again", {}, resume=True)
        ensure_equal(
            saved_tensors(read(again / "model")), saved_tensors(read(self.plain / "model"))
        )
        return "bit for bit"

    def read_back(self) -> str:
        """Plain transformers finds every tensor, trained ones and others."""
        ours = saved_tensors(read(self.plain / "model"))
        assert ours.keys() == self.wanted.keys(), min({*ours} ^ {*self.wanted})
        moved = [name for name in ours if not torch.equal(ours[name], self.wanted[name])]
        assert moved, "no weight has moved"
        return "yes"

    def ends(self) -> str:
        """Plain `generate` ends where the template ends a turn."""
        folder = self.plain / "model"
        end = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<|im_end|>")
        ends = GenerationConfig.from_pretrained(folder).eos_token_id
        assert end == ends or end in ends, ends
        return "yes"

    def packed(self) -> str:
        """Pack: the loss and the gradient norm of each step stay, or the model is refused."""
        return self.alike("packed", {"bfd_packing": {"capacity": 128}})

    def fused(self) -> str:
        """Fuse the loss: as above."""
        return self.alike("fused", {"fused_loss": {}})

    def lora(self) -> str:
        """Train adapters; transformers and peft read them back."""
        run = self.bench.run(self.model, "lora", {"lora": {"r": 2, "alpha": 4}})
        with warnings.catch_warnings():
            # transformers names experts to peft that the adapters do not have.
            warnings.filterwarnings("ignore", r"The following \w+_pattern keys", RuntimeWarning)
            adapted = saved_tensors(read(run / "model"))
        assert any("lora_B" in name and one.any() for name, one in adapted.items())
        return "yes"

    def alike(self, name: str, plugins: dict[str, Any]) -> str:
        """Compare a run with the plain one."""
        run = self.bench.run(self.model, name, plugins)
        off = 0.0
        for ours, theirs in zip(read_metrics(run), read_metrics(self.plain), strict=True):
            for metric in ("loss", "grad_norm"):
                off = max(off, abs(ours[metric] / theirs[metric] - 1))
        assert off <= CLOSE, f"{off:.0e} off the plain run"
        return "yes"


def read(folder: Path) -> Any:
    """Load with plain transformers."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def ensure_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Refuse tensors that are not the same."""
    assert ours.keys() == theirs.keys(), min({*ours} ^ {*theirs})
    wrong = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not wrong, f"{wrong[0]} differs"


def tried(does: Callable[[], str]) -> str:
    """Return what came of it: a word, "refused: ..." or "FAILED: ..."."""
    try:
        return does()
    except PlugsftError as error:
        return f"refused: {first(error)}"
    except Exception as error:
        return f"FAILED: {type(error).__name__}: {first(error)}"


def first(error: Exception) -> str:
    """Return an error in one line."""
    line = " ".join(str(error).split()) or "no message"
    return line if len(line) < 400 else f"{line[:397]}..."


def family_results(bench: Bench, family: str) -> dict[str, str]:
    """Try everything with a family; one entry "transformers: why" if it cannot be built."""
    for old in ("plain", "again", "packed", "fused", "lora"):
        shutil.rmtree(bench.folder / old, ignore_errors=True)
    try:
        trial = Trial(bench, family)
    except Exception as error:
        return {"built": f"{type(error).__name__}: {first(error)}"}
    results = {name: tried(getattr(trial, name.replace(" ", "_"))) for name in COLUMNS[:3]}
    if results["trained"] == "yes":
        results |= {name: tried(getattr(trial, name.replace(" ", "_"))) for name in COLUMNS[3:]}
    return results


def committed() -> dict[str, dict[str, str]]:
    """Return the results that were written last."""
    return json.loads(RESULTS.read_text("utf8")) if RESULTS.exists() else {}


def write_page(results: dict[str, dict[str, str]]) -> None:
    """Write the results, and the table of families that were built with the reasons below it."""
    PAGE.parent.mkdir(exist_ok=True)
    results = dict(sorted(results.items()))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf8")
    built = {name: one for name, one in results.items() if "built" not in one}
    reasons: list[str] = []
    lines = [f"| family | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for family, one in built.items():
        cells = []
        for column in COLUMNS:
            word, _, reason = one.get(column, "").partition(": ")
            # What was measured is in families.json; families with one reason share a line here.
            reason = MEASURED.sub("N", reason)
            if reason and reason not in reasons:
                reasons.append(reason)
            cells.append(f"{word} [{reasons.index(reason) + 1}]" if reason else word)
        lines.append(f"| {family} | {' | '.join(cells)} |")
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    other = [f"- {name}: {one['built']}" for name, one in results.items() if "built" in one]
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
    """Try families, and print or write what came of it."""
    console.out.quiet = True
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # One thread: these models are so small that threads wait for each other.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for family in families or FAMILIES:
            began = time.monotonic()
            results = family_results(bench, family)
            odd = {name: one for name, one in results.items() if one not in FINE}
            print(f"{family}: {odd or 'fine'} ({time.monotonic() - began:.0f} s)", flush=True)
            write_page(committed() | {family: results})


if __name__ == "__main__":
    main(sys.argv[1:])
