"""plugsft check: reports all mistakes at once, before anything is loaded."""

import re
import resource
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import pytest
from conftest import ROOT, chats, must_succeed, run_plugsft, tiny_tables, write_jsonl, write_recipe
from families import LONGROPE
from plugin_packages import LOUD, activate, install
from transformers import (
    AutoTokenizer,
    BambaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    Phi3Config,
)

from plugsft.base.errors import PlugsftError
from plugsft.commands import recipes as command
from plugsft.model.config import ensure_plain_loss
from plugsft.output import disk_space
from plugsft.output.disk_space import parameters
from plugsft.recipe.tables import Scratch

STRICT = """
@plugin()
class Strict:
    @hookimpl
    def check(self, recipe, machine):
        if machine.world_size > 2:
            raise RecipeError(f"never on {machine.world_size} ranks")

    @hookimpl(wrapper=True)
    def optimize_model(self):
        return (yield)
"""
OWN = """
@plugin()
class Own:
    @hookimpl
    def render(self, rows): ...
"""


@pytest.fixture
def check(capsys):
    def run(path, *overrides, ranks=None):
        try:
            command.check(path, overrides, [], ranks)
            problems = []
        except PlugsftError as error:
            assert error.exit_code == 2
            problems = str(error).splitlines()
        lines = capsys.readouterr().out.splitlines()
        marks = {mark: [] for mark in ("ok", "warn", "fail")}
        for line in lines:
            mark, _, rest = line.partition(" ")
            marks.get(mark, []).append(rest.strip())
        return SimpleNamespace(problems=problems, lines=lines, **marks)

    return run


def test_a_good_recipe_is_ready_and_nothing_is_written(tiny, tmp_path, check):
    found = check(tiny(eval={"split": "train[:4]"}, data={"split": "train[4:]"}))
    assert not found.problems and not found.fail and not found.warn, found.lines
    assert found.lines[-1] == f"ready: plugsft {tmp_path / 'recipe.toml'}"
    what = [line.split()[0] for line in found.ok]
    assert what == [
        *["recipe", "paths", "output", "plugins", "model", "data", "tokenizer", "rows", "eval"],
        *["rows", "ranks", "steps", "batches", "checkpoints", "schedule", "disk"],
    ]
    assert not (tmp_path / "run").exists()


