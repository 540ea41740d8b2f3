"""`plugsft plan`: forecast the memory of a recipe on GPUs that nobody has rented yet."""

import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ...base.console import format_size, progress, say
from ...base.errors import PlugsftError, choices
from ...base.for_commands import parse_size, print_table
from ...base.machine import look
from ...batches.defaults import BatchDefaults
from ...data.defaults import DataDefaults
from ...model.config import ensure_model_fits
from ...recipe.parse import anchored
from ...recipe.tables import Recipe
from ...registry.active import Active
from .forecaster import Forecast, Forecaster, Traced, choose, read_epoch, suggest
from .strategies import (
    ANY,
    GB,
    GPU_MEMORY,
    PER_MACHINE,
    SINGLE,
    Cluster,
    Memory,
    Strategy,
)

EXPLAINED = {
    "activations": "stored for the backward pass",
    "loss head": "logits and their gradients",
    "buffers": "gathered layers, workspaces",
    "total": "the peak of one rank",
}
"""What the rows of the table count."""
NOT_FORECAST = ("fused_kernels", "compiled_layers", "offloaded_activations")
"""Capabilities whose plugins save memory that is not traced."""


def plan(
    recipe: Recipe,
    active: Active,
    words: str,
    gpus: str,
    memory: str | None,
    gpu: str | None,
) -> None:
    """Forecast the memory of each strategy; where nothing fits, find changes that would.

    `words`: the recipe and its changes, as in the command line.
    """
    cluster = cluster_of(parse_gpus(gpus), memory, gpu, recipe.device == "cpu")
    active.attach(DataDefaults(recipe.folder), BatchDefaults())
    ensure_model_fits(recipe)
    with TemporaryDirectory(prefix="plugsft-plan-") as folder:
        epoch = read_epoch(recipe, active, Path(folder))
        forecaster = Forecaster(anchored(recipe), epoch, cluster.gpu)
        with progress("tracing a step", 1, "micro-batch") as advance:
            _, traced = forecaster.trace({}, cluster.ranks)
            advance(1, "")
        introduce(recipe, forecaster, traced, cluster)
        forecasts = forecaster.forecast({}, cluster)
        show_table(forecasts, cluster)
        chosen = choose(forecasts)
        if chosen is None:
            say(f"nothing fits in {format_size(cluster.memory)}. Changes, and the total with each:")
            for change, forecast in suggest(forecaster, recipe, cluster):
                total = format_size(total_of(forecast, cluster))
                fits = "fits" if forecast.fits else "too much"
                say(f"  {change}: {total} with {forecast.strategy.name}, {fits}")
        else:
            say(f"choose: {chosen.strategy.name}, {launch(chosen.strategy, cluster, words)}")
            if cluster.machines > 1:
                say(
                    f"run it on each machine: N is its number, 0 to {cluster.machines - 1}; HOST "
                    "is the name or address of machine 0. Slurm and torchrun fill them in: see "
                    "recipes/launch/ (plugsft init launch)"
                )
    for line in notes(recipe, forecasts):
        say(line)


def parse_gpus(text: str) -> tuple[int, int]:
    """The machines, and the GPUs of each: 8x8, or 16."""
    match = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)", text.strip().lower())
    if match is None:
        raise PlugsftError(f"--gpus: '{text}'; write it as 8 or, machines x GPUs, as 4x8")
    machines, each = int(match[1] or 1), int(match[2])
    if not match[1] and each > PER_MACHINE and each % PER_MACHINE == 0:
        return each // PER_MACHINE, PER_MACHINE
    return machines, each


