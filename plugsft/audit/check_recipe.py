"""`plugsft check`: all checks that need no weights and no training."""

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.text import Text

from ..base.console import format_count, out
from ..base.errors import DataError, LaunchError, PlugsftError, RecipeError
from ..base.machine import Machine, look
from ..base.types import Ints, Layouts
from ..batches.defaults import BatchDefaults
from ..batches.plan import small_data
from ..data.defaults import DataDefaults
from ..data.prepare import TOKEN_HOOKS, data_warnings, open_data, open_named_tokens, summarize
from ..data.sample import EstimatedColumns, make_work
from ..data.slices import ShardWriter
from ..data.sources import ROWS_NOT_HELD_OUT, OpenSource, ensure_columns, open_source, overlap
from ..hooks import with_plugins
from ..model.schedule import ScheduleDefaults, factors_of, without_peak
from ..output.disk_space import ensure_room
from ..output.folder import describe_results
from ..ranks.launcher import without_fsdp2
from ..recipe.capabilities import Capability
from ..recipe.tables import LOSSY, Model, Recipe, Source, Train
from ..registry.active import Active
from ..start.checks import CHECKS, Case, Needs, ensure
from ..start.launch_file import default_launch_file, ensure_launch_file
from ..start.train import warnings_of
from .rows import audit

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
WARNING = "warning: "
"""A plugin's summary begins with it where the plugin is of no use."""
STEPS = 8
"""Steps of an epoch that are examined."""
MAX_PADDING = 0.5
"""Share of padding above which a warning is printed."""
MAX_FEWER = 4
"""Factor by which packing may lower the number of steps without a warning."""
ROWS = 100
"""Rows of each source that are rendered and encoded."""
NOTHING = EstimatedColumns(np.ones(0, np.int64))


