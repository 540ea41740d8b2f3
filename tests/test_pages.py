"""The pages agree with each other and with what they show: links, plugins, hooks, figures."""

import ast
import json
import os
import re
import subprocess
import sys
from itertools import permutations
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

import pytest
import yaml
from conftest import ROOT
from pages import README, TEXTS

from plugsft.registry.contracts import SPECS
from plugsft.registry.discover import find
from plugsft.registry.metrics import METRICS


@pytest.mark.parametrize(
    "page", [*TEXTS, ROOT / "plugins/README.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf8")):
        if target.startswith("http"):
            continue
        name, _, heading = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        if heading:
            assert heading in anchors(path), target


def anchors(path):
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_pages_are_a_site_without_dead_links(tmp_path):
    subprocess.run([ROOT / "tools/docs", tmp_path], check=True, capture_output=True, text=True)
    found = json.loads((tmp_path / "search/search_index.json").read_text())["docs"]
    places = {entry["location"].partition("#")[0] for entry in found}
    assert {f"docs/{page.stem}.html" for page in (ROOT / "docs").glob("[a-z]*.md")} <= places
    assert "index.html" in places and "plugins/index.html" in places


def test_the_dockerfile_is_one_that_hadolint_takes():
    subprocess.run([Path(sys.executable).with_name("hadolint"), ROOT / "Dockerfile"], check=True)


WORKFLOWS = sorted((ROOT / ".github/workflows").iterdir())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_is_there(path):
    [job] = yaml.safe_load(path.read_text())["jobs"].values()
    commands = [step["run"].split() for step in job["steps"] if "run" in step]
    assert commands
    for program, *_ in commands:
        assert program in ("pip", "plugsft") or os.access(ROOT / program, os.X_OK), program


def test_every_page_is_in_the_index():
    index = TEXTS[ROOT / "docs/README.md"]
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name


def test_the_index_has_every_bundled_plugin():
    table = TEXTS[ROOT / "docs/README.md"].split("\n## Plugins\n")[1].split("\n## ")[0]
    names = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(names) == sorted(
        plugin.name for plugin in find().values() if plugin.origin == "bundled"
    )


