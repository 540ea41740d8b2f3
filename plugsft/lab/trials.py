"""Short runs of a recipe in fresh processes: same examples, other plugins or options."""

import copy
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import psutil
import tomli_w

from ..base.errors import MEMORY, RecipeError
from ..base.machine import child_environment, look
from ..base.types import Ints, Shard
from ..batches.defaults import BatchDefaults
from ..data.defaults import DataDefaults
from ..data.prepare import prepare
from ..hooks import DATA
from ..output.metrics import read_metrics
from ..recipe.parse import anchored
from ..recipe.tables import Recipe
from ..registry.active import Active
from ..start.checks import Case, ensure
from ..tokens.shards import Examples, write_index, write_shard
from ..tokens.store import Prepared, Tokens

Changes: TypeAlias = dict[str, Any]
"""Key with dots -> the value that is set; None removes the key, or its table."""
LEFT_OUT_ALWAYS = ("early_stop", "external_reports", "sampled_answers")
"""Capabilities whose plugins trials leave out: they are for whole runs."""
MODULE = "plugsft.lab.trial"
RECIPE, OUTPUT = "recipe.toml", "output.txt"
"""Files in the folder of a trial."""
KILLED = ("SIGKILL", "Signal 9")
"""How launchers say that a rank was killed."""


@dataclass
class Trial:
    """The results of one short run."""

    folder: Path
    seconds: float
    """From the start of its process to its end."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """The metrics of each step."""
    run: dict[str, Any] = field(default_factory=dict)
    """The content of run.json."""
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """Peak bytes of each rank: `host`, `before` loading the model, and on a GPU `device`."""
    error: str = ""
    out_of_memory: bool = False

    def of(self, name: str, warmup: int = 0) -> list[float]:
        """A metric of each step after the first ones."""
        return [float(step[name]) for step in self.steps[warmup:]]


def refuse_ranks(command: str) -> None:
    """Refuse a command that a launcher has started."""
    if "RANK" in os.environ:
        raise RecipeError(
            f'{command} starts ranks by itself: run it with --launch "accelerate launch"'
        )


@contextmanager
def trials(
    recipe: Recipe, active: Active, launch: str = "", examples: int | None = 0
) -> Iterator["TrialRunner"]:
    """Prepare a recipe's data as a run would; yield a runner of trials on it.

    `examples`: how many to train on, the first of the epoch; 0 for all; None if the caller chooses
    them with `use`.
    """
    with tempfile.TemporaryDirectory(prefix="plugsft-trials-") as temporary, sigterm_as_interrupt():
        folder = Path(temporary)
        bare = recipe.model_copy(update={"output": str(folder / "data"), "eval": None})
        active.attach(DataDefaults(bare.folder), BatchDefaults())
        case = Case(bare, active, look(), hooks=DATA)
        ensure(case, "plugins", "model")
        data = prepare(bare, active)
        ensure(replace(case, tokens=data.tokens), "tokens")
        runner = TrialRunner(recipe, active, folder, data, launch)
        if examples is not None:
            runner.use(runner.epoch_order()[: examples or None])
        yield runner


class TrialRunner:
    """Runs trials, each in its own temporary folder."""

    def __init__(
        self, recipe: Recipe, active: Active, folder: Path, data: Prepared, launch: str
    ) -> None:
        self.folder, self.tokens, self._launch = folder, data.tokens, shlex.split(launch)
        self._recipe, self._active, self._started = recipe, active, 0
        tables = anchored(recipe)
        tables.pop("eval", None)
        tables["checkpoint"] = {"every": 0}
        for name in LEFT_OUT_ALWAYS:
            for each in recipe.providers(name):
                tables["plugins"].pop(each.plugin, None)
        # The steps to trace are those of a whole run.
        for traced in recipe.providers("traced_steps"):
            tables["plugins"][traced.plugin].pop(traced.option, None)
        if "scratch" in tables["model"]:
            tables["model"].setdefault("tokenizer", str(data.tokenizer_folder.absolute()))
        self.tables = tables

    def epoch_order(self) -> Ints:
        """The order of the recipe's first epoch."""
        seed = self._recipe.train.seed
        return self._active.hooks.order_examples(tokens=self.tokens, epoch=0, seed=seed)

    def use(self, numbers: Ints) -> None:
        """Train on these examples from now on, in this order in each epoch."""
        folder = self.folder / f"tokens-{time.monotonic_ns()}"
        write_examples(self.tokens, numbers, folder)
        rows = dict.fromkeys(("data.source", "data.sources", "data.split"))
        self.tables = with_changes(self.tables, {**rows, "data.tokens": str(folder.absolute())})

    def run(
        self, changes: Changes, steps: int, without: Sequence[str] = (), memory: int = 0
    ) -> Trial:
        """Train in a fresh process with {"table.key": value} set and plugins left out.

        Failures are returned, not raised. `memory` limits the bytes of each rank.
        """
        self._started += 1
        folder = self.folder / f"{self._started:04d}"
        folder.mkdir()
        tables = with_changes(self.tables, {f"plugins.{name}": None for name in without})
        # The trial ends before the last step, which would save the model.
        own = {"train.steps": steps + 1, "train.log_every": 10**9, "output": str(folder / "run")}
        (folder / RECIPE).write_text(tomli_w.dumps(with_changes(tables, {**changes, **own})))
        words = [*(self._launch or [sys.executable]), "-m", MODULE, str(folder / RECIPE)]
        code, seconds = run_process([*words, str(memory)], folder / OUTPUT)
        return read_trial(folder, steps, code, seconds)


