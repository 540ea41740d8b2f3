"""`plugsft check`: all that can be known before weights are loaded and time is paid for."""

import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from ...base.console import format_size
from ...base.errors import DataError, RecipeError
from ...base.machine import free_disk, look
from ...base.types import Ints
from ...batches.defaults import BatchDefaults
from ...batches.plan import shuffle
from ...data.cache_key import TOKEN_HOOKS
from ...data.defaults import DataDefaults
from ...data.prepare import eval_source, open_data, open_named_tokens, summarize
from ...data.sample import make_work, sample_rows
from ...data.slices import CURE_BAD, CURE_LONG, Work, describe_rows, describe_warnings
from ...data.sources import OpenSource, ensure_columns, open_source
from ...model.config import check_context, check_ids, ensure_whole_weights
from ...model.schedule import check_schedule
from ...output.disk_space import (
    TOKEN_BYTES,
    may_train_few_weights,
    parameters,
    reclaimable_bytes,
    required_bytes,
)
from ...output.folder import ensure_ours, leftovers, wrong_inputs
from ...recipe.tables import LOSSY, Recipe, Source, Train
from ...registry import active as registry
from ...registry.active import Active
from ...registry.contracts import hook_mark
from .batches import sense
from .findings import Findings
from .rows import judge_chats

ROWS = 100
"""Rows of each source that are rendered and encoded."""


def check_recipe(recipe: Recipe, active: Active, path: Path, ranks: int | None) -> None:
    """Check everything, and print a line for each; then raise all problems at once."""
    active.attach(DataDefaults(recipe.folder), BatchDefaults())
    with active.name_failing_plugin():
        _check(recipe, active, path, ranks)


def _check(recipe: Recipe, active: Active, path: Path, ranks: int | None) -> None:
    machine = look()
    machine = replace(machine, world_size=ranks or machine.world_size)
    findings = Findings()
    findings.ok("recipe", f"{path}: every key is known, every value fits")
    with findings.about("plugins"):
        registry.check(active, recipe, machine)
        findings.ok("plugins", ", ".join(active.plugins) or "none")
    wrong = wrong_inputs(recipe, path)
    with findings.about("paths"):
        if wrong:
            raise RecipeError([*wrong.values()])
        findings.ok("paths", f"relative ones begin at {Path.cwd()}")
    if recipe.model.path not in wrong:
        with findings.about("model"):
            check_context(recipe)
            ensure_whole_weights(recipe.model)
            findings.ok("model", _describe(recipe))
    if recipe.model.weights == "bfloat16":
        findings.warn("model", LOSSY)
    with findings.about("schedule"):
        check_schedule(recipe.train)
        findings.ok("schedule", f"{recipe.train.schedule}, peak {recipe.train.learning_rate:g}")
    lengths, tokens = _data(findings, recipe, active, wrong)
    for name, verdict in active.verdicts(TOKEN_HOOKS).items():
        if verdict != "active":
            findings.ok("plugins", f"{name}: {verdict}")
    _ranks(findings, recipe.train, machine.world_size, active)
    steps = None
    with findings.about("steps"):
        if len(lengths):
            steps = _steps(findings, recipe, active, lengths, machine.world_size)
    with findings.about("output"):
        _output(findings, recipe)
    with findings.about("disk"):
        _disk(findings, recipe, active, tokens, steps)
    if findings.problems:
        raise RecipeError(findings.problems)


def _data(
    findings: Findings, recipe: Recipe, active: Active, wrong: dict[str, str]
) -> tuple[Ints, float]:
    """Look at the sources; return about the lengths of an epoch, and the tokens to be written."""
    if recipe.data.tokens:
        return _prepared(findings, recipe, active, wrong), 0.0
    sources = recipe.data.all_sources()
    opened = [_open(findings, "data", one) for one in sources if one.source not in wrong]
    rows = [one for one in opened if one is not None]
    complete = len(rows) == len(sources)
    model = recipe.model
    known = not {*wrong} & {model.tokenizer or model.path, model.chat_template}
    tokens, work = 0.0, None
    # Where nothing can be encoded, the number of examples is known at least.
    lengths = [np.ones(len(one), np.int64) for one in rows]
    with TemporaryDirectory(prefix="plugsft-check-") as folder:
        if complete:
            with findings.about("data"):
                ensure_columns(recipe.data, rows)
                work = _work(findings, recipe, active, rows, Path(folder)) if known else None
        for number in range(len(rows)):
            if work is not None:
                with findings.about("rows"):
                    lengths[number] = _rows(findings, recipe, active, work, rows, number)
                    tokens += lengths[number].sum()
        if recipe.eval is not None and recipe.eval.source not in wrong:
            with findings.about("eval"):
                held_out = eval_source(recipe)
                if held_out in [one.model_copy(update={"weight": 1.0}) for one in sources]:
                    findings.warn("eval", "measures the loss on the very rows that are trained on")
                elif (found := _open(findings, "eval", held_out)) is not None and work:
                    work.sources = [held_out]
                    tokens += _rows(findings, recipe, active, work, [found], 0).sum()
    if not complete:
        return np.zeros(0, np.int64), tokens
    epoch = [
        np.resize(some, round(source.weight * len(some)))
        for some, source in zip(lengths, sources, strict=True)
    ]
    return np.concatenate(epoch), tokens


