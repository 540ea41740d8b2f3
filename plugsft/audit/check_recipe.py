"""`plugsft check`: all checks that need no weights and no training."""

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors import safe_open

from ..base.console import format_count
from ..base.errors import RecipeError, reason_of
from ..base.machine import look
from ..base.types import Ints, Layouts
from ..batches.defaults import BatchDefaults
from ..batches.plan import small_data
from ..data.defaults import DataDefaults
from ..data.prepare import TOKEN_HOOKS
from ..data.sample import EstimatedColumns
from ..model.config import ensure_model_fits
from ..model.schedule import ScheduleDefaults, ensure_schedule, factors_of, long_warmup
from ..output.disk_space import ensure_room, parameters
from ..output.folder import describe_results, ensure_ours, wrong_inputs
from ..recipe.capabilities import Capability
from ..recipe.tables import LOSSY, Model, Recipe, Train
from ..registry import active as registry
from ..registry.active import Active
from ..start.train import warnings_of
from .findings import Findings
from .sources import check_data

WARNING = "warning: "
"""A plugin's summary begins with it where the plugin is of no use."""
STEPS = 8
"""Steps of an epoch that are examined."""
MAX_PADDING = 0.5
"""Share of padding above which a warning is printed."""
MAX_FEWER = 4
"""Factor by which packing may lower the number of steps without a warning."""