def read_trial(folder: Path, steps: int, code: int, seconds: float) -> Trial:
    """Read the results of a trial that has ended, or why it failed."""
    trial = Trial(folder, seconds)
    trial.ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    trial.steps = read_metrics(folder / "run/metrics.jsonl")
    if (record := folder / "run/run.json").exists():
        trial.run = json.loads(record.read_text())
    if code or len(trial.steps) < steps or not trial.ranks:
        output = (folder / OUTPUT).read_text(errors="replace").strip()
        errors = [rank["error"] for rank in trial.ranks if rank["error"]]
        trial.error = "\n".join(dict.fromkeys(errors)) or output[-2000:] or f"exit code {code}"
        # Only the kernel kills a rank, when memory runs out; a library names memory and ends.
        signs = KILLED if errors else (*KILLED, *MEMORY, "MemoryError")
        trial.out_of_memory = code == -signal.SIGKILL or any(sign in output for sign in signs)
        trial.out_of_memory |= any(rank.get("out_of_memory") for rank in trial.ranks)
    return trial


def run_process(words: Sequence[str], log: Path) -> tuple[int, float]:
    """Run a command to its end; return its exit code and the seconds it took."""
    started = time.perf_counter()
    # In its own process group: Ctrl-C does not make it save a checkpoint that nobody wants.
    with log.open("w") as output:
        try:
            code = subprocess.call(
                words,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=child_environment(),
            )
        except BaseException:
            # It may have come while the process began, or from a wait. A launcher starts its ranks
            # in process groups of their own.
            members = psutil.Process().children(recursive=True)
            for member in members:
                with suppress(psutil.NoSuchProcess):
                    member.kill()
            psutil.wait_procs(members)
            raise
    return code, time.perf_counter() - started


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end this process and its children, as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def with_changes(tables: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """Copy tables with {"table.key": value} set; None removes a key, or a table."""
    changed = copy.deepcopy(dict(tables))
    for dotted_key, value in changes.items():
        *path, key = dotted_key.split(".")
        table = changed
        for name in path:
            table = table.setdefault(name, {})
        if value is None:
            table.pop(key, None)
        else:
            table[key] = value
    return changed


def write_examples(tokens: Tokens, numbers: Ints, folder: Path) -> None:
    """Write examples as prepared tokens of one source that a run accepts as its whole data."""
    folder.mkdir()
    ids, mask = tokens.gather(numbers)
    counts = tokens.sequences(numbers)[0]
    ends = np.searchsorted(np.cumsum(counts), np.cumsum(tokens.lengths[numbers]))
    pieces = np.diff(ends, prepend=-1)
    columns = {name: values[numbers] for name, values in tokens.columns.items()}
    examples = Examples(ids, mask, counts, pieces, tokens.rows[numbers], columns)
    shard = Shard("data-00000.arrow", len(numbers), columns=examples.types)
    write_shard(folder / shard.file, examples)
    source = {**tokens.facts["sources"][0], "examples": len(numbers), "weight": 1.0}
    facts = {**tokens.facts, "examples": len(numbers), "sources": [source]}
    write_index(folder, [shard], facts)