class Findings:
    """Print a line per subject, and collect problems until the end."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def line(self, mark: str, subject: str, text: str) -> None:
        """Print a line: a subject is fine, may be a mistake, or fails."""
        out.print(Text.assemble((f"{mark:<6}", STYLES[mark]), f"{subject:<12}", text))

    ok = partialmethod(line, "ok")
    warn = partialmethod(line, "warn")

    def make(self, case: Case, *needs: Needs) -> None:
        """Make the checks that need this, each by itself."""
        for check in CHECKS:
            if check.needs in needs:
                with self.about(check.subject):
                    if said := check.make(case):
                        self.ok(check.subject, said)

    @contextmanager
    def about(self, subject: str) -> Iterator[None]:
        """Collect errors of the body, so that the checks go on."""
        try:
            yield
        except PlugsftError as error:
            new = [line for line in str(error).splitlines() if line not in self.problems]
            self.problems += new
            if new:
                text = "see the end" if len(new) == 1 else f"{len(new)} problems"
                self.line("fail", subject, text)


def check_recipe(recipe: Recipe, active: Active, path: Path, ranks: int | None) -> None:
    """Print a line for each check; then raise all problems at once."""
    active.attach(DataDefaults(recipe.folder), BatchDefaults(), ScheduleDefaults())
    machine, findings = look(), Findings()
    if ranks:
        machine = replace(machine, world_size=ranks)
    _check(findings, recipe, active, path, machine)
    if findings.problems:
        raise RecipeError(findings.problems)


def _check(
    findings: Findings, recipe: Recipe, active: Active, path: Path, machine: Machine
) -> None:
    findings.ok("recipe", f"{path}: all keys and values are valid")
    case = Case(recipe, active, machine, path)
    wrong, train = case.wrong_inputs, recipe.train
    findings.make(case, "nothing", "launcher", "plugins")
    if recipe.model.path not in wrong:
        findings.make(case, "model", "weights")
    findings.make(case, "reference")
    try:
        ensure_launch_file(default_launch_file(), recipe)
    except LaunchError as error:
        findings.warn("launch", f"`plugsft launch` would be refused: {error}")
    if unmet := without_fsdp2(recipe, machine):
        findings.warn("launch", unmet)
    if left := describe_results(recipe.folder):
        findings.warn("output", f"{recipe.output} holds {left}")
    if recipe.loses_small_steps:
        findings.warn("model", LOSSY)
    if recipe.model.dtype == "bfloat16" and (name := gpu_without_bfloat16(recipe)):
        findings.warn("model", f'{name} has no bfloat16; set model.dtype = "float16"')
    examples, tokens = check_data(findings, recipe, active, wrong)
    for name, summary in active.summaries(TOKEN_HOOKS).items():
        if summary.startswith(WARNING):
            findings.warn("plugins", f"{name}: {summary.removeprefix(WARNING)}")
        elif summary != "active":
            findings.ok("plugins", f"{name}: {summary}")
    _ranks(findings, train, machine.world_size, active)
    for warning in warnings_of(recipe, machine.world_size):
        findings.warn("recipe", warning)
    steps = per_epoch = train.steps or 100
    if len(examples["lengths"]):
        with findings.about("steps"):
            steps, per_epoch = _steps(findings, recipe, active, examples, machine.world_size)
    with findings.about("schedule"):
        factor = active.hooks.schedule(train=train, steps=steps)
        factors_of(factor, steps, with_plugins(active.hooks.schedule))
        schedule = " and ".join(active.having("schedule")) or train.schedule
        findings.ok("schedule", f"{schedule}, peak {train.learning_rate:g}")
    with findings.about("disk"):
        every = recipe.checkpoint.interval(steps, per_epoch)
        written = -(-steps // every) if every else 1
        # The oldest checkpoint is removed once a new one is complete.
        kept = min(written, recipe.checkpoint.keep + 1)
        findings.ok("disk", ensure_room(recipe, active, True, kept, tokens))


def gpu_without_bfloat16(recipe: Recipe) -> str | None:
    """A GPU here that is too old for bfloat16, which it would compute slowly or not at all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if recipe.device == "cpu" or visible == "":
        return None
    # Importing torch to ask it would take seconds.
    command = ["nvidia-smi", "--query-gpu=compute_cap,name", "--format=csv,noheader"]
    if visible:
        command.append(f"--id={visible}")  # it shows hidden ones, too
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None  # no driver
    # Compute capability 8 has it.
    older = re.search(r"^[1-7]\.\d+, *(.+?) *$", answer.stdout, re.M)
    return older[1] if older else None


def check_data(
    findings: Findings, recipe: Recipe, active: Active, wrong: Mapping[str, str]
) -> tuple[EstimatedColumns, float]:
    """Check the sources; estimate the examples of an epoch, and the tokens to be written."""
    model, sources = recipe.model, recipe.data.all_sources()
    needed = {recipe.data.tokens, model.template_file, model.tokenizer or model.path}
    if wrong.keys() & {*needed, *(source.source for source in sources)}:
        return NOTHING, 0.0
    parts, tokens, work = list[EstimatedColumns](), 0.0, None
    opened = list[OpenSource]()
    with TemporaryDirectory(prefix="plugsft-check-") as folder:
        with findings.about("data"):
            if recipe.data.tokens:
                estimate, trained = _prepared(findings, recipe, active)
                parts.append(estimate)
            else:
                opened = _open(findings, "data", sources)
                ensure_columns(recipe.data, opened)
                trained = [source.facts for source in opened]
            with findings.about("tokenizer"):
                work = make_work(recipe, active, opened, Path(folder), ROWS)
                findings.ok("tokenizer", _tokenizer(model, work))
        if work is None:
            return NOTHING, 0.0
        for number in range(len(opened)):
            with findings.about("rows"):
                parts.append(_rows(findings, recipe, active, work, opened, number))
                tokens += parts[-1]["lengths"].sum() / sources[number].weight
        if recipe.eval is not None and recipe.eval.source not in wrong:
            with findings.about("eval"):
                work.sources = [recipe.eval_source()]
                rows = _open(findings, "eval", work.sources)
                if any(overlap(rows[0].facts, source) for source in trained):
                    findings.warn("eval", ROWS_NOT_HELD_OUT)
                with findings.about("rows"):
                    tokens += _rows(findings, recipe, active, work, rows, 0)["lengths"].sum()
    if len(parts) < len(opened):
        return NOTHING, tokens
    names = {name for part in parts for name in part}
    columns = {name: np.concatenate([part[name] for part in parts]) for name in names}
    return EstimatedColumns(columns["lengths"], columns), tokens


