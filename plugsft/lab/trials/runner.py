"""Short runs of a recipe in fresh processes: same examples, other plugins or options."""

import copy
import json
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tomli_w

from ...base.errors import MEMORY
from ...base.machine import child_environment, look
from ...base.types import Ints, Shard
from ...batches.defaults import BatchDefaults
from ...data.defaults import DataDefaults
from ...data.prepare import Prepared, prepare
from ...hooks import DATA
from ...model.checks import check_recipe
from ...model.config import check_ids
from ...output.report import read_metrics
from ...recipe.parse import anchored
from ...recipe.tables import Recipe
from ...registry.active import Active
from ...tokens.shards import Examples, write_index, write_shard
from ...tokens.store import Tokens

LEFT_OUT_ALWAYS = ("early_stop", "external_reports", "sampled_answers")
"""Capabilities whose plugins trials leave out: they are for whole runs."""
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
        """Return a metric of each step after the first ones."""
        return [float(step[name]) for step in self.steps[warmup:]]


IN_ORDER = "in-order"
"""The last word of a trial whose examples stay in the order in which they are stored."""


@contextmanager
def trials(
    recipe: Recipe, active: Active, launch: str = "", examples: int = 0
) -> Iterator["TrialRunner"]:
    """Prepare a recipe's data as a run would; yield a runner of trials on it, or on a sample."""
    with tempfile.TemporaryDirectory(prefix="plugsft-trials-") as temporary, sigterm_as_interrupt():
        folder = Path(temporary)
        to_prepare = recipe.model_copy(update={"output": str(folder / "data"), "eval": None})
        active.attach(DataDefaults(to_prepare.folder), BatchDefaults())
        with active.name_failing_plugin():
            check_recipe(to_prepare, active, look(), DATA)
            data = prepare(to_prepare, active)
            check_ids(to_prepare, data.largest_id)
        yield TrialRunner(recipe, active, folder, data, launch, examples)


class TrialRunner:
    """Runs trials, each in its own temporary folder."""

    def __init__(
        self,
        recipe: Recipe,
        active: Active,
        folder: Path,
        data: Prepared,
        launch: str,
        examples: int,
    ) -> None:
        self.folder, self.tokens, self._launch = folder, data.tokens, shlex.split(launch)
        self.recipe, self.tables = recipe, anchored(recipe)
        self.tables.pop("eval", None)
        self.tables["checkpoint"] = {"every": 0}
        for each in (each for name in LEFT_OUT_ALWAYS for each in recipe.providers(name)):
            self.tables["plugins"].pop(each.plugin, None)
        # The steps to trace are those of a whole run.
        for traced in recipe.providers("traced_steps"):
            self.tables["plugins"][traced.plugin].pop(traced.option, None)
        self._active, self._tokenizer, self._trials = active, data.tokenizer_folder, 0
        self._in_order = False
        """Whether trials take the examples in the order in which they are stored."""
        if 0 < examples < len(self.tokens):
            self.use(sample_by_length(self.tokens, examples))
        else:
            self._set_tokens(self.tokens.folder)

    def epoch_order(self) -> Ints:
        """Return the order of the recipe's first epoch."""
        seed = self.recipe.train.seed
        with self._active.name_failing_plugin():
            return self._active.hooks.order_examples(tokens=self.tokens, epoch=0, seed=seed)

    def use(self, numbers: Ints, in_order: bool = False) -> None:
        """Train on these examples from now on; if `in_order`, in this order in each epoch."""
        folder, self._in_order = self.folder / f"tokens-{time.monotonic_ns()}", in_order
        if in_order:  # the examples become a single source
            for name in ("source", "sources", "split"):
                self.tables["data"].pop(name, None)
        write_examples(self.tokens, numbers, folder, together=in_order)
        self._set_tokens(folder)

    def _set_tokens(self, folder: Path) -> None:
        self.tables["data"]["tokens"] = str(folder.absolute())
        if "scratch" in self.tables["model"] and "tokenizer" not in self.tables["model"]:
            self.tables["model"]["tokenizer"] = str(self._tokenizer.absolute())

    def run(
        self,
        changes: Mapping[str, Any],
        steps: int,
        without: Sequence[str] = (),
        memory: int = 0,
    ) -> Trial:
        """Train in a fresh process with {"table.key": value} set and plugins left out.

        Failures are returned, not raised. `memory` limits the bytes of each rank.
        """
        self._trials += 1
        folder = self.folder / f"{self._trials:04d}"
        folder.mkdir()
        tables = with_changes(self.tables, {**changes, "output": str(folder / "run")})
        for name in without:
            tables["plugins"].pop(name, None)
        # The trial ends before the last step, which would save the model.
        tables["train"] |= {"steps": steps + 1, "log_every": 10**9}
        path = folder / "recipe.toml"
        path.write_text(tomli_w.dumps(tables))
        words = [*self._launch, *(() if self._launch else (sys.executable,))]
        words += ["-m", "plugsft.lab.trials.trial", str(path), str(memory)]
        words += [IN_ORDER] if self._in_order else []
        code, seconds = run_process(words, folder / "output.txt")
        return read_trial(folder, steps, code, seconds)


