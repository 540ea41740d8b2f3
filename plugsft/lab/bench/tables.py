"""The tables of a bench, for the console and in Markdown."""

import statistics
from collections.abc import Iterator, Sequence

from ...base.console import format_count, format_size
from .contenders import BASELINE
from .results import LEARNS, Bench, Figures, PluginResult, relative_differences, seconds_per_token
from .timing import NOISE, machine_line, spread

Table = list[list[str]]
"""Rows of cells; the first names the columns."""
NOTHING = "touches no step"
MIB = 2**20
BRINGS = ["plugin", "alone", "among the others", "memory", "preparing", "once more", "in a word"]
RAN = ["run", "ms a step", "tokens/s", "host", "device", "loss off", "gradient norm off"]
PREPARED = ["run", "preparing, s", "once more, s"]


def plugin_table(bench: Bench) -> Table:
    """Return a row for each plugin: speed, memory, preparation."""
    rows = []
    for line in bench.lines():
        found = [line.alone, line.company, line.prepared, line.again]
        alone, company, *preparing = [str(one) if one else "" for one in found]
        alone = alone if line.steps else NOTHING
        rows.append([line.plugin, alone, company, memory(line), *preparing, verdict(line)])
    return [BRINGS, *rows]


def memory(line: PluginResult) -> str:
    """Format the extra memory of a plugin alone."""
    places = {"host": line.host, "device": line.device}
    known = {place: more for place, more in places.items() if more is not None}
    return ", ".join(
        f"{place if place == 'device' else ''} {more / MIB:+,.0f} MiB".strip()
        for place, more in known.items()
    )


def verdict(line: PluginResult) -> str:
    """Summarize the effect of a plugin in a few words."""
    said = [line.alone.word] if line.alone else []
    if line.company and (not line.alone or line.company.word != line.alone.word):
        said.append(f"among the others {line.company.word}")
    for what, ratio in (("prepares", line.prepared), ("once more", line.again)):
        if ratio and ratio.word != NOISE:
            said.append(f"{what} {ratio.word}")
    if line.learned:
        said.append(f"{LEARNS} ({line.learned})")
    said += [f"{one} failed" for one in line.failed]
    return "; ".join(said) or NOISE


def run_table(bench: Bench) -> Table:
    """Return a row for each run: time, speed, memory, differences."""
    rows = []
    for name in bench.trials("rounds"):
        found = bench.figures(name)
        if not found:
            rows.append([name, "failed", *[""] * 5])
            continue
        seconds = [statistics.median(one["seconds"][bench.warmup :]) * 1e3 for one in found]
        speeds = [1 / one for one in seconds_per_token(found, bench.warmup)]
        far = [] if name == BASELINE else beside(found[0], bench.figures(BASELINE))
        held = [most(found, place) for place in ("host", "device")]
        cells = [name, spread(seconds, ",.1f"), spread(speeds, ",.0f"), *held, *far]
        rows.append([*cells, *[""] * (len(RAN) - len(cells))])
    return [RAN, *rows]


def beside(one: Figures, baseline: Sequence[Figures]) -> list[str]:
    """Format how far loss and gradient norm are off the baseline."""
    return [
        f"{value:.0e}" if value else "0"
        for value in relative_differences(one, baseline[0]).values()
    ]


def most(some: Sequence[Figures], place: str) -> str:
    """Format the median of the peak memory on host or device."""
    held = [one[place] for one in some if place in one]
    return format_size(statistics.median(held)) if held else ""


def prepared(bench: Bench) -> Table:
    """Return a row for each run's preparation of data."""
    part, rows = "preparations", []
    for name in bench.trials(part):
        found = bench.figures(name, part)
        took = [spread([one[what] for one in found]) for what in ("seconds", "again") if found]
        rows.append([name, *(took or ["failed", ""])])
    return [PREPARED, *rows]


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
        f"Medians of {rounds}, with the least and the most; each run is a "
        f"process of its own{launched}, of {settings['steps']} steps after {settings['warmup']} to "
        "warm up. Alone: how many times as fast as with none. Among the others: all, beside all "
        "but this one. Once more: another run's preparing, with the same cache. Faster and slower "
        "are sure to 98 %, and more than 2 %."
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
    parts += [format_table(one) for one in (run_table(bench), prepared(bench)) if len(one) > 1]
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