def test_the_reference_is_what_its_script_writes(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import reference

    hint = "run .venv/bin/python tools/reference.py"
    assert reference.PAGE.read_text(encoding="utf8") == reference.page(), hint


def test_the_messages_of_troubleshooting_are_those_of_the_code():
    texts = [text for folder in ("plugsft", "plugins") for text in messages_in(ROOT / folder)]
    page = TEXTS[ROOT / "docs/troubleshooting.md"]
    quoted = re.findall(r"^\| `(.+?)` \|", page.split("\n## What you may look for\n")[0], re.M)
    patterns = {message: re.escape(message).replace(r"\.\.\.", ".*") for message in quoted}
    assert len(quoted) > 20
    assert [m for m in quoted if not any(re.search(patterns[m], text) for text in texts)] == []


def messages_in(folder):
    """The texts of the code below a folder, with ... where values are written."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [getattr(part, "value", "...") for part in parts]
            yield "".join(text if isinstance(text, str) else "..." for text in texts)


def test_the_map_of_the_code_names_every_room():
    code = TEXTS[ROOT / "docs/house.md"].split("\n## Where things live\n")[1]
    entries = {path.name for path in (ROOT / "plugsft").iterdir() if path.name[0] not in "_."}
    entries -= {"py.typed", "plugins"}
    rooms = {name if "." in name else f"{name}/" for name in entries}
    assert {*re.findall(r"(?<!\S)[a-z_]+(?:/|\.py)(?!\S)", code)} >= rooms


def test_the_places_that_the_house_names_are_there():
    section = TEXTS[ROOT / "docs/house.md"].split("\n## Where it happens\n")[1].split("\n## ")[0]
    missing, file = [], ""
    for name in re.findall(r"`([\w./]+)`", section):
        if name.endswith(".py"):
            file = name if name.startswith("plugins/") else f"plugsft/{name}"
        elif name not in places_in(ROOT / file):
            missing.append(f"{file}: {name}")
    assert not missing


def places_in(path):
    """The functions and classes of a module, and the methods of its classes as Class.method."""
    found = set()
    for node in ast.parse(path.read_text("utf8")).body:
        inner = node.body if isinstance(node, ast.ClassDef) else []
        found |= {f"{node.name}.{it.name}" for it in inner if hasattr(it, "name")}
        found |= {node.name} if hasattr(node, "name") else set()
    return found


def test_the_readme_is_read_in_five_minutes():
    assert len(README.splitlines()) <= 125


def test_the_tables_of_the_readme_and_of_speed_are_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools/bench")
    from readme_table import MEASURED, by_plugin, pages, with_tables

    assert MEASURED.read_text("utf8") == by_plugin()
    for name, text in pages().items():
        assert with_tables(TEXTS[ROOT / name], text) == TEXTS[ROOT / name]
        assert text in TEXTS[ROOT / name]
    assert README.count(" | 1.32 |") == 1


def test_every_metric_is_explained():
    table = TEXTS[ROOT / "docs/after_training.md"].split("\n## Metrics\n")[1].split("\n## ")[0]
    names = [name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in row.split(", ")]
    reduced = {"stop", "computed_tokens"}
    assert {name.strip("`") for name in names} == METRICS - reduced | {"eval_loss", "eval_tokens"}


def test_every_hook_is_in_the_picture():
    picture = ElementTree.parse(ROOT / "docs/road.svg")
    texts = {element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert set(SPECS) <= texts


def seconds(result, *names):
    """Return the median of a committed bench's figures."""
    figures = json.loads((ROOT / "tools/bench/results" / result).read_text())
    for name in names:
        figures = figures[name]
    return median(figures)


def speeds(case):
    """Return the tokens per second of each contender on the H100."""
    results = json.loads((ROOT / f"tools/bench/results/h100/{case}.json").read_text())["results"]
    return {name: median(run["speed"] for run in runs) for name, runs in results.items()}


def recipes():
    """Return the comments on speed in the recipes for adapters, which we measured ourselves."""
    return "".join(
        (ROOT / f"recipes/{name}.toml").read_text() for name in ("lora", "tulu_sft_lora")
    )


def test_every_speed_and_ratio_of_the_gpu_is_of_the_committed_results():
    cases = [speeds(case) for case in ("0.6b-lora", "1b-full")]
    measured = {f"{speed:,.0f}" for case in cases for speed in case.values()}
    ratios = {f"{a / b:.2f}" for case in cases for a, b in permutations(case.values(), 2)}
    generated = re.compile("<!-- tools/bench/plugins.py writes this.*?<!-- to here", re.S)
    texts = {page: generated.sub("", text) for page, text in TEXTS.items()}
    table = texts[ROOT / "docs/benchmarks.md"].split("\n## On a GPU\n")[1].split("\n## ")[0]
    assert {*re.findall(r"(?<!\d)\d\d,\d{3}", table)} - measured <= {"32,768", "16,384"}
    sentences = texts[ROOT / "docs/lora.md"] + recipes()
    assert {*re.findall(r"(\d\d,\d{3})(?: to [\d,]+)? tokens/s", sentences)} <= measured
    for page, text in texts.items():
        for ratio in re.findall(r"(\d\.\d+)x\b", text):
            assert ratio in ratios, (page, ratio)


def test_the_summary_of_a_case_is_of_its_own_results(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "tools/bench")
    from gpu import summarize_case
    from gpu_process import Results

    for case in ("0.6b-lora", "1b-full"):
        path = ROOT / f"tools/bench/results/h100/{case}.json"
        report = json.loads(path.read_text())
        assert summarize_case(Results(path, report["machine"])) == report["summary"]


def dpo_step(name):
    """Return the median seconds of a step in the committed bench of DPO."""
    figures = json.loads((ROOT / "tools/bench/results/dpo.json").read_text())
    return median(figures[name]["step"] for figures in figures["rounds"])


def test_measured_figures_are_those_of_the_committed_results():
    figures = {
        "prepare 20,000 chats, the same": (
            seconds("prepare-20k.json", "seconds", "trl"),
            seconds("prepare-20k.json", "seconds", "plugsft-transformers"),
        ),
        "prepare 20,000 chats, `fast": (
            seconds("prepare-20k.json", "seconds", "trl"),
            seconds("prepare-20k.json", "seconds", "plugsft-auto"),
        ),
        "prepare 200,000 chats": (
            seconds("prepare-200k.json", "seconds", "trl"),
            seconds("prepare-200k.json", "seconds", "plugsft-auto"),
        ),
        "pack 100,000 documents": (
            seconds("packing.json", "trl", "seconds", "trl"),
            seconds("packing.json", "trl", "seconds", "gathered"),
        ),
        "build batches": (
            seconds("collate.json", "seconds", "joined"),
            seconds("collate.json", "seconds", "plugsft"),
        ),
        "a DPO step, with the reference in": (dpo_step("trl"), dpo_step("shared")),
        "a DPO step": (dpo_step("trl precomputed"), dpo_step("shared+cached")),
        "time of the loss": (
            seconds("head.json", "seconds", "trl_trained"),
            seconds("head.json", "seconds", "fused"),
        ),
    }
    peaks = json.loads((ROOT / "tools/bench/results/head.json").read_text())["peaks"]
    memory = (peaks["trl_trained"] / 2**30, peaks["fused"] / 2**30)
    figures["peak memory of the loss"] = memory
    rows = re.findall(
        r"^\| ([^|]+) \| ([\d.]+) \w+ \| ([\d.]+) \w+ \| ([\d.]+) \|",
        TEXTS[ROOT / "docs/benchmarks.md"],
        re.MULTILINE,
    )
    assert len(rows) == 9
    for task, trl, ours, ratio in rows:
        wanted = next(value for name, value in figures.items() if task.startswith(name))
        for figure, value in zip((trl, ours, ratio), (*wanted, wanted[0] / wanted[1]), strict=True):
            assert f"{value:.{len(figure.partition('.')[2])}f}" == figure, task