def read_trial(folder: Path, steps: int, code: int, seconds: float) -> Trial:
    """Read the results of a trial that has ended, or why it failed."""
    trial = Trial(folder, seconds)
    trial.ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    trial.steps = read_metrics(folder / "run/metrics.jsonl")
    if (record := folder / "run/run.json").exists():
        trial.run = json.loads(record.read_text())
    if code or len(trial.steps) < steps or not trial.ranks:
        output = (folder / "output.txt").read_text(errors="replace").strip()
        errors = [rank["error"] for rank in trial.ranks if rank["error"]]
        trial.error = "\n".join(dict.fromkeys(errors)) or output[-2000:] or f"exit code {code}"
        trial.out_of_memory = any(rank["out_of_memory"] for rank in trial.ranks)
        trial.out_of_memory |= killed(code, output) or (not errors and aborted_by_memory(output))
    return trial


def killed(code: int, output: str) -> bool:
    """Tell whether a rank was killed: only the kernel does so, when memory runs out."""
    return code == -signal.SIGKILL or any(message in output for message in KILLED)


def aborted_by_memory(output: str) -> bool:
    """Tell whether a library that ended the process named memory as its reason."""
    return any(message in output for message in (*MEMORY, "MemoryError"))


def run_process(words: Sequence[str], log: Path, **environment: str) -> tuple[int, float]:
    """Run a command to its end; return its exit code and the seconds it took."""
    started = time.perf_counter()
    # In its own process group: Ctrl-C does not make it save a checkpoint that nobody wants.
    with log.open("w") as output:
        process = subprocess.Popen(
            words,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=child_environment(**environment),
        )
        try:
            code = process.wait()
        except BaseException:
            # A launcher starts its ranks in process groups of their own.
            root = psutil.Process(process.pid)
            for member in (*root.children(recursive=True), root):
                with suppress(psutil.NoSuchProcess):
                    member.kill()
            process.wait()
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


def with_changes(tables: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables with {"table.key": value} set; None removes a key, or a table."""
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


def sample_by_length(tokens: Tokens, count: int) -> Ints:
    """Choose examples whose lengths are distributed as all are; the same ones each time."""
    order = np.argsort(tokens.lengths, kind="stable")
    chosen: Ints = np.sort(order[np.linspace(0, len(order) - 1, count).round().astype(np.int64)])
    return chosen


def write_examples(tokens: Tokens, numbers: Ints, folder: Path, together: bool = False) -> None:
    """Write examples as prepared tokens that a run accepts as its whole data.

    They stay with their sources; if `together`, they become one source, in this order.
    """
    folder.mkdir()
    all_sources = tokens.facts["sources"]
    starts = np.cumsum([0, *(source["examples"] for source in all_sources)])
    sources, shards = [], []
    for place, source in enumerate(all_sources[:1] if together else all_sources):
        inside = (numbers >= starts[place]) & (numbers < starts[place + 1]) | together
        own = numbers[inside]
        sources.append({**source, "examples": len(own)} | ({"weight": 1.0} if together else {}))
        ids, mask = tokens.gather(own)
        counts = tokens.sequences(own)[0]
        ends = np.searchsorted(np.cumsum(counts), np.cumsum(tokens.lengths[own]))
        pieces = np.diff(ends, prepend=-1)
        columns = {name: values[own] for name, values in tokens.columns.items()}
        examples = Examples(ids, mask, counts, pieces, tokens.rows[own], columns)
        shard = Shard(f"data-{place:05d}.arrow", len(own), columns=examples.types)
        write_shard(folder / shard.file, examples)
        shards.append(shard)
    facts = {**tokens.facts, "examples": len(numbers), "sources": sources}
    write_index(folder, shards, facts)