def _prepared(findings: Findings, recipe: Recipe, active: Active, wrong: dict[str, str]) -> Ints:
    """Look at the tokens that the recipe names; return the lengths of an epoch's examples."""
    with findings.about("data"):
        if not wrong:
            tokens = open_named_tokens(recipe, open_data(recipe, active), active)
            check_ids(recipe, tokens.facts["largest_id"])
            findings.ok("data", summarize(tokens.facts, "already prepared").removeprefix("data: "))
            sources = [(one["examples"], one["weight"]) for one in tokens.facts["sources"]]
            return tokens.lengths[shuffle(sources, recipe.train.seed, 0)]
    return np.zeros(0, np.int64)


def _open(findings: Findings, what: str, source: Source) -> OpenSource | None:
    with findings.about(what):
        rows = open_source(source)
        findings.ok(what, f"{source.source} ({source.split}): {len(rows):,} rows")
        return rows
    return None


def _work(
    findings: Findings, recipe: Recipe, active: Active, rows: list[OpenSource], folder: Path
) -> Work | None:
    with findings.about("tokenizer"):
        work = make_work(recipe, active, rows, folder, ROWS)
        where = recipe.model.tokenizer or recipe.model.path
        template = "with" if work.tokenizer.chat_template else "without"
        findings.ok(
            "tokenizer",
            f"{where}: {len(work.tokenizer):,} entries, {template} a chat template"
            if where
            else "a new one will be trained on the data, with a ChatML template",
        )
        return work
    return None


def _rows(
    findings: Findings,
    recipe: Recipe,
    active: Active,
    work: Work,
    opened: list[OpenSource],
    number: int,
) -> Ints:
    """Judge the first rows of a source as preparing would; return the lengths of all, about."""
    sample, source = sample_rows(work, opened, number, 0, ROWS), work.sources[number].source
    shard, data, problems = sample.shard, recipe.data, []
    where = f"{source}: of the first {len(sample.rows):,} rows,"
    if shard.examples:
        findings.ok(
            "rows",
            f"{where} {shard.examples:,} can be used, with {shard.tokens / shard.examples:,.0f} "
            f"tokens each, {shard.trained / shard.tokens:.0%} of them trained on",
        )
    for reason, numbers in sorted(shard.bad.items()):
        text = f"{where} {describe_rows(numbers)}: {reason}"
        if data.on_bad_row == "error":
            problems.append(text + CURE_BAD)
        else:
            findings.warn("rows", f"{text}; they will be left out")
    if shard.too_long:
        text = f"{where} {describe_rows(shard.too_long)}: longer than {data.max_length} tokens"
        if data.too_long == "error":
            problems.append(text + CURE_LONG)
        else:
            findings.warn("rows", f"{text}; they will be left out")
    if not shard.examples and not problems:
        problems.append(f"{where} not one has a token to train on")
    if shard.truncated:
        text = f"{where} {describe_rows(shard.truncated)}: longer than {data.max_length} tokens"
        findings.warn("rows", f"{text}; they will be cut")
    for warning in describe_warnings(shard.warnings):
        findings.warn("rows", f"{where} {warning}")
    if shard.unread:
        findings.ok("rows", f"{source}: columns that are not read: {', '.join(shard.unread)}")
    for warning in judge_chats(sample, work, opened[number], active)[1]:
        findings.warn("rows", f"{source}: {warning}")
    check_ids(recipe, shard.largest)
    if problems:
        raise DataError("\n".join(problems))
    return np.resize(sample.tokens.lengths, len(opened[number]))