def cluster_of(gpus: tuple[int, int], memory: str | None, name: str | None, here: bool) -> Cluster:
    """Choose the GPUs that were asked for, or this machine's device.

    `here`: the memory is that of this machine, and not of some GPU.
    """
    gpu, listed, total = torch.cuda.is_available(), 0, 0.0
    if name:
        device, gpu = name.upper(), True
        if device not in GPU_MEMORY:
            raise PlugsftError(
                f"--gpu: unknown '{name}'{choices(device, GPU_MEMORY)}. For "
                "another GPU, leave --gpu out and give its memory: --memory 24GiB"
            )
        listed = GPU_MEMORY[device]
        total = listed * GB
    elif gpu:
        device = torch.cuda.get_device_name()
        total = torch.cuda.get_device_properties().total_memory
    elif memory and not here:
        device, gpu = ANY, True
    else:
        device, total = "CPU", look().memory / gpus[1]  # ranks on the CPU share its memory
    if memory is None:
        return Cluster(device, gpu, total, *gpus, listed)
    if re.fullmatch(r"[\d.]+", memory.strip()):
        raise PlugsftError(f"--memory: '{memory}' has no unit; write it as {memory}GiB")
    cluster = Cluster(device, gpu, parse_size(memory, "--memory"), *gpus)
    if cluster.memory <= cluster.reserved:
        raise PlugsftError(
            f"--memory: {format_size(cluster.memory)} is no more than the "
            f"{format_size(cluster.reserved)} that {cluster.reserved_for} take"
        )
    return cluster


def introduce(recipe: Recipe, forecaster: Forecaster, traced: Traced, cluster: Cluster) -> None:
    """Print the facts that the forecast starts from."""
    weights, workload = traced.weights, traced.workload
    all_trained = weights.trained_count == weights.count
    trained = "all" if all_trained else f"{weights.trained_count:,} of them"
    say(f"model: {weights.count:,} parameters, {trained} trained, in {recipe.model.dtype}")
    shape = " x ".join(f"{side:,}" for side in workload.batch["input_ids"].shape)
    count = workload.micro_batches
    complete = forecaster.epoch.is_complete
    lengths = "all lengths are known" if complete else "lengths from the first rows"
    say(
        f"data: {workload.tokens:,.0f} tokens a step, at most {count:,} "
        f"micro-batch{'es' * (count != 1)} a rank, the largest {shape}; {lengths}"
    )
    if workload.idle_ranks:
        examples = len(forecaster.epoch.order)
        cure = f"raise train.batch_size (now {recipe.train.batch_size:,}), or use fewer ranks"
        if examples < cluster.ranks:
            cure = f"the data has {examples:,} examples: use fewer ranks"
        idle, ranks = workload.idle_ranks, cluster.ranks
        say(f"warning: {idle:,} of {ranks:,} ranks never get an example; {cure}")
    say(f"{cluster}\n")


def show_table(forecasts: Sequence[Forecast], cluster: Cluster) -> None:
    """Print a column for each strategy; explain the rows."""
    rows = [["", *(forecast.strategy.name for forecast in forecasts)]]
    for part in Memory._fields:
        sizes = [getattr(forecast.memory, part) for forecast in forecasts]
        rows.append([part.replace("_", " "), *map(format_size, sizes)])
    rows += [
        ["reserved", *[format_size(cluster.reserved)] * len(forecasts)],
        ["total", *(format_size(total_of(forecast, cluster)) for forecast in forecasts)],
        ["", *("fits" if forecast.fits else "too much" for forecast in forecasts)],
    ]
    notes = EXPLAINED | {"reserved": cluster.reserved_for}
    print_table([[*row, notes.get(row[0], "")] for row in rows], range(1, len(rows[0])))
    say("")


def total_of(forecast: Forecast, cluster: Cluster) -> float:
    """The bytes of a rank, with those that hold no tensors."""
    return forecast.memory.total + cluster.reserved


def launch(strategy: Strategy, cluster: Cluster, words: str) -> str:
    """The command that starts the run."""
    if strategy is SINGLE:
        return f"plugsft {words}"
    nodes = f" --nodes {cluster.machines} --node N --host HOST" if cluster.machines > 1 else ""
    ranks = f"--strategy {strategy.option} --ranks {cluster.per_machine}"
    return f"plugsft launch {words} {ranks}{nodes}"


def notes(recipe: Recipe, forecasts: Sequence[Forecast]) -> list[str]:
    """The assumptions and limits of the forecast."""
    lines = []
    after = [each.strategy.name for each in forecasts if each.memory.activations < 1e6]
    if after:
        lines.append(
            f"note: under {', '.join(after)} memory peaks at the end of the backward pass, when "
            "activations are freed"
        )
    savers = [saver.table for name in NOT_FORECAST for saver in recipe.providers(name)]
    if names := " and ".join(savers):
        lines.append(f"note: memory that {names} save{'s' * (len(savers) == 1)} is not subtracted")
    return lines
