"""Every key of our recipes is understood."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, chats, only_full, run_plugsft, tiny_tables, write_recipe
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils.chat_template_utils import render_jinja_template

from plugsft.registry.load import load


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda p: p.stem)
def test_a_shipped_recipe_is_valid_and_explained(path):
    recipe, active = load(path)
    assert {*active.plugins} == {*recipe.plugins}
    text = path.read_text(encoding="utf8")
    assert text.startswith("# ") and text.count("#") >= 6


@pytest.mark.slow
def test_accelerate_launches_the_recipe_that_the_readme_names(tmp_path):
    """As written there, on a tiny model and few rows."""
    tables = tiny_tables(tmp_path, chats(12))
    prepared = run_plugsft("prepare", write_recipe(tmp_path / "tiny.toml", tables))
    assert prepared.returncode == 0, prepared.stderr
    [tokenizer] = tmp_path.glob("run/scratch/tokenizer-*")
    config = Qwen3Config(hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=8)
    config.vocab_size, config.architectures = 1000, ["Qwen3ForCausalLM"]
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    [line] = re.findall(r"^accelerate launch .*", (ROOT / "README.md").read_text("utf8"), re.M)
    words = [*line.split(), f"model.path={tmp_path / 'model'}", f"model.tokenizer={tokenizer}"]
    words += [f"data.source={tables['data']['source']}", f"output={tmp_path / 'tulu'}"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [*words, "train.steps=1", "device=cpu"], cwd=ROOT, env={**os.environ, "PATH": path},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "tulu/report.html").is_file()


def test_the_chat_format_of_tulu():
    turns = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Yo"), ("user", "?")]
    chat = [{"role": role, "content": content} for role, content in [*turns, ("assistant", "!")]]
    template = (ROOT / "recipes/tulu.jinja").read_text(encoding="utf8")
    texts, spans = render_jinja_template(
        [chat], chat_template=template, return_assistant_tokens_mask=True, eos_token="</s>"
    )
    first = "<|system|>\nBe brief.\n<|user|>\nHi\n<|assistant|>\nYo</s>\n"
    assert texts == [first + "<|user|>\n?\n<|assistant|>\n!</s>"]
    assert [texts[0][start:stop] for start, stop in spans[0]] == ["Yo</s>", "!</s>"]
    asked, _ = render_jinja_template(
        [chat[1:2]], chat_template=template, add_generation_prompt=True, eos_token="</s>"
    )
    assert asked == ["<|user|>\nHi\n<|assistant|>\n"]


@only_full
def test_the_recipe_for_a_t4_fits_in_15_gb(tmp_path):
    """The forecast is of Qwen3 8B's shape; the rows are packed to the capacity."""
    shape = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    config = Qwen3Config(**shape, **heads, vocab_size=151936, tie_word_embeddings=False)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path / "qwen")
    tables = tiny_tables(tmp_path, chats(300))
    recipe, _ = load(write_recipe(tmp_path / "tiny.toml", tables))
    prepared = run_plugsft("prepare", tmp_path / "tiny.toml")
    assert prepared.returncode == 0, prepared.stderr
    [tokenizer] = Path(recipe.output).glob("scratch/tokenizer-*")
    words = [f"model.path={tmp_path / 'qwen'}", f"model.tokenizer={tokenizer}"]
    words += [
        f"data.source={recipe.data.source}",
        f"output={tmp_path / 'run'}",
        "train.batch_size=200",
    ]
    done = run_plugsft("plan", "recipes/t4_qlora.toml", "--gpu=T4", "--memory=15GB", *words)
    assert done.returncode == 0, done.stderr
    [total] = re.findall(r"^total +([\d.]+) GiB", done.stdout, re.M)
    assert "8,234,382,336 parameters" in done.stdout and "in float16" in done.stdout
    assert float(total) * 2**30 < 15e9 and " fits\n" in done.stdout
    assert float(re.search(r"the largest 1 x ([\d,]+)", done.stdout)[1].replace(",", "")) > 2000