def _ranks(findings: Findings, train: Train, ranks: int, active: Active) -> None:
    """Say how a window is dealt to the ranks."""
    word = "rank" if ranks == 1 else "ranks"
    if others := _layers(active):
        findings.ok("ranks", f"{ranks} {word}; windows are laid out by {' and '.join(others)}")
        return
    size, micro = train.batch_size, train.micro_batch
    steps, idle = -(-size // (ranks * micro)), ranks + (-size // micro)
    if idle > 0:
        cure = f"raise train.batch_size to {ranks}, or launch fewer ranks"
        if size >= ranks:
            cure = f"set train.micro_batch = {size // ranks}"
        findings.warn(
            "ranks",
            f"{idle} of {ranks} never get an example: train.batch_size = {size} is dealt out "
            f"{micro} at a time; {cure}",
        )
        return
    full = "" if size % (ranks * micro) == 0 else ", though not all of them full"
    share = f"{steps} x {min(micro, size)} on each{full}"
    findings.ok("ranks", f"{ranks} {word}, a window of {size} examples: {share}")


def _layers(active: Active) -> list[str]:
    """Return the plugins that lay windows out."""
    return [name for name, one in active.plugins.items() if hook_mark(type(one), "batches")]


def _steps(findings: Findings, recipe: Recipe, active: Active, lengths: Ints, ranks: int) -> int:
    """Say how many steps a run takes, if the rows that were looked at are like the others."""
    train, examples = recipe.train, len(lengths)
    windows = active.hooks.batches(
        order=np.arange(examples), lengths=lengths, ranks=ranks, train=train
    )
    per_epoch = max(1, len(windows))
    steps = train.steps or train.epochs * per_epoch
    about, parts = "", ""
    if _layers(active) and len(windows):
        about, layout = "about ", windows[0]
        count, held = len(layout[0]), sum(len(part) for rank in layout for part in rank)
        parts = f"; the first: {held:,} examples in {count:,} x {ranks} micro-batches"
    findings.ok(
        "steps", f"{about}{steps:,}, {per_epoch:,} an epoch of {examples:,} examples{parts}"
    )
    if len(windows) and lengths.max() > 1:  # where rows were encoded, and not only counted
        said, warnings = sense(recipe, windows, lengths)
        findings.ok("batches", said)
        for warning in warnings:
            findings.warn("batches", warning)
    findings.ok("checkpoints", recipe.checkpoint.describe(steps))
    warmup = round(train.warmup * steps if train.warmup < 1 else train.warmup)
    if warmup >= steps:
        findings.warn(
            "steps",
            f"the warm-up takes {warmup:,} of {steps:,} steps, so the learning rate never reaches "
            "train.learning_rate; lower train.warmup",
        )
    if train.batch_size > examples:
        findings.warn("steps", f"train.batch_size = {train.batch_size} is more than an epoch has")
    return steps


def _output(findings: Findings, recipe: Recipe) -> None:
    """Look at the folder that receives the run."""
    folder = recipe.folder.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise RecipeError(f"output: {there} is a file; give another folder")
    if not os.access(there, os.W_OK):
        raise RecipeError(f"output: {there} cannot be written to; give another folder")
    ensure_ours(recipe.folder)
    if left := leftovers(recipe.folder):
        findings.warn("output", f"{recipe.output} holds {left}")
    else:
        findings.ok("output", recipe.output)


def _disk(
    findings: Findings, recipe: Recipe, active: Active, tokens: float, steps: int | None
) -> None:
    """Compare what the run will write with the free space."""
    every = recipe.checkpoint.interval(steps or 1)
    written = -(-(steps or 1) // every) if every else 1
    # The oldest goes once a new one is complete.
    need = required_bytes(recipe, min(written, recipe.checkpoint.keep + 1))
    free = free_disk(recipe.folder.absolute()) + reclaimable_bytes(recipe)
    if need is None:
        findings.warn(
            "disk", f"{format_size(free)} free; the model's size is known once it is downloaded"
        )
        return
    need += round(tokens * TOKEN_BYTES)
    text = f"about {format_size(need)} needed, {format_size(free)} free"
    if need < free:
        findings.ok("disk", text)
        return
    cure = "lower checkpoint.keep, or give another output"
    if may_train_few_weights(active):
        findings.warn("disk", f"{text}, unless a plugin makes it less; {cure}")
    else:
        raise RecipeError(f"output: {text}; {cure}")


def _describe(recipe: Recipe) -> str:
    limit = f"max_length {recipe.data.max_length:,} fits its context"
    if recipe.model.scratch:
        return f"new, at most {parameters(recipe.model.scratch):,} parameters; {limit}"
    return f"{recipe.model.path}; {limit}"
