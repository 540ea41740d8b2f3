"""`plugsft plan`: forecast the memory of a recipe on GPUs that nobody has rented yet."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ...base.console import format_size, parse_size, print_table, progress, say
from ...base.errors import PlugsftError, choices
from ...batches.defaults import BatchDefaults
from ...data.defaults import DataDefaults
from ...recipe.parse import anchored
from ...recipe.tables import Recipe
from ...registry.active import Active
from .forecaster import Forecast, Forecaster, Traced, choose, probe, read_epoch, suggest
from .strategies import (
    ANY,
    GB,
    GPU_MEMORY,
    PER_MACHINE,
    SINGLE,
    Cluster,
    Memory,
    Strategy,
    this_device,
)

EXPLAINED = {
    "activations": "stored for the backward pass",
    "loss head": "logits and their gradients",
    "buffers": "gathered layers, workspaces",
    "total": "the peak of one rank",
}
"""What the rows of the table count."""


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    gpus: str
    memory: str | None
    gpu: str | None
    probe: bool


def plan(recipe: Recipe, active: Active, words: str, options: Options) -> None:
    """Forecast the memory of each strategy; where nothing fits, find changes that would.

    `words`: the recipe and its changes, as in the command line.
    """
    machines, per_machine = parse_gpus(options.gpus)
    cluster = cluster_of(options, machines, per_machine, recipe.device == "cpu")
    active.attach(DataDefaults(recipe.folder), BatchDefaults())
    with TemporaryDirectory(prefix="plugsft-plan-") as folder:
        epoch = read_epoch(recipe, active, Path(folder))
        forecaster = Forecaster(anchored(recipe), epoch, cluster.gpu)
        if options.probe:
            forecaster.scale = probe_and_report(forecaster, cluster)
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
                say(f"  {change}: {describe(forecast, cluster)}")
        else:
            say(f"choose: {chosen.strategy.name}, {launch(chosen.strategy, cluster, words)}")
            if cluster.machines > 1:
                say(
                    f"run it on each machine: N is its number, 0 to {cluster.machines - 1}; HOST "
                    "is the name or address of machine 0. Slurm and torchrun fill them in: see "
                    "recipes/launch/ (plugsft init launch)"
                )
    for line in notes(recipe, cluster, forecasts):
        say(line)


def parse_gpus(text: str) -> tuple[int, int]:
    """Return the machines and the GPUs of each from "8x8" or "16"."""
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)", text.strip().lower())
    machines, each = (int(match[1] or 1), int(match[2])) if match else (0, 0)
    if match is None or not machines or not each:
        raise PlugsftError(f"--gpus: '{text}'; write it as 8 or, machines x GPUs, as 4x8")
    if match[1] is None and each > PER_MACHINE and each % PER_MACHINE == 0:
        return each // PER_MACHINE, PER_MACHINE
    return machines, each


def parse_memory(text: str) -> float:
    """Return the bytes of "80GiB"."""
    if re.fullmatch(r"[\d.]+", text.strip()):
        raise PlugsftError(f"--memory: '{text}' has no unit; write it as {text}GiB")
    size = parse_size(text, "--memory")
    if not size:
        raise PlugsftError(f"--memory: '{text}'; write the memory of each GPU: 80GiB")
    return size


def cluster_of(options: Options, machines: int, per_machine: int, cpu: bool) -> Cluster:
    """Return the GPUs that were asked for, or this machine's device."""
    memory = parse_memory(options.memory) if options.memory else None
    device, gpu, total = this_device()
    if options.gpu:
        name = options.gpu.upper()
        if name not in GPU_MEMORY:
            raise PlugsftError(
                f"--gpu: unknown '{options.gpu}'{choices(name, GPU_MEMORY)}. For "
                "another GPU, leave --gpu out and give its memory: --memory 24GiB"
            )
        if options.probe and name not in device.replace(" ", "-"):
            raise PlugsftError(
                f"--probe: it measures this machine ({device}), not --gpu {name}; "
                "remove one of the two"
            )
        listed = GPU_MEMORY[name]
        cluster = Cluster(name, True, listed * GB, machines, per_machine, listed)
    elif memory and not (gpu or cpu or options.probe):
        cluster = Cluster(ANY, True, memory, machines, per_machine)
    else:
        # Ranks on the CPU share its memory.
        cluster = Cluster(device, gpu, total / (1 if gpu else per_machine), machines, per_machine)
    if memory is None:
        return cluster
    if memory <= cluster.reserved:
        raise PlugsftError(
            f"--memory: {format_size(memory)} is no more than the {format_size(cluster.reserved)} "
            f"that {cluster.reserved_for} take"
        )
    return replace(cluster, memory=memory, listed=0)


def probe_and_report(forecaster: Forecaster, cluster: Cluster) -> float:
    """Train real steps; say how far off the forecast was; return the factor of activations."""
    result = probe(forecaster.tables, cluster)
    error = result.forecast / result.measured - 1
    measured, forecast = map(format_size, (result.measured, result.forecast))
    say(
        f"probe: measured {measured}, forecast {forecast} ({error:+.0%}), corrected below; "
        f"{result.seconds:.3g} s a step of one rank on this machine"
    )
    return result.scale


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
    """Return the bytes of a rank, with those that hold no tensors."""
    return forecast.memory.total + cluster.reserved


def describe(forecast: Forecast, cluster: Cluster) -> str:
    """Return a line about one strategy."""
    fits = "fits" if forecast.fits else "too much"
    return f"{format_size(total_of(forecast, cluster))} with {forecast.strategy.name}, {fits}"


def launch(strategy: Strategy, cluster: Cluster, words: str) -> str:
    """Return the command that starts the run."""
    if strategy is SINGLE:
        return f"plugsft {words}"
    nodes = f" --nodes {cluster.machines} --node N --host HOST" if cluster.machines > 1 else ""
    ranks = f"--strategy {strategy.option} --ranks {cluster.per_machine}"
    return f"plugsft launch {words} {ranks}{nodes}"


def notes(recipe: Recipe, cluster: Cluster, forecasts: Sequence[Forecast]) -> list[str]:
    """Return the assumptions and limits of the forecast."""
    lines = []
    after = [each.strategy.name for each in forecasts if each.memory.activations < 1e6]
    if after:
        lines.append(
            f"note: under {', '.join(after)} memory peaks at the end of the backward pass, when "
            "activations are freed"
        )
    savers = [*recipe.providers("fused_kernels"), *recipe.providers("compiled_layers")]
    if names := " and ".join(saver.table for saver in savers):
        lines.append(f"note: memory that {names} save is not subtracted")
    host = max(forecast.host for forecast in forecasts)
    if host and (offloaded := recipe.provides("offloaded_activations")):
        lines.append(
            f"note: {offloaded.table} keeps {format_size(host)} of each rank's activations in host "
            f"memory, {format_size(host * cluster.per_machine)} a machine"
        )
    return lines
