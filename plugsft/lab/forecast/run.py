"""`plugsft plan`: what a recipe will hold and take, on GPUs that nobody has rented yet."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.text import Text

from ...base.console import out, parse_size, progress, say
from ...base.errors import PlugsftError, did_you_mean
from ...batches.defaults import BatchDefaults
from ...data.defaults import DataDefaults
from ...output.folder import ensure_inputs
from ...recipe.parse import anchored
from ...recipe.tables import Recipe
from ...registry import active as registry
from .chips import CHIPS, GB, HIDDEN, LINKS, MACHINE, PRODUCTS, STREAM, Chip, Cluster, here
from .strategies import ONE, ZERO2, Strategy
from .variants import SPARE, Outcome, Scope, Seen, best_of, cures, probe
from .workload import Rows, rows_of

HEADS = ("weights", "gradients", "optimizer", "activations", "loss head", "buffers", "in all")


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    gpus: str
    memory: str | None
    gpu: str | None
    tflops: float | None
    bandwidth: float | None
    probe: bool


def plan(path: Path, overrides: Sequence[str], without: Sequence[str], options: Options) -> None:
    """Forecast memory and time of each strategy; where nothing fits, find what would."""
    machines, each = parse_gpus(options.gpus)
    given = parse_memory(options.memory) if options.memory else None
    recipe, active = registry.load(path, overrides, without)
    ensure_inputs(recipe, path)
    chip = chip_of(options, recipe, each)
    cluster = Cluster(chip, machines, each)
    # Ranks on a processor share its memory.
    room = given or chip.memory / (1 if chip.gpu else each)
    spare = SPARE[chip.gpu]
    if given and given <= spare:
        less = f"{gb(given)} is no more than the {gb(spare)} that {besides(chip)} take"
        raise PlugsftError(f"--memory: {less}")
    active.attach(DataDefaults(recipe.folder), BatchDefaults())
    with TemporaryDirectory(prefix="plugsft-plan-") as folder, active.name_failing_plugin():
        scope = Scope(anchored(recipe), rows_of(recipe, active, Path(folder)), chip.gpu)
        if options.probe:
            found = probe(scope.tables, cluster)
            scope.scale = found.scale
            cluster = replace(cluster, speed=found.expected / found.seconds)
            memory, pace = found.forecast / found.memory - 1, found.expected / found.seconds - 1
            say(
                f"probe: {gb(found.memory)} held, forecast {gb(found.forecast)} ({memory:+.0%}); "
                f"{found.seconds:.3g} s a step, forecast {found.expected:.3g} s ({pace:+.0%}). "
                "Corrected below"
            )
        with progress("following a step", 1, "micro-batch") as advance:
            _, seen = scope.see({}, cluster.ranks)
            advance(1, "")
        introduce(recipe, scope.rows, seen, cluster, room)
        outcomes = scope.forecast({}, cluster, room)
        show(outcomes, cluster)
        best = best_of(outcomes)
        if best is None:
            say(
                f"nothing fits in {gb(room)}, of which {gb(spare)} are not for tensors. "
                "What other lines would come to:"
            )
            for words, one in cures(scope, recipe, cluster, room):
                say(f"  {words}: {told(one)}")
        else:
            say(f"best: {best.strategy.name}, {launch(best.strategy, cluster, path)}")
    for line in notes(recipe, cluster, outcomes):
        say(line)


def parse_gpus(text: str) -> tuple[int, int]:
    """Return machines and the GPUs of each: of "8x8", or of "16"."""
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)", text.strip().lower())
    machines, each = (int(match[1] or 1), int(match[2])) if match else (0, 0)
    if match is None or not machines or not each:
        raise PlugsftError(f"--gpus: given '{text}'; write it as 8 or, machines x GPUs, as 4x8")
    if match[1] is None and each > MACHINE and each % MACHINE == 0:
        return each // MACHINE, MACHINE
    return machines, each


def parse_memory(text: str) -> float:
    """Return the bytes of "80GB"."""
    if re.fullmatch(r"[\d.]+", text.strip()):
        raise PlugsftError(f"--memory: given '{text}', without a unit; write it as {text}GB")
    size = parse_size(text, "--memory")
    if not size:
        raise PlugsftError(f"--memory: given '{text}'; it is what each GPU has: 80GB")
    return size


def chip_of(options: Options, recipe: Recipe, each: int) -> Chip:
    """Return the GPU that was asked for, or what this machine has."""
    mine = here(recipe.model.dtype != "float32") if not options.gpu or options.probe else None
    chip = CHIPS.get((options.gpu or "").upper()) or mine
    if options.gpu and chip is mine:
        hint = did_you_mean(options.gpu.upper(), CHIPS) or ";"
        raise PlugsftError(
            f"--gpu: unknown '{options.gpu}'{hint} known are {', '.join(CHIPS)}. For another, name "
            "the one most like it, and give --tflops, --memory and --bandwidth"
        )
    assert chip is not None
    if mine is not None and chip.name != mine.name:
        raise PlugsftError(
            f"--probe: it measures this machine ({mine.name}), and --gpu {chip.name} is another; "
            "leave one of them out"
        )
    if options.tflops:
        chip = replace(chip, half=options.tflops * 1e12, single=options.tflops * 1e12)
    if options.bandwidth:
        chip = replace(chip, network=options.bandwidth * GB / each)
    return chip


def introduce(recipe: Recipe, rows: Rows, seen: Seen, cluster: Cluster, room: float) -> None:
    """Say what is forecast, and from what."""
    weights, load, chip = seen.weights, seen.load, cluster.chip
    trained = (
        f"{weights.trained_count:,} of them" if weights.trained_count < weights.count else "all"
    )
    say(f"model: {weights.count:,} parameters, {trained} trained, in {recipe.model.dtype}")
    shape = " x ".join(f"{side:,}" for side in load.batch["input_ids"].shape)
    micro = f"{load.micro:,} micro-batch{'es' * (load.micro != 1)}"
    known = "all lengths are known" if rows.known else "the first rows stand for the others"
    say(
        f"data: {load.tokens:,.0f} tokens a step, at most {micro} of a rank, "
        f"the largest {shape}; {known}"
    )
    if load.idle:
        size, examples = recipe.train.batch_size, len(rows.order)
        cure = f"raise train.batch_size (now {size:,}), or take fewer"
        if examples < cluster.ranks:
            cure = f"there are {examples:,} examples in all: take fewer"
        say(f"warning: {load.idle:,} of {cluster.ranks:,} ranks never get an example; {cure}")
    where = f"{cluster.machines:,} x {cluster.each:,} {chip.name}"
    say(f"{'GPUs' if chip.gpu else 'ranks'}: {where}, {gb(room)} each\n")


def show(outcomes: Sequence[Outcome], cluster: Cluster) -> None:
    """Print a line for each strategy, the best one bold."""
    rows = [["", *HEADS, "", "s/step", "exposed", "tokens/s", "each"]]
    for one in outcomes:
        parts = [gb(size) for size in (*one.parts, one.parts.total)]
        speed = one.tokens / one.seconds.total
        rows.append(
            [
                one.strategy.name,
                *parts,
                "fits" if one.fits else "too much",
                f"{one.seconds.total:,.3g}",
                f"{one.seconds.traffic / one.seconds.total:.0%}",
                f"{speed:,.0f}",
                f"{speed / cluster.ranks:,.0f}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    best = best_of(outcomes)
    styles = ["bold"] + ["bold green" if one is best else "" for one in outcomes]
    for row, style in zip(rows, styles, strict=True):
        cells = [text.rjust(wide) for text, wide in zip(row[1:], widths[1:], strict=True)]
        out.print(Text("  ".join([row[0].ljust(widths[0]), *cells]), style))
    say("")


def told(one: Outcome) -> str:
    """Say what would come of a change."""
    fits = "fits" if one.fits else "too much"
    return (
        f"{gb(one.parts.total)} with {one.strategy.name}, {fits}, {one.seconds.total:,.3g} s a step"
    )


def launch(strategy: Strategy, cluster: Cluster, path: Path) -> str:
    """Return the command that does it."""
    if strategy is ONE:
        return f"plugsft {path}"
    words = f"accelerate launch --config_file recipes/accelerate/{strategy.file}"
    words += f" --num_machines {cluster.machines}" if cluster.machines > 1 else ""
    return f"{words} --num_processes {cluster.ranks} -m plugsft {path}"


def notes(recipe: Recipe, cluster: Cluster, outcomes: Sequence[Outcome]) -> list[str]:
    """Say what was assumed, and what is not so."""
    chip, spare = cluster.chip, SPARE[cluster.chip.gpu]
    peak = chip.single if recipe.model.dtype == "float32" else chip.half
    found = [
        f"assumed: {PRODUCTS:.0%} of {peak / 1e12:,.3g} TFLOP/s in matrix products, {STREAM:.0%} "
        f"of {chip.bandwidth / GB:,.0f} GB/s from memory, {LINKS:.0%} of {chip.link / GB:,.3g} "
        f"GB/s in a machine and {chip.network * cluster.each / GB:,.3g} GB/s between machines, "
        f"hidden behind up to {HIDDEN:.0%} of computing; {gb(spare)} besides for {besides(chip)}"
    ]
    if cluster.speed != 1:
        found[0] += f"; computing {cluster.speed:.2f} times as fast as that, as the probe has shown"
    if any(one.strategy is ZERO2 for one in outcomes):
        found.append("ZeRO-2 is listed for comparison: plugsft does not launch it")
    if chip.gpu and recipe.model.dtype == "float32":
        found.append(
            'note: computing in float32; model.dtype = "bfloat16" is far faster, and weights, '
            "gradients and optimizer states stay float32"
        )
    if late := [one.strategy.name for one in outcomes if one.parts.activations < 1e6]:
        found.append(
            f"note: the parts are those at peak memory: under {', '.join(late)} that is the end of "
            "the backward pass, when activations are freed"
        )
    if recipe.has("liger") or recipe.has("compile"):
        found.append("note: what liger and compile keep out of memory is not taken off")
    if not chip.gpu:
        found.append(
            "note: glibc keeps some of what is freed; MALLOC_MMAP_THRESHOLD_=262144 gives it back"
        )
    return found


def besides(chip: Chip) -> str:
    """Name what takes memory beside tensors."""
    return "driver, NCCL and gaps" if chip.gpu else "Python and its libraries"


def gb(size: float) -> str:
    """Write bytes as data sheets do."""
    return f"{size / GB:,.1f} GB" if size >= GB else f"{size / 1e6:,.0f} MB"
