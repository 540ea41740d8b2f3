"""The tables of a bench, for the console and in Markdown."""

import statistics
from collections.abc import Iterator, Sequence

from ...base.console import format_count, format_size
from .contenders import BASELINE
from .results import AFFECTS, Bench, Figures, PluginResult, relative_differences, seconds_per_token
from .timing import NOISE, UNKNOWN, machine_line, spread

Table = list[list[str]]
"""Rows of cells; the first names the columns."""
NO_STEPS = "not in steps"
MIB = 2**20
PLUGINS = ["plugin", "alone", "among the others", "memory", "preparing", "again", "summary"]
STEPS = ["run", "ms a step", "tokens/s", "host", "device", "loss off", "gradient norm off"]
PREPARATIONS = ["run", "preparing, s", "again, s"]


def plugin_table(bench: Bench) -> Table:
    """Return a row for each plugin: speed, memory, preparation."""
    rows = []
    for line in bench.lines():
        ratios = [line.alone, line.company, line.prepared, line.again]
        alone, company, *preparing = [str(ratio) if ratio else "" for ratio in ratios]
        alone = alone if line.steps else NO_STEPS
        rows.append([line.plugin, alone, company, memory(line), *preparing, summary(line)])
    return [PLUGINS, *rows]


def memory(line: PluginResult) -> str:
    """Format the extra memory of a plugin alone."""
    extra = {"": line.host, "device ": line.device}
    return ", ".join(
        f"{device}{size / MIB:+,.0f} MiB" for device, size in extra.items() if size is not None
    )


def summary(line: PluginResult) -> str:
    """Summarize the effect of a plugin in a few words."""
    phrases = [line.alone.word] if line.alone else []
    if line.company and (not line.alone or line.company.word != line.alone.word):
        phrases.append(f"among the others {line.company.word}")
    for act, ratio in (("prepares", line.prepared), ("prepares again", line.again)):
        if ratio and ratio.word == UNKNOWN:
            if UNKNOWN not in phrases:
                phrases.append(f"preparing {UNKNOWN}" if phrases else UNKNOWN)
        elif ratio and ratio.word != NOISE:
            phrases.append(f"{act} {ratio.word}")
    if line.learned:
        phrases.append(f"{AFFECTS} ({line.learned})")
    phrases += [f"{contender} failed" for contender in line.failed]
    return "; ".join(dict.fromkeys(phrases)) or NOISE


def run_table(bench: Bench) -> Table:
    """Return a row for each run: time, speed, memory, differences."""
    rows = []
    for name in bench.trials("rounds"):
        trials = bench.figures(name)
        if not trials:
            rows.append([name, "failed", *[""] * 5])
            continue
        times = [statistics.median(trial["seconds"][bench.warmup :]) * 1e3 for trial in trials]
        speeds = [1 / seconds for seconds in seconds_per_token(trials, bench.warmup)]
        peaks = [peak(trials, device) for device in ("host", "device")]
        off = [] if name == BASELINE else differences(trials[0], bench.figures(BASELINE)[0])
        cells = [name, spread(times, ",.1f"), spread(speeds, ",.0f"), *peaks, *off]
        rows.append([*cells, *[""] * (len(STEPS) - len(cells))])
    return [STEPS, *rows]


def differences(trial: Figures, baseline: Figures) -> list[str]:
    """Format how far loss and gradient norm are off the baseline."""
    values = relative_differences(trial, baseline).values()
    return [f"{value:.0e}" if value else "0" for value in values]


def peak(trials: Sequence[Figures], device: str) -> str:
    """Format the median peak memory on host or device."""
    peaks = [trial[device] for trial in trials if device in trial]
    return format_size(statistics.median(peaks)) if peaks else ""


def preparation_table(bench: Bench) -> Table:
    """Return a row for each run's preparation of data."""
    part, rows = "preparations", []
    for name in bench.trials(part):
        trials = bench.figures(name, part)
        cells = [spread([each[time] for each in trials]) for time in ("seconds", "again") if trials]
        rows.append([name, *(cells or ["failed", ""])])
    return [PREPARATIONS, *rows]


def drop_empty_columns(table: Table) -> Table:
    """Drop columns without values."""
    columns = [column for column in zip(*table, strict=True) if any(column[1:])]
    return [list(row) for row in zip(*columns, strict=True)]


TITLE = "# What the plugins of "


def notes(bench: Bench) -> Iterator[str]:
    """Yield the notes below the tables."""
    report, settings = bench.report, bench.report["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    yield f"{machine_line(report['machine'])}; {versions}; {report['date'][:10]}."
    rounds = format_count(len(report["rounds"]), "round")
    launched = f", launched by `{settings['launch']}`" if settings["launch"] else ""
    yield (
        f"Medians of {rounds}, with minimum and maximum; each run is a process of its "
        f"own{launched}, with {settings['steps']} steps after {settings['warmup']} to warm up. "
        "Alone: speed relative to no plugin. Among the others: all plugins relative to all but "
        "this one. Again: another run prepares with the same cache. Faster and slower: by more "
        "than 2 %, at 98 % confidence. One round has no spread, so it cannot tell; --rounds 5 can."
    )
    for name, why in report["kept"].items():
        yield f"{name} is always on: {why}."
    for text in settings["instead"]:
        name, _, change = text.partition(":")
        yield f"Where {name} is off, {change}."
    for part in ("rounds", "preparations"):
        for name in bench.trials(part):
            if why := bench.error(name, part):
                yield f"{name} failed: {why}."


def markdown(bench: Bench) -> str:
    """Write a bench as Markdown."""
    parts = [f"{TITLE}{bench.report['name']} bring", format_table(plugin_table(bench))]
    tables = (run_table(bench), preparation_table(bench))
    parts += [format_table(table) for table in tables if len(table) > 1]
    return "\n\n".join([*parts, *notes(bench)]) + "\n"


def format_table(table: Table) -> str:
    """Write a table as Markdown."""
    head, *rows = [[cell.replace("|", "\\|") for cell in row] for row in drop_empty_columns(table)]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def format_console(bench: Bench) -> Iterator[str]:
    """Yield the aligned lines of the plugin table."""
    table = drop_empty_columns(plugin_table(bench))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = zip(row, widths, strict=True)
        yield "  ".join(f"{cell:<{width}}" for cell, width in cells).rstrip()


def duration(seconds: float) -> str:
    """Format an approximate duration."""
    return f"about {seconds / 60:,.0f} min" if seconds > 90 else f"about {seconds:,.0f} s"