def check_recipe(recipe: Recipe, active: Active, path: Path, ranks: int | None) -> None:
    """Print a line for each check; then raise all problems at once."""
    active.attach(DataDefaults(recipe.folder), BatchDefaults(), ScheduleDefaults())
    machine, train, findings = look(), recipe.train, Findings()
    if ranks:
        machine = replace(machine, world_size=ranks, local_size=ranks)
    findings.ok("recipe", f"{path}: all keys and values are valid")
    with findings.about("plugins"):
        registry.check(active, recipe, machine)
        findings.ok("plugins", ", ".join(active.plugins) or "none")
    wrong = wrong_inputs(recipe, path)
    with findings.about("paths"):
        if wrong:
            raise RecipeError([*wrong.values()])
        findings.ok("paths", f"relative to {Path.cwd()}")
    if recipe.model.path not in wrong:
        with findings.about("model"):
            ensure_model_fits(recipe)
            _ensure_whole_weights(recipe.model)
            findings.ok("model", _describe(recipe))
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
    steps = train.steps or 100
    with findings.about("steps"):
        if len(examples["lengths"]):
            steps = _steps(findings, recipe, active, examples, machine.world_size)
    with findings.about("schedule"):
        ensure_schedule(train)
        factors_of(active.hooks.schedule(train=train, steps=steps), steps)
        schedule = " and ".join(active.having("schedule")) or train.schedule
        findings.ok("schedule", f"{schedule}, peak {train.learning_rate:g}")
    with findings.about("output"):
        _output(findings, recipe)
    with findings.about("disk"):
        every = recipe.checkpoint.interval(steps)
        written = -(-steps // every) if every else 1
        # The oldest checkpoint is removed once a new one is complete.
        kept = min(written, recipe.checkpoint.keep + 1)
        findings.ok("disk", ensure_room(recipe, active, True, kept, tokens))
    if findings.problems:
        raise RecipeError(findings.problems)


def _ensure_whole_weights(model: Model) -> None:
    """Refuse a folder without weights or with a truncated file; only reads headers."""
    folder = Path(model.path or "")
    if not model.path or not folder.is_dir():
        return
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise RecipeError(f"model.path: '{folder}' holds no weights (*.safetensors)")
    for file in files:
        try:
            with safe_open(file, framework="np"):
                pass
        except Exception as error:  # safetensors raises its own errors and the system's
            raise RecipeError(f"model.path: {file}: cannot be read ({reason_of(error)})") from error


def gpu_without_bfloat16(recipe: Recipe) -> str | None:
    """A GPU here that is too old for bfloat16, which it would compute slowly or not at all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if recipe.device == "cpu" or visible == "":
        return None
    # Importing torch to ask it would take seconds.
    command = ["nvidia-smi", "--query-gpu=compute_cap,name", "--format=csv,noheader"]
    command += [f"--id={visible}"] if visible else []  # it shows hidden ones, too
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None  # no driver
    gpus = re.findall(r"^(\d+)\.\d+, *(.+?) *$", answer.stdout, re.M)
    return next((name for major, name in gpus if int(major) < 8), None)


def _ranks(findings: Findings, train: Train, ranks: int, active: Active) -> None:
    """Describe how a global batch is divided among the ranks."""
    word = "rank" if ranks == 1 else "ranks"
    if planners := active.having("plan_batches"):
        findings.ok("ranks", f"{ranks} {word}; batches are planned by {' and '.join(planners)}")
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
    findings.ok("ranks", f"{ranks} {word}, a global batch of {size} examples: {share}")


def _steps(
    findings: Findings, recipe: Recipe, active: Active, estimate: EstimatedColumns, ranks: int
) -> int:
    """Say how many steps there will be, estimated from a sample of the examples."""
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
    findings.ok("checkpoints", recipe.checkpoint.describe(steps))
    for warning in filter(None, (long_warmup(train, steps), small_data(train, examples))):
        findings.warn("steps", warning)
    return steps


def _output(findings: Findings, recipe: Recipe) -> None:
    """Check that the output folder can be written."""
    folder = recipe.folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise RecipeError(f"output: {existing} is no folder to write to; name another folder")
    ensure_ours(recipe.folder)
    if left := describe_results(recipe.folder):
        findings.warn("output", f"{recipe.output} holds {left}")
    else:
        findings.ok("output", recipe.output)


def _describe(recipe: Recipe) -> str:
    limit = f"max_length {recipe.data.max_length:,} fits its context"
    if recipe.model.scratch:
        return f"new, at most {parameters(recipe.model.scratch):,} parameters; {limit}"
    return f"{recipe.model.path}; {limit}"


def _batches(findings: Findings, recipe: Recipe, layouts: Layouts, lengths: Ints) -> None:
    """Describe the size of a step; warn of likely mistakes."""
    steps, examples, size = layouts[:STEPS], len(lengths), recipe.train.batch_size
    micro_batches = [lengths[part] for step in steps for rank in step for part in rank if len(part)]
    tokens = sum(int(batch.sum()) for batch in micro_batches)
    per_rank = sum(len(step[0]) for step in steps) / len(steps)
    text = (
        f"about {tokens / len(steps):,.0f} tokens a step, in {per_rank:,.1f} micro-batches a rank; "
        f"{tokens / len(micro_batches):,.0f} tokens in a micro-batch"
    )
    if recipe.provides("packed_rows"):
        key, capacity = recipe.micro_batch_size()
        findings.ok("batches", f"{text}, at most {capacity:,} ({key})")
        if len(layouts) * MAX_FEWER * size <= examples:
            findings.warn(
                "batches",
                f"an epoch has {format_count(len(layouts), 'step')}, and {-(-examples // size):,} "
                f"unpacked: a step is {size} packed rows, {examples / len(layouts):,.0f} examples. "
                f"Lower train.batch_size to about {max(1, size * size * len(layouts) // examples)} "
                "to take as many steps as before",
            )
        return
    if recipe.provides("preference_pairs"):  # only the sum of a pair's lengths is known here
        findings.ok("batches", text)
        return
    padding = 1 - tokens / sum(len(batch) * int(batch.max()) for batch in micro_batches)
    findings.ok("batches", f"{text}, padding {padding:.0%}")
    if padding > MAX_PADDING:
        findings.warn(
            "batches",
            f"{padding:.0%} of all tokens would be padding; "
            f"add {Capability.bundled('packed_rows').table}, which needs none, or "
            f"{Capability.bundled('sorted_lengths').table}, or lower train.micro_batch",
        )
