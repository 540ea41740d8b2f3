"""A stranger's packer is proved, checked, tuned and planned like the bundled one."""

import json
import re

import pytest
from conftest import chats, only_full, read_metrics, run_plugsft
from families import TOY
from plugin_packages import activate, install
from transformers import AutoModelForCausalLM, MambaConfig

CHECKED = "packing checked: no document sees another\n"
ROWS = """
from plugsft.plugins.bfd_packing import Packer

@plugin(provides={"packed_rows": "most"})
class Rows(Packer):
    "Fill packed rows in the order of the examples."

    most: int = 96
    refuse_longer: bool = True
    whole_epoch: bool = False

    @hookimpl(wrapper=True)
    def plan_batches(self, order, lengths, ranks, train):
        layouts = yield
        if not self.whole_epoch:
            return [self.deal(self.fill(step, lengths), ranks) for step in layouts]
        rows, size = self.fill([[order]], lengths), train.batch_size
        return [self.deal(rows[n : n + size], ranks) for n in range(0, len(rows), size)]

    def fill(self, layout, lengths):
        rows, space = [], 0
        for example in (number for rank in layout for part in rank for number in part):
            if self.refuse_longer and lengths[example] > self.most:
                raise RecipeError(f"plugins.rows.most: an example has {lengths[example]} tokens")
            if lengths[example] > space:
                rows.append([])
                space = self.most
            rows[-1].append(example)
            space -= lengths[example]
        return rows

    def deal(self, rows, ranks):
        import numpy as np

        parts = [np.array(row, np.int64) for row in rows + [[]] * (-len(rows) % ranks)]
        return [parts[rank::ranks] for rank in range(ranks)]

    @hookimpl
    def collate(self, tokens, examples):
        from plugsft.plugins.bfd_packing.documents import documents_of, pack

        return pack(tokens, examples)
"""


PACK = "return pack(tokens, examples)"
WITHOUT = """batch = pack(tokens, examples)
        del batch["documents"]
        return batch"""
REVERSED = """return pack(tokens, examples) | documents_of(tokens.lengths[examples][::-1])"""
LOADED = """return pack(tokens, examples)

    @hookimpl
    def load_batches(self, build, steps):
        return (self.drop_documents(build(step)) for step in steps)

    def drop_documents(self, loaded):
        for batch in loaded.batches:
            del batch["documents"]
        return loaded"""
LONGER = """import numpy as np
        import torch

        batch, lengths = pack(tokens, examples), tokens.lengths[examples]
        for name, value in (("input_ids", 1), ("labels", -100)):
            inserted = np.insert(batch[name][0].numpy(), np.cumsum(lengths), value)
            batch[name] = torch.from_numpy(inserted)[None]
        return batch | documents_of(lengths + 1)"""
WITHOUT_BASE = ROWS.replace("(Packer)", "")
OWN_COLUMNS = f"""{PACK}

    @hookimpl
    def add_columns(self, tokens):
        return tokens"""
REPLACED = """
@plugin(after=["*"])
class Replaced:
    @hookimpl
    def add_columns(self, tokens):
        return tokens
"""


@pytest.fixture
def recipe(tiny, tmp_path, monkeypatch, request):
    """Return a recipe whose rows a stranger's plugin packs."""
    change = getattr(request, "param", PACK)
    rows = change if change == WITHOUT_BASE else ROWS.replace(PACK, change)
    activate(install(tmp_path / "site", rows=rows), monkeypatch)
    train = {"batch_size": 8, "micro_batch": 1, "steps": 6}
    return tiny(rows=chats(21), train=train, plugins={"rows": {}})


def curve(run):
    return [line[name] for name in ("loss", "grad_norm") for line in read_metrics(run)]


def test_it_learns_what_padded_rows_teach_and_its_documents_are_proved_apart(recipe, tmp_path):
    packed = run_plugsft(recipe)
    assert packed.returncode == 0, packed.stderr
    padded = run_plugsft(recipe, "--without=rows", f"output={tmp_path / 'padded'}")
    assert padded.returncode == 0, padded.stderr
    assert curve(tmp_path / "run") == pytest.approx(curve(tmp_path / "padded"), rel=1e-5)
    assert all(line["examples_per_micro_batch"] > 1.5 for line in read_metrics(tmp_path / "run"))
    proof = json.loads((tmp_path / "run/run.json").read_text())["packed_rows"]
    assert proof.startswith("documents proved apart")
    assert "proved on one layer of each kind in float32" in proof
    assert CHECKED in packed.stdout and CHECKED not in padded.stdout
    # The recipe that the run left is packed too.
    again = run_plugsft(tmp_path / "run/recipe.toml", f"output={tmp_path / 'again'}")
    assert CHECKED in again.stdout
    assert curve(tmp_path / "again") == curve(tmp_path / "run")


