import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from plugsft.output import report
from plugsft.output.run_record import RunRecord

EVIL = "</script><b onload='x'>&amp;\"<!--numbers-->"
LENGTHS = {"edges": [0, 16, 32, 64], "counts": [3, 100, 194], "min": 12, "median": 44, "max": 61}
DATA = {
    "rows": 300,
    "examples": 297,
    "tokens": 21000,
    "trained_tokens": 9000,
    "bad_rows": {"no trained token": {"count": 1300, "rows": [4, 1009, 12]}},
    "truncated": {"count": 0, "rows": []},
    "lengths": LENGTHS,
    "mask": "each answer as a server would write it",
}
PLUGIN = {
    "name": "length_group",
    "origin": "site 1.2",
    "options": {"x": 4096, "scope": "window"},
    "summary": "12 % less padding",
}
RUN: dict[str, Any] = {
    "format": 1,
    "status": "completed",
    "reason": None,
    "name": "quickstart",
    "output": "runs/quickstart",
    "started": "2026-11-21T05:10:00+00:00",
    "seconds": 93.1,
    "steps": {"done": 240, "total": 240, "per_epoch": 30, "epochs": 8},
    "versions": {"plugsft": "0.1.0", "flash_attn": "2.8.3"},
    "machine": {"host": "box", "cores": 2, "memory_gib": 23.5, "gpus": []},
    "model": {"source": "scratch", "parameters": 3456789},
    "data": DATA,
    "eval": DATA,
    "plugins": [PLUGIN],
    "throughput": {"tokens_per_second": 3500.1},
    "final": {"loss": 0.02, "eval_loss": 2.1},
}


def render(run: dict[str, Any], metrics: list[dict[str, Any]]) -> str:
    facts = {"status": "unknown", **{key: value for key, value in run.items() if value is not None}}
    record = RunRecord(**facts, facts=run)
    vars(record)["metrics"] = metrics
    return report.render(record)