def test_the_quickstart_is_checked_in_seconds(tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Another output: a test beside this one may have trained the quickstart in its own.
    words = ["recipes/quickstart.toml", f"output={tmp_path / 'run'}"]
    command = [sys.executable, "-m", "plugsft", "check", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Its own time, as other tests run beside this one.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 8
    assert f"ready: plugsft {' '.join(words)}" in done.stdout


def test_problems_of_all_stages_come_together(tiny, tmp_path, check):
    rows = [*chats(20), {"messages": [{"role": "wizard", "content": "hm"}]}, {"other": 1}]
    path = tiny(
        rows,
        output=str(tmp_path / "file" / "run"),
        eval={"source": str(tmp_path / "nothing.jsonl")},
        data={"max_length": 300},
    )
    (tmp_path / "file").write_text("")
    found = check(path)
    text = "\n".join(found.problems)
    assert len(found.problems) == 5, text
    assert "data.max_length: given 300" in text
    assert "unknown role 'wizard'" in text and "line 21: " in text and "on_bad_row" in text
    assert "no 'messages'" in text and "line 22: " in text
    assert "nothing.jsonl: no such file" in text
    assert f"{tmp_path / 'file'} is no folder to write to" in text
    assert [line.split()[0] for line in found.fail] == ["paths", "output", "model", "rows"]
    assert not {line.split()[0] for line in found.fail} & {line.split()[0] for line in found.ok}
    assert "ready" not in found.lines[-1]
    done = run_plugsft("check", path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 5


def test_every_missing_source_is_named(tiny, tmp_path, check):
    names = [str(tmp_path / f"{name}.jsonl") for name in ("one", "two")]
    found = check(tiny(data={"source": names[0], "max_length": 256}), "train.steps=1")
    assert len(found.problems) == 1
    path = tmp_path / "recipe.toml"
    text = re.sub(r'source = ".*"', "", path.read_text())
    path.write_text(text + "".join(f'[[data.sources]]\nsource = "{name}"\n' for name in names))
    found = check(path)
    assert ["one" in found.problems[0], "two" in found.problems[1]] == [True, True]


def test_a_recipe_that_cannot_be_read_ends_the_check(tiny, check):
    found = check(tiny(), "train.bach_size=1", "modle.path=x")
    assert len(found.problems) == 2 and not found.lines


def test_rows_that_would_be_left_out_or_cut_are_warned_of(tiny, check):
    rows, longer = [*chats(20), {"messages": []}], "longer than data.max_length = 24"
    found = check(tiny(rows, data={"on_bad_row": "drop", "max_length": 24}))
    assert not found.problems
    assert any("line 21: 'messages' is" in line and "dropped" in line for line in found.warn)
    assert any(longer in line and "; cut by " in line for line in found.warn)
    found = check(tiny(rows, data={"on_bad_row": "drop", "max_length": 24, "too_long": "drop"}))
    assert any(longer in line and "dropped" in line for line in found.warn)
    found = check(tiny(rows, data={"on_bad_row": "drop", "max_length": 24, "too_long": "error"}))
    assert any(longer in line and "too_long" in line for line in found.problems)


def test_data_without_a_trained_token_is_a_problem(tiny, tmp_path, check):
    rows = [{"messages": [{"role": "user", "content": "hi"}]}] * 5
    found = check(tiny(rows, data={"on_bad_row": "drop"}))
    assert found.problems == [
        f"{tmp_path / 'data.jsonl'}: no row has a token to train on: lines 1, 2, 3, 4, 5: no "
        "turn of the assistant to train. Correct them"
    ]


def test_what_a_template_leaves_out_is_warned_of(tiny, tmp_path, check):
    ask, tell = {"role": "user", "content": "who?"}, {"role": "assistant", "content": "owls"}
    rows = [*chats(20), {"messages": [ask, {**tell, "reasoning_content": "at night"}]}]
    [line] = check(tiny(rows)).warn
    left_out = "line 21: the chat template leaves out thoughts of the assistant"
    assert line.endswith(f"{tmp_path / 'data.jsonl'}: {left_out}")


def test_columns_that_nothing_knows_are_problems(tiny, tmp_path, monkeypatch, check):
    path = tiny(data={"columns": {"tools": "nope"}})
    [problem] = check(path).problems
    assert problem == "data.columns: no row has the column 'nope' (for tools); columns: messages"
    columns = {"tool": "messages", "zzz": "messages"}
    one, two = check(tiny(data={"columns": columns})).problems
    known = "known are messages, conversations, conversation, prompt, completion, instruction, "
    assert f"recipe.toml: data.columns: unknown name 'tool'; did you mean 'tools'? {known}" in one
    assert f"unknown name 'zzz'; {known}" in two
    # A plugin that renders may know others.
    activate(install(tmp_path, own=OWN), monkeypatch)
    columns = {"words": "messages"}
    [problem] = check(tiny(data={"columns": columns}, plugins={"own": {}})).problems
    assert "words (renamed by [data.columns])" in problem


def test_check_shows_the_summaries_of_data_plugins(tiny, tmp_path, monkeypatch, check):
    lacking = LOUD + "        @hookimpl\n        def summary(self):\n            return 'no horn'\n"
    activate(install(tmp_path, loud=lacking), monkeypatch)
    assert "plugins     loud: no horn" in check(tiny(plugins={"loud": {}})).ok


@pytest.mark.parametrize(
    ("size", "micro", "ranks", "mark", "says"),
    [
        (8, 4, 1, "ok", "2 x 4 on each"),
        (8, 2, 4, "ok", "1 x 2 on each"),
        (8, 3, 2, "ok", "2 x 3 on each, not all of them full"),
        (8, 4, 3, "warn", "1 of 3 never get an example"),
        (8, 4, 3, "warn", "train.micro_batch = 2"),
        (4, 1, 8, "warn", "raise train.batch_size to 8"),
    ],
)
def test_a_global_batch_is_compared_with_the_ranks(tiny, check, size, micro, ranks, mark, says):
    found = check(tiny(train={"batch_size": size, "micro_batch": micro}), ranks=ranks)
    [line] = [line for line in found.ok + found.warn if line.startswith("ranks")]
    assert says in line and line in getattr(found, mark)


def test_one_example_at_a_time_is_warned_of_unless_it_is_meant(tiny, check):
    path = tiny()
    text = path.read_text().replace("micro_batch = 4\n", "")
    assert "micro_batch" not in text
    path.write_text(text)
    [line] = check(path).warn
    assert "one example at a time" in line
    assert "Add [plugins.bfd_packing], or set train.micro_batch = 8" in line
    assert "train.micro_batch = 4 (1 if you mean it)" in check(path, ranks=2).warn[0]
    for words in (["train.micro_batch=1"], ["plugins.bfd_packing.capacity=256"]):
        assert not any("at a time" in line for line in check(path, *words).warn), words
    assert not any("at a time" in line for line in check(path, ranks=8).warn)
    assert "= 200.0 is far above" in check(path, "train.learning_rate=2e2", ranks=8).warn[-1]
    assert "= 0 trains nothing" in check(path, "train.learning_rate=0", ranks=8).warn[-1]
    words = ["train.learning_rate=1e-6", "plugins.lora.r=2"]
    assert "= 1e-06 is far below what adapters take" in check(path, *words, ranks=8).warn[-1]
    [said] = re.findall("warning: .*", run_plugsft(path, "train.steps=1").stdout)
    assert said.endswith(line.removeprefix("recipe").strip())


@pytest.mark.parametrize(
    ("trained", "held", "overlap"),
    [
        ("train[:15]", "train[10:]", True),
        ("train", "train[-10%:]", True),
        ("train[:5]+train[20:]", "train[10:21]", True),
        ("train[:90%]", "train[90%:]", False),
        ("train[:-4]", "train[-4:]", False),
        # Shares and numbers are compared for the number of rows that there are.
        ("train[:30]", "train[50%:]", True),
        ("train[:10]", "train[50%:]", False),
        ("train[:50%]", "train[-10:]", False),
        ("train[-30:]", "train[:20]", True),
    ],
)
def test_slices_of_one_source_that_overlap_are_named(tiny, check, trained, held, overlap):
    path = tiny(data={"split": trained}, eval={"source": "./data.jsonl", "split": held})
    path.write_text(path.read_text().replace("./data.jsonl", f"{path.parent}/./data.jsonl"))
    (path.parent / "linked.jsonl").symlink_to(path.parent / "data.jsonl")
    assert bool(check(path, f"eval.source={path.parent}/linked.jsonl").warn) == overlap
    found = check(path)
    assert [line for line in found.warn if "rows that are trained on" in line] == found.warn
    assert bool(found.warn) == overlap and not found.problems
    if trained == "train":
        assert "warning: evaluations read rows" in run_plugsft(path, "train.steps=1").stdout


def test_a_fast_tokenizer_without_an_engine_is_refused(tiny, tmp_path, monkeypatch, check):
    path = tiny(plugins={"fast_tokenizer": {}})
    assert not check(path).warn
    for name in ("gigatoken", "fastokens"):
        monkeypatch.setitem(sys.modules, name, None)
    [problem] = check(path).problems
    assert problem.startswith("plugins.fast_tokenizer: gigatoken is not installed: pip install")
    assert not check(path, "plugins.fast_tokenizer.engine=transformers").problems


def test_steps_that_are_planned_again_are_named(tiny, check):
    path = tiny(plugins={"length_group": {}})
    ranks, steps = (line for line in check(path).ok if line.startswith(("ranks", "steps")))
    assert ranks.endswith("1 rank; batches are planned by length_group")
    assert "about 3, 3 an epoch of 24 examples" in steps
    [problem] = check(path, "train.micro_batch=1").problems
    assert problem.startswith("plugins.length_group: train.micro_batch = 1 pads nothing")


def test_check_counts_tokens_and_padding_and_warns_of_much_padding(tiny, check):
    long, short = (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b " * n}]}
        for n in (90, 1)
    )
    rows = [*chats(63), long]
    [line] = [one for one in check(tiny(rows=rows)).ok if one.startswith("batches")]
    assert (
        "tokens a step, in 2.0 micro-batches a rank" in line and "a micro-batch, padding " in line
    )
    found = check(tiny(rows=[long, short, short, short] * 16))
    [warning] = [one for one in found.warn if one.startswith("batches")]
    assert "would be padding; add [plugins.bfd_packing]" in warning
    packed = ("plugins.bfd_packing.capacity=256", "train.micro_batch=1")
    found = check(tiny(rows=rows), *packed)
    [line] = [one for one in found.ok if one.startswith("batches")]
    assert line.endswith("tokens in a micro-batch, at most 256 (plugins.bfd_packing.capacity)")
    assert not [one for one in found.warn if one.startswith("batches")]
    [warning] = [
        one
        for one in check(tiny(rows=rows), *packed, "plugins.bfd_packing.scope=dataset").warn
        if one.startswith("batches")
    ]
    assert "an epoch has 2 steps, and 8 unpacked: a step is 8 packed rows, 32 examples" in warning
    assert "Lower train.batch_size to about 2" in warning


def test_steps_and_warm_up_are_counted(tiny, check):
    found = check(tiny(), "train.epochs=3", "train.warmup=9")
    assert any("checkpoints every step, the last 3" in line for line in found.ok)
    assert any("9, 3 an epoch of 24 examples" in line for line in found.ok)
    assert any("none of the 9 steps reaches train.learning_rate" in line for line in found.warn)
    assert not check(tiny(), "train.epochs=3", "train.warmup=8").warn
    assert any("larger than the data" in line for line in check(tiny(), "train.batch_size=32").warn)


def test_chains_of_turns_are_forecast(tiny, tmp_path, check):
    # An answer begins with an empty thought until another turn follows.
    first = "{{ '<think></think>' if loop.last and message['role'] == 'assistant' else '' }}"
    template = (ROOT / "plugsft/data/chatml.jinja").read_text()
    template = template.replace("{% generation %}", first).replace("{% endgeneration %}", "")
    (tmp_path / "forgets.jinja").write_text(template)
    turns = [{"role": "user", "content": "owls?"}, {"role": "assistant", "content": "owls"}]
    rows = [{"messages": turns * 2}] * 2 + [{"messages": turns}] * 20
    found = check(tiny(rows=rows, model={"chat_template": str(tmp_path / "forgets.jinja")}))
    line = next(line for line in found.ok if line.startswith("rows"))
    assert ": all 22 rows: 24 examples with" in line
    assert any("an epoch of 24 examples" in line for line in found.ok)
    model = {"chat_template": str(tmp_path / "forgets.jinja")}
    few = check(tiny(rows=[{"messages": turns * 2}] * 4 + [{"messages": turns}] * 3, model=model))
    assert not any("times the tokens" in line for line in few.warn), "they are 1.3 times as many"
    rows = [{"messages": turns * 6}] * 3
    (line,) = (line for line in check(tiny(rows=rows, model=model)).warn if "6.0 examples" in line)
    assert re.search(r"makes 3\.\d times the tokens, .* with 6\.0 times the steps\. To train", line)
    assert not any("times the tokens" in line for line in check(tiny(rows=rows)).warn)


def test_plugins_may_object_to_the_ranks_asked_about(tiny, tmp_path, monkeypatch, check):
    activate(install(tmp_path, strict=STRICT), monkeypatch)
    path = tiny(plugins={"strict": {}}, train={"micro_batch": 1})
    assert check(path, ranks=2).problems == []
    assert check(path, ranks=4).problems == ["plugins.strict: never on 4 ranks"]


def test_a_run_in_the_output_is_warned_of(tiny, tmp_path, check):
    for name, says in (("checkpoints/step-000001", "--resume"), ("model", "--overwrite")):
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "manifest.json").write_text("{}")
        assert any(says in line for line in check(tiny()).warn)


def test_a_full_disk_is_a_problem(tiny, tmp_path, monkeypatch, check):
    monkeypatch.setattr(disk_space, "free_disk", lambda folder: 100_000)
    [problem] = check(tiny()).problems
    assert "97.7 KiB free" in problem and "checkpoint.keep" in problem
    activate(install(tmp_path, strict=STRICT), monkeypatch)
    found = check(tiny(plugins={"strict": {}}))
    assert not found.problems and any("97.7 KiB" in line for line in found.ok)


def test_the_forecast_size_of_a_new_model_is_exact():
    scratch = Scratch(hidden=64, layers=3, heads=4, kv_heads=2, mlp=96, vocab=500)
    config = LlamaConfig(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    assert parameters(scratch) == LlamaForCausalLM(config).num_parameters()


def test_a_model_in_a_folder_is_looked_at_without_its_weights(tiny, tmp_path, check):
    must_succeed(tiny(train={"steps": 1}))
    model = tmp_path / "run/model"
    tables = tiny_tables(tmp_path)
    tables |= {"model": {"path": str(model)}, "output": str(tmp_path / "second")}
    path = write_recipe(tmp_path / "second.toml", tables)
    saved = AutoTokenizer.from_pretrained(model)
    weights = (model / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(weights[:8], "little")
    (model / "model.safetensors").write_bytes(weights[:header] + bytes(len(weights) - header))
    found = check(path)
    assert not found.problems and not found.warn, found.lines
    assert any(
        f"{model}: {len(saved):,} entries, with a chat template" in line for line in found.ok
    )
    (model / "tokenizer.json").unlink()
    (model / "config.json").write_text("{}")
    found = check(path)
    assert [line.split()[0] for line in found.fail] == ["model", "tokenizer"]


def test_rows_for_evaluations_are_read_beside_tokens_that_are_prepared(tiny, tmp_path, check):
    recipe = tiny()
    must_succeed("prepare", recipe)
    [folder] = (tmp_path / "run/tokens").iterdir()
    [tokenizer] = (tmp_path / "run/scratch").glob("tokenizer-*")
    words = [f"data.tokens={folder}", f"model.tokenizer={tokenizer}"]
    found = check(recipe, *words, "eval.split=train[:4]")
    assert not found.problems, found.lines
    assert any("evaluations read rows that are trained on" in line for line in found.warn)
    bad = write_jsonl(tmp_path / "eval.jsonl", [{"messages": 7}])
    found = check(recipe, *words, f"eval.source={bad}")
    assert len(found.problems) == 1 and "eval.jsonl" in found.problems[0], found.lines


@pytest.mark.parametrize("saved", [False, True])
def test_a_max_length_beyond_the_context_is_refused_before_anything_is_prepared(
    tiny, tmp_path, saved
):
    tables = tomllib.loads(tiny(data={"max_length": 512}).read_text())
    tables["model"]["scratch"]["context"] = 300
    if saved:  # a config is enough: nothing else of the model is read before the refusal
        LlamaConfig(max_position_embeddings=300).save_pretrained(tmp_path / "model")
        tables["model"] = {"path": str(tmp_path / "model")}
    cache = tmp_path / "cache"
    recipe = write_recipe(tmp_path / "long.toml", tables)
    refused = run_plugsft(recipe, env={"PLUGSFT_CACHE": str(cache)})
    assert refused.returncode == 2, refused.stderr
    assert "the model's context is 300 tokens; set data.max_length = 300" in refused.stderr
    assert not cache.exists() and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (MixtralConfig(output_router_logits=True), "output_router_logits = true"),
        (BambaConfig(z_loss_coefficient=1e-4), "z_loss_coefficient = 0.0001"),
    ],
)
def test_a_loss_besides_that_of_tokens_is_refused_by_check_and_train(
    tiny, tmp_path, config, says, check
):
    config.save_pretrained(tmp_path / "model")
    tables = {**tomllib.loads(tiny().read_text()), "model": {"path": str(tmp_path / "model")}}
    recipe = write_recipe(tmp_path / "own.toml", tables)
    assert any(says in problem for problem in check(recipe).problems)
    done = run_plugsft(recipe)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_positions_that_depend_on_the_micro_batch_are_refused(tiny, tmp_path, check):
    config = Phi3Config(rope_parameters=LONGROPE, original_max_position_embeddings=48)
    config.save_pretrained(tmp_path / "model")
    tables = {**tomllib.loads(tiny().read_text()), "model": {"path": str(tmp_path / "model")}}
    recipe = write_recipe(tmp_path / "long.toml", tables)
    assert any("set data.max_length = 48, or train.micro" in one for one in check(recipe).problems)
    tables["train"]["micro_batch"] = 1
    recipe = write_recipe(tmp_path / "long.toml", tables)
    assert not any("longrope" in one for one in check(recipe).problems)
    tables["plugins"] = {"dpo": {}}  # two answers in a forward
    recipe = write_recipe(tmp_path / "long.toml", tables)
    [found] = [one for one in check(recipe).problems if "longrope" in one]
    assert found.endswith("set data.max_length = 48")


def test_a_coefficient_that_transformers_does_not_use_is_no_error():
    ensure_plain_loss(MixtralConfig(router_aux_loss_coef=0.5), "here")
