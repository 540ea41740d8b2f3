"""The line of plugsft for each setting of another tool trains."""

import re
import tomllib

import pytest
from conftest import ROOT, chats, only_full, read_metrics, run_plugsft, tiny_tables, write_recipe

PAGE = (ROOT / "docs/other_tools.md").read_text("utf8")
TABLE = PAGE.split("\n| axolotl | LLaMA-Factory | TRL | plugsft |\n")[1].split("\n\n")[0]
ROWS = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in TABLE.splitlines()[1:]]
LINES = {row[0].strip("`"): "\n".join(re.findall(r"`([^`]+)`", row[3])) for row in ROWS}
"""axolotl's name of a setting -> the lines of the last column."""


def merge(tables, others):
    """Merge nested tables."""
    for key, value in others.items():
        tables[key] = merge(tables.get(key, {}), value) if isinstance(value, dict) else value
    return tables


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Return a function that trains two steps with lines of the page, in a folder of their own."""
    base, model = tmp_path / "base", tmp_path / "Qwen/Qwen3-0.6B"

    def train(*lines):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PLUGSFT_CACHE", str(tmp_path / "cache"))
        tables = tiny_tables(tmp_path / "chats", chats(40)) | {"output": "runs/other"}
        (tmp_path / "chats.jsonl").write_bytes((tmp_path / "chats/data.jsonl").read_bytes())
        merge(tables, {"train": {"steps": 2}, "data": {"source": "chats.jsonl"}})
        merge(tables, {"model": {"scratch": {"context": 2048}}})
        for line in lines:
            merge(tables, tomllib.loads(line))
        if tables.get("eval", {}).keys() == {"every"}:
            tables["eval"]["split"] = "train[35:]"
            tables["data"]["split"] = "train[:35]"
        if "path" in tables["model"]:
            if not model.exists():
                first = tiny_tables(tmp_path / "first", chats(40)) | {"output": str(base)}
                merge(first, {"model": {"scratch": {"context": 2048}}, "train": {"steps": 1}})
                done = run_plugsft(write_recipe(tmp_path / "first.toml", first), cwd=tmp_path)
                assert done.returncode == 0, done.stderr
                model.parent.mkdir()
                (base / "model").rename(model)
            del tables["model"]["scratch"]
        if "bfd_packing" in tables.get("plugins", {}):
            del tables["train"]["micro_batch"]  # the capacity takes its place
        done = run_plugsft(write_recipe(tmp_path / "recipe.toml", tables), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert len(read_metrics(tmp_path / tables["output"])) == 2
        return tables

    return train


EXAMPLE = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)
"""The whole recipe on the page."""


def test_the_table_has_a_line_of_a_recipe_for_all_settings_but_two():
    assert len(ROWS) >= 20
    assert {name for name, lines in LINES.items() if not lines} == {"datasets[].type", "tf32"}


@only_full
def test_all_settings_train_together(train):
    tables = train(*LINES.values())
    assert len(tables["plugins"]) == 8 and tables["train"]["batch_size"] == 8


@only_full
def test_the_whole_recipe_trains(train):
    tables = train(EXAMPLE[1])
    assert {"lora", "quantize", "low_memory_adam", "bfd_packing"} <= {*tables["plugins"]}


@only_full
@pytest.mark.parametrize("name", [name for name, lines in LINES.items() if lines])
def test_each_setting_trains(train, name):
    train(LINES[name])