class Page(HTMLParser):
    """Collect a page's tags, its text and its embedded numbers; fail where tags do not nest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.text = self.script = ""
        self.feed(page)
        self.close()
        assert not self.open
        self.numbers = json.loads(self.script, parse_constant=pytest.fail)
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in ("meta", "link"):
            self.open.append(tag if ("id", "numbers") not in attrs else "numbers")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() in (tag, "numbers")

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "numbers":
            self.script += data
        elif self.open and self.open[-1] not in ("script", "style"):
            self.text += f" {data}"


def training(steps: int, **more: Any) -> list[dict[str, Any]]:
    return [{"step": step, "loss": 6 / step, **more} for step in range(1, steps + 1)]


def test_page_shows_the_run() -> None:
    page = Page(render(RUN, [*training(240), {"step": 240, "eval_loss": 2.1}]))
    results = "steps 240 of 240, 8.00 epochs; loss 0.0250; eval loss 2.1000"
    assert f"{results}; speed 3,500 tokens/s; time 0:01:33" in page.text
    assert "completed 2026-11-21 05:10:00+00:00 quickstart" in page.text
    assert (
        "bad rows, no trained token, count 1,300 bad rows, no trained token, rows 5, 1010, 13"
        in page.text
    )
    assert "<dd>5, 1010, 13</dd>" in render(RUN, []), "numbers of rows share a line"
    assert "truncated, count 0 lengths, min 12 lengths, median 44 lengths, max 61 mask" in page.text
    assert 'length_group 12 % less padding site 1.2 x = 4096, scope = "window"' in page.text
    assert "flash_attn 2.8.3" in page.text
    assert "cores 2 memory, GiB 23.5" in page.text
    assert page.numbers["data"]["lengths"]["counts"] == [3, 100, 194]
    assert page.numbers["per_epoch"] == 30
    assert page.tags.count("h1") == 1


def test_long_run_keeps_extremes_in_a_small_page() -> None:
    keys = ("loss", "grad_norm", "learning_rate", "tokens_per_second", "tokens", "memory_gib")
    metrics: list[dict[str, Any]] = [
        {"step": n, **{key: math.sin(n * k) * 1e-5 for k, key in enumerate(keys, 1)}}
        for n in range(1, 200_001)
    ]
    metrics[77_777]["loss"], metrics[123_456]["loss"], metrics[150_001]["loss"] = 99.5, -42, None
    page = render(RUN, metrics)
    curve = Page(page).numbers["curves"]["loss"]
    points = dict(zip(curve["x"], curve["y"], strict=True))
    assert points[77_778] == 99.5
    assert points[123_457] == -42
    assert points[150_002] is None
    assert {1, 200_000} <= points.keys()
    assert curve["x"] == sorted(curve["x"])
    assert 600 < len(curve["x"]) <= report.MAX_POINTS
    assert Page(page).numbers["whole"]["loss"] == 200_000
    assert len(page) < 400_000


def test_page_stays_small_whatever_it_holds() -> None:
    row = {f"plugin_metric_{key}": -1.23456789e-5 * (key + 1) for key in range(20)}
    metrics = [{"step": 10**6 + n, **row, "loss": 1 / (n + 1)} for n in range(2_000)]
    run = {
        **RUN,
        "versions": {f"package_{n}": "1.0" for n in range(5_000)},
        "data": {"bad_rows": {f"{n} " + "r" * 10_000: {"count": n} for n in range(500)}},
    }
    page = render(run, metrics)
    assert len(page) < 450_000
    assert len(Page(page).numbers["curves"]) == 21


def test_everything_from_the_run_is_escaped() -> None:
    plugin = {"name": EVIL, "origin": EVIL, "options": {EVIL: EVIL}, "summary": EVIL}
    data = {"bad_rows": {EVIL: {"count": 1, "rows": [EVIL]}}, "mask": EVIL, EVIL: EVIL}
    run: dict[str, Any] = dict.fromkeys(("name", "status", "reason", "started", "output"), EVIL)
    run |= {"plugins": [plugin], "data": data, EVIL: {EVIL: {EVIL: [EVIL]}}}
    plain = Page(render({**RUN, "reason": "x"}, training(3)))
    page = Page(render(run, [{"step": 1, "loss": 1, EVIL: 2}]))
    assert set(page.tags) <= set(plain.tags)
    assert page.tags.count("script") == plain.tags.count("script")
    assert not {name for name, _ in page.attributes} - {name for name, _ in plain.attributes}
    assert page.numbers["curves"][EVIL] == {"x": [1], "y": [2]}
    assert page.text.count(EVIL) >= 19


@pytest.mark.parametrize("gone", [*RUN, "everything"])
@pytest.mark.parametrize("left", [{}, {"value": None}])
def test_any_section_may_be_missing(gone: str, left: dict[str, None]) -> None:
    run = {key: value for key, value in RUN.items() if key != gone and gone != "everything"}
    if left:
        run |= dict.fromkeys([gone] if gone in RUN else RUN)
    for metrics in ([], training(2)):
        page = Page(render(run, metrics))
        assert "Curves" in page.text
        assert ("quickstart" in page.text) == (gone != "everything")


def test_missing_values_leave_gaps() -> None:
    metrics = [*training(2), {"step": 3, "loss": None}, {"step": 4, "loss": math.nan}]
    metrics += [{"step": 5, "loss": math.inf, "memory_gib": None}, {"step": 6, "loss": 10**400}]
    run = {**RUN, "status": "failed", "reason": "CUDA error", "final": {"loss": None}}
    page = Page(render(run, metrics))
    expected = {"x": [1, 2, 3, 4, 5, 6], "y": [6, 3, None, None, None, None]}
    assert page.numbers["curves"] == {"loss": expected}
    assert "steps 240 of 240, 8.00 epochs; speed 3,500 tokens/s" in page.text
    assert "reason CUDA error" in page.text


def test_every_further_number_is_a_curve() -> None:
    metrics = [*training(3, rewards_margin=0.5, epoch=1, note="text", ready=True)]
    metrics += [{"step": 3, "eval_loss": 2, "eval_rewards_margin": 1, "eval_tokens": 900}]
    curves = Page(render(RUN, metrics)).numbers["curves"]
    assert curves.keys() == {"loss", "eval_loss", "rewards_margin", "eval_rewards_margin"}
    assert curves["rewards_margin"] == {"x": [1, 2, 3], "y": [0.5, 0.5, 0.5]}


def test_metrics_of_pairs_are_listed_and_drawn_together() -> None:
    pairs = {"accuracy": 0.75, "margin": 2.5, "reward_chosen": 1, "reward_rejected": -1.5}
    evaluated = {f"eval_{key}": value for key, value in pairs.items()} | {"eval_accuracy": 0.9375}
    metrics = [*training(3, **pairs), {"step": 3, "eval_loss": 2, **evaluated}]
    page = render(RUN, metrics)
    assert "eval loss 2.0000; eval accuracy 0.9375; speed" in Page(page).text
    assert {*pairs, *evaluated} < Page(page).numbers["curves"].keys()
    log_probs = ("logp_chosen", "logp_rejected")
    titled = re.findall(r"(\w+):", page.split("const TITLES = {")[1].split("};")[0])
    shared = dict(
        re.findall(r'(\w+): \["(\w+)"', page.split("const TOGETHER = {")[1].split("};")[0])
    )
    assert {shared.get(name, name) for name in (*pairs, *log_probs, "nll")} <= {*titled}
    assert shared["reward_chosen"] == shared["reward_rejected"] == "rewards"
    assert shared["logp_chosen"] == shared["logp_rejected"] == "logps"


def test_a_profile_is_a_table_of_shares_and_findings() -> None:
    profile = {"shares": {"forward": 0.31, "data": 0.69}, "findings": ["The GPU waits for data."]}
    page = Page(render({**RUN, "profile": profile}, training(3)))
    assert "Where the time went forward 31% data 69% findings The GPU waits for data." in page.text


def test_smoothing_does_not_lag() -> None:
    metrics: list[dict[str, Any]] = [
        {"step": n, "loss": n + (-1) ** n * 20.0, "learning_rate": 1} for n in range(1, 1001)
    ]
    metrics[499]["loss"] = None
    numbers = Page(render(RUN, metrics)).numbers
    assert numbers["smooth"].keys() == {"loss"}
    smooth = dict(zip(*numbers["smooth"]["loss"].values(), strict=True))
    assert 25 < len(smooth) <= report.SMOOTHED
    assert all(abs(value - step) < 2 for step, value in smooth.items())
    assert not Page(render(RUN, metrics[:59])).numbers["smooth"]


def test_write_skips_torn_lines(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({**RUN, "name": "naïve \ud800"}))
    whole = [json.dumps(line) for line in training(3)]
    torn = '{"step": 2, "lo'
    lines = [whole[0], torn + whole[1], "", "7", whole[2], '{"step": 4, "loss": 5, "nä']
    (tmp_path / "metrics.jsonl").write_bytes("\n".join(lines).encode()[:-1])
    path = report.write(tmp_path)
    assert path == tmp_path / "report.html"
    page = Page(path.read_text("utf-8"))
    assert page.numbers["curves"]["loss"]["x"] == [1, 3]
    assert "naïve" in page.text


@pytest.mark.parametrize("broken", ["render", "replace"])
def test_failed_write_leaves_the_old_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    before = report.write(tmp_path).read_bytes()
    drafts: list[Path] = []

    def fail(*paths: Any) -> str:
        drafts.extend(path for path in tmp_path.iterdir() if path.name.startswith("."))
        raise OSError("disk full")

    monkeypatch.setattr(report if broken == "render" else os, broken, fail)
    with pytest.raises(OSError, match="disk full"):
        report.write(tmp_path)
    # The page is put together beside the old one, and only a whole one takes its name.
    assert len(drafts) == (broken == "replace")
    assert (tmp_path / "report.html").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "run.json"]


def test_page_asks_nothing_of_a_network() -> None:
    page = render(RUN, training(240))
    assert not re.search(r"https?:|//\w|@import|url\(|\bfetch\b|XMLHttp|import\(", page)
    attributes = Page(page).attributes
    assert {value for name, value in attributes if name in ("src", "href")} == {"data:,"}
    policy = next(value for _, value in attributes if value.startswith("default-src"))
    assert policy.startswith("default-src 'none'")


@pytest.mark.parametrize("theme", [0, 1])
def test_texts_can_be_read(theme: int) -> None:
    def light(color: str) -> float:
        parts = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(p * w for p, w in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))

    blocks = re.findall(r":root \{(.*?)\}", report.HEAD.read_text("utf-8"), re.DOTALL)
    colors = dict(re.findall(r"--([\w-]+): (#\w{6})", blocks[theme]))
    for ink in ("ink", "muted"):
        for paper in ("paper", "tint"):
            low, high = sorted((light(colors[ink]), light(colors[paper])))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (ink, paper)