@pytest.mark.parametrize("recipe", [WITHOUT_BASE, OWN_COLUMNS], indirect=True)
def test_a_packer_without_the_proof_is_refused(recipe):
    result = run_plugsft(recipe)
    assert result.returncode == 2 and "step 1/" not in result.stdout
    message = "error: [plugins.rows] packs rows, and has not proved that the model computes their"
    assert result.stderr.startswith(message) and "Traceback" not in result.stderr


def test_another_plugins_answer_does_not_replace_the_proof(recipe, tmp_path, monkeypatch):
    activate(install(tmp_path / "other", replaced=REPLACED), monkeypatch)
    result = run_plugsft(recipe, "plugins.replaced={}", "train.steps=1")
    assert result.returncode == 0, result.stderr
    assert CHECKED in result.stdout


def test_a_model_that_leaks_is_refused_with_its_name(recipe, tmp_path):
    run_plugsft(recipe, "train.steps=1", f"output={tmp_path / 'first'}", "--without=rows")
    tokenizer = tmp_path / "first/model"
    sizes = json.loads((tokenizer / "config.json").read_text())
    config = MambaConfig(**TOY | {"vocab_size": sizes["vocab_size"]}, num_hidden_layers=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "mamba")
    model = f'{{path = "{tmp_path / "mamba"}", tokenizer = "{tokenizer}"}}'
    result = run_plugsft(recipe, f"model={model}")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "this model cannot be trained on packed rows: changing one document" in result.stderr
    assert "remove [plugins.rows]" in result.stderr and "bfd_packing" not in result.stderr


@pytest.mark.parametrize("recipe", [WITHOUT, REVERSED, LOADED], indirect=True)
def test_rows_with_wrong_documents_are_refused(recipe, request):
    result = run_plugsft(recipe)
    assert result.returncode == 2 and "step 1/" not in result.stdout
    hook = "load_batches" if LOADED in request.node.callspec.params.values() else "collate"
    message = f"error: '{hook}' of plugin 'rows' packed examples that attend to each other: their "
    assert result.stderr.startswith(message) and "Traceback" not in result.stderr


@pytest.mark.parametrize("recipe", [LONGER], indirect=True)
def test_a_plugin_may_add_tokens_to_its_documents(recipe):
    result = run_plugsft(recipe, "train.steps=1")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("refuses", ["true", "false"])
def test_a_row_is_never_longer_than_its_option_says(recipe, refuses):
    words = ("plugins.rows.most=40", f"plugins.rows.refuse_longer={refuses}")
    result = run_plugsft(recipe, *words)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    by_core = r"'plan_batches' put \d+ tokens into a packed row, more than 40; raise it"
    message = "an example has" if refuses == "true" else by_core
    assert re.match(f"error: plugins.rows.most: {message}", result.stderr)


def test_it_is_checked(recipe):
    result = run_plugsft("check", recipe, "plugins.flash_attention={}")
    assert result.returncode == 0, result.stderr
    assert "in a micro-batch, at most 96 (plugins.rows.most)" in result.stdout
    assert "batches are planned by rows" in result.stdout


@only_full
def test_its_option_is_tuned(recipe, forked_trials):
    result = run_plugsft("tune", recipe, "--steps=2", "train.batch_size=3")
    assert result.returncode == 0, result.stderr
    assert "plugins.rows.most = 96 (yours)" in result.stdout
    sizes = {
        int(size) for size in re.findall(r"probe \d+: plugins\.rows\.most = (\d+)", result.stdout)
    }
    assert len(sizes) > 1
    [best] = re.findall(r"(?:chosen|keep yours): plugins\.rows\.most = (\d+)", result.stdout)
    assert int(best) in sizes


def test_rows_that_other_steps_fill_are_not_tuned(recipe):
    result = run_plugsft("tune", recipe, "plugins.rows.whole_epoch=true")
    assert result.returncode == 2 and "probe" not in result.stdout
    assert result.stderr.startswith(
        "error: plugins.rows.most: tune cannot choose it: [plugins.rows] fills rows with examples"
    )


def test_its_rows_are_planned(recipe):
    words = ("plugins.rows.most=192", "--gpu=A100", "--memory=1501MB")
    result = run_plugsft("plan", recipe, *words)
    assert result.returncode == 0, result.stderr
    [row] = re.findall(r"the largest 1 x (\d+)", result.stdout)
    assert 96 < int(row) <= 192
    assert re.search(r"^  plugins\.rows\.most = 96", result.stdout, re.MULTILINE)
    assert "bfd_packing" not in result.stdout and "train.micro_batch" not in result.stdout