def _prepared(
    findings: Findings, recipe: Recipe, active: Active
) -> tuple[EstimatedColumns, list[dict[str, Any]]]:
    """Check the tokens that the recipe names; return an epoch's examples, and their sources."""
    tokens = open_named_tokens(recipe, open_data(recipe, active), active)
    ensure(Case(recipe, active, look(), tokens=tokens), "tokens")
    findings.ok("data", summarize(tokens.facts, "already prepared"))
    for warning in data_warnings(tokens.facts):
        findings.warn("data", warning)
    order = active.hooks.order_examples(tokens=tokens, epoch=0, seed=recipe.train.seed)
    columns = {name: values[order] for name, values in tokens.plan_columns().items()}
    return EstimatedColumns(tokens.lengths[order], columns), tokens.facts["sources"]


def _open(findings: Findings, subject: str, sources: list[Source]) -> list[OpenSource]:
    opened = []
    for source in sources:
        opened.append(open_source(source, f"{subject}.source"))
        rows = format_count(len(opened[-1]), "row")
        findings.ok(subject, f"{source.source} ({source.split}): {rows}")
    return opened


def _tokenizer(model: Model, work: ShardWriter) -> str:
    where = model.tokenizer or model.path
    if where is None:
        return "trained on the data, or read from the cache; with a ChatML template"
    template = "with" if work.tokenizer.chat_template else "without"
    return f"{where}: {len(work.tokenizer):,} entries, {template} a chat template"


def _rows(
    findings: Findings,
    recipe: Recipe,
    active: Active,
    work: ShardWriter,
    opened: list[OpenSource],
    number: int,
) -> EstimatedColumns:
    """Audit the first rows of a source; estimate the examples of all."""
    first = [range(len(opened[number]))[:ROWS]]
    result = audit(work, opened, number, active, recipe.data, first)
    sample, shard = result.sample, result.sample.shard
    for warning in result.warnings:
        findings.warn("rows", f"{result.name}: {warning}")
    ensure(Case(recipe, active, look(), tokens=sample.tokens), "tokens")
    if result.errors:
        raise DataError("\n".join(f"{result.name}: {error}" for error in result.errors))
    findings.ok(
        "rows",
        f"{result.name}: {result.extent}: {shard.examples:,} examples with "
        f"{shard.tokens / shard.examples:,.0f} tokens each, "
        f"{shard.trained / shard.tokens:.0%} of them trained on",
    )
    for label, text in result.facts:
        if label == "unused columns":
            findings.ok("rows", f"{result.name}: {label}: {text}")
    # The examples of the sample in their order, and from the start again.
    of_all = work.sources[number].weight * len(opened[number]) / len(sample.rows)
    count, tokens = round(shard.examples * of_all), sample.tokens
    columns = {name: np.resize(of, count) for name, of in tokens.plan_columns().items()}
    return EstimatedColumns(np.resize(tokens.lengths, count), columns)


def _ranks(findings: Findings, train: Train, ranks: int, active: Active) -> None:
    """Describe how a global batch is divided among the ranks."""
    count = format_count(ranks, "rank")
    if planners := active.having("plan_batches"):
        findings.ok("ranks", f"{count}; batches are planned by {' and '.join(planners)}")
        return
    size, micro = train.batch_size, train.micro_batch
    steps, idle = -(-size // (ranks * micro)), ranks + (-size // micro)
    if idle > 0:
        cure = f"raise train.batch_size to {ranks}, or launch fewer ranks"
        if size >= ranks:
            cure = f"set train.micro_batch = {size // ranks}"
        findings.warn(
            "ranks",
            f"{idle} of {ranks} never get an example: train.batch_size = {size} is divided into "
            f"micro-batches of {micro}; {cure}",
        )
        return
    full = "" if size % (ranks * micro) == 0 else ", not all of them full"
    share = f"{steps} x {min(micro, size)} on each{full}"
    findings.ok("ranks", f"{count}, a global batch of {size} examples: {share}")


def _steps(
    findings: Findings, recipe: Recipe, active: Active, estimate: EstimatedColumns, ranks: int
) -> tuple[int, int]:
    """Say how many steps the run and an epoch will have, by a sample of the examples."""
    train, lengths = recipe.train, estimate["lengths"]
    examples = len(lengths)
    layouts = active.hooks.plan_batches(
        order=np.arange(examples),
        lengths=lengths,
        columns=estimate,
        ranks=ranks,
        train=train,
    )
    per_epoch = max(1, len(layouts))
    steps = train.steps or train.epochs * per_epoch
    # A plugin orders all examples, and without prepared tokens only a sample is known.
    guessed = active.having("order_examples") and not recipe.data.tokens
    about = "about " if guessed or active.having("plan_batches") else ""
    of = f"{per_epoch:,} an epoch of {examples:,} examples{train.replaced_epochs()}"
    findings.ok("steps", f"{about}{steps:,}, {of}")
    if len(layouts):
        _batches(findings, recipe, layouts, lengths)
    findings.ok("checkpoints", recipe.checkpoint.describe(steps, per_epoch))
    for warning in filter(None, (without_peak(train, steps), small_data(train, examples))):
        findings.warn("steps", warning)
    return steps, per_epoch


def _batches(findings: Findings, recipe: Recipe, layouts: Layouts, lengths: Ints) -> None:
    """Describe the size of a step; warn of likely mistakes."""
    count, examples, size = len(layouts), len(lengths), recipe.train.batch_size
    steps = layouts[:STEPS]
    micro_batches = [lengths[part] for step in steps for rank in step for part in rank if len(part)]
    tokens = sum(int(batch.sum()) for batch in micro_batches)
    per_rank = sum(len(step[0]) for step in steps) / len(steps)
    text = (
        f"about {tokens / len(steps):,.0f} tokens a step, in {per_rank:,.1f} micro-batches a rank; "
        f"{tokens / len(micro_batches):,.0f} tokens in a micro-batch"
    )
    padding = 0.0
    if packs := recipe.provides("packed_rows"):
        key, capacity = recipe.micro_batch_size()
        text += f", at most {capacity:,} ({key})"
    elif not recipe.provides("preference_pairs"):  # only the sum of a pair's lengths is known here
        padding = 1 - tokens / sum(len(batch) * int(batch.max()) for batch in micro_batches)
        text += f", padding {padding:.0%}"
    findings.ok("batches", text)
    if packs and count * MAX_FEWER * size <= examples:
        findings.warn(
            "batches",
            f"an epoch has {format_count(count, 'step')}, and {-(-examples // size):,} "
            f"unpacked: a step is {size} packed rows, {examples / count:,.0f} examples. "
            f"Lower train.batch_size to about {max(1, size * size * count // examples)} "
            "to take as many steps as before",
        )
    if padding > MAX_PADDING:
        findings.warn(
            "batches",
            f"{padding:.0%} of all tokens would be padding; "
            f"add {Capability.bundled('packed_rows').table}, which needs none, or "
            f"{Capability.bundled('sorted_lengths').table}, or lower train.micro_batch",
        )
