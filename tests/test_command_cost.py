"""Short commands and refusals answer soon: they import no torch."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT, run_plugsft, tiny_tables, write_jsonl, write_recipe
from other_tools import save_model
from plugin_packages import LOUD, activate, install

from plugsft.base.atomic import publish
from plugsft.checkpoint.same_run import FORMAT
from plugsft.registry.discover import find

QUICKSTART, TULU = "recipes/quickstart.toml", "recipes/tulu_sft_lora.toml"
HEAVY = {"torch", "transformers", "datasets", "accelerate", "peft"}
TOKENIZING = HEAVY - {"transformers"}
"""transformers holds the tokenizer's class, and imports no torch for it."""


# Each command in a fork of a process that has imported what all commands do.
FORKS = """
import json, os, sys, traceback
from plugsft import cli

for number, (words, env) in enumerate(json.load(sys.stdin)):
    if os.fork():
        os.wait()
        continue
    for target, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{sys.argv[1]}/{number}.{name}", os.O_WRONLY | os.O_CREAT), target)
    os.environ.update(env)
    code = 0
    try:
        cli.main(words)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    packages = {name.partition(".")[0] for name, module in sys.modules.items() if module}
    with open(f"{sys.argv[1]}/{number}.json", "w") as file:
        json.dump([code, sorted(packages)], file)
    sys.stdout.flush()
    os._exit(0)
"""


def run_all(folder, commands, **env):
    """Run commands; return the exit code, output, errors and imported packages of each."""
    answers = folder / "answers"
    answers.mkdir()
    todo = json.dumps([[[*map(str, words)], env] for words in commands])
    command = [sys.executable, "-c", FORKS, str(answers)]
    subprocess.run(command, input=todo, text=True, cwd=ROOT, check=True)
    for number in range(len(commands)):
        code, packages = json.loads((answers / f"{number}.json").read_text())
        texts = [(answers / f"{number}.{name}").read_text() for name in ("out", "err")]
        yield code, *texts, {*packages}


def test_a_short_answer_imports_nothing_heavy(tmp_path):
    run = str(tmp_path / "run")
    wrong = ("check", "prepare", "inspect", "bench", "tune", "plan")
    mistakes = [
        [QUICKSTART, f"output={run}", "train.batchsize=4"],
        [TULU, f"output={run}", "plugins.lora.rr=4"],
        *([command, QUICKSTART, "train.batchsize=4"] for command in wrong),
        ["nowhere.toml"],
        ["chat", run],
        ["export", run, "--to", f"{run}/copy"],
    ]
    answers = [
        *(["--help"], ["train", "--help"], ["plugins", TULU], ["plugins"], ["schema"]),
        ["cache", "ls"],
        *(["show", recipe] for recipe in sorted(ROOT.glob("recipes/*.toml"))),
    ]
    words = mistakes + answers
    for n, (code, _, problems, packages) in enumerate(run_all(tmp_path, words)):
        assert code == 2 * (n < len(mistakes)) and not packages & HEAVY, (words[n], problems)
        if n < 8:  # a mistake in a recipe
            assert not packages & {"numpy", "pyarrow", "jinja2", "tokenizers"}, words[n]


def files_of_a_new_user(folder):
    """Make files about which a run is refused, and folders that hold results."""
    write_jsonl(folder / "columns.jsonl", [{"question": "a", "answer": "b"}])
    write_jsonl(folder / "pairs.jsonl", [{"chosen": "a", "rejected": "b"}])
    (folder / "empty.jsonl").touch()
    (folder / "foreign/model").mkdir(parents=True)
    (folder / "foreign/model/notes.txt").write_text("mine")
    save_model(folder / "short")
    config = json.loads((folder / "short/config.json").read_text())
    (folder / "short/config.json").write_text(json.dumps(config | {"max_position_embeddings": 100}))
    with publish(folder / "finished/model") as model:
        (model / "config.json").write_text("{}")
    with publish(folder / "other/checkpoints/step-000002") as checkpoint:
        state = {"format": FORMAT, "step": 2, "recipe": {"train.seed": 7}}
        (checkpoint / "state.json").write_text(json.dumps(state))


REFUSED = [
    (["output={place}/finished"], "/finished holds a finished run: start again with"),
    (["output={place}/foreign"], "notes.txt: not written by plugsft"),
    (["output={place}/other"], "holds checkpoints up to step-000002"),
    (["output={place}/other", "--resume"], "belongs to another run"),
    (["--resume"], "there is no checkpoint in"),
    (["--resume-from={place}/short"], "is no checkpoint"),
    (["--resume", "--overwrite"], "choose one of them"),
    (["data.source={place}/nowhere.jsonl"], "no such file"),
    (["train.schedule=wsd"], "decay, the last part of the run, go together"),
    (["train.schedule=polynomial"], "write plugins.hf_schedule.name = 'polynomial'"),
    (
        ["eval.split=train[95%:]", "data.split=train[:95%]", "checkpoint.keep_best=eval_los"],
        "did you mean 'eval_loss'?",
    ),
    (["plugins.early_stopping.metric=los"], "steps have no metric 'los'; did you mean 'loss'?"),
]
REFUSED_LATER = [
    (["data.max_length=257"], "the model's context is 256 tokens"),
    (["model={{path = '{place}/short'}}"], "the model's context is 100 tokens"),
    (["data.source={place}/empty.jsonl"], "the file is empty"),
    (["data.source={place}/columns.jsonl"], "no format has these columns: answer, question"),
    (["data.source={place}/pairs.jsonl"], "add [plugins.dpo]"),
    (["eval.source={place}/columns.jsonl"], "no format has these columns: answer, question"),
]
"""What the library that reads it refuses, once it is imported."""


@pytest.mark.parametrize("later", [False, True])
def test_a_mistake_is_refused_before_anything_heavy_is_imported(tmp_path, later):
    files_of_a_new_user(tmp_path)
    start, cases = [QUICKSTART, f"output={tmp_path}/run"], REFUSED_LATER if later else REFUSED
    words = [[*start, *(word.format(place=tmp_path) for word in more)] for more, _ in cases]
    for (more, says), answer in zip(cases, run_all(tmp_path, words), strict=True):
        code, _, problems, packages = answer
        errors = [line for line in problems.splitlines() if line.startswith("error: ")]
        assert code == 2 and len(errors) == 1 and says in errors[0], (more, problems)
        assert later or not packages & HEAVY, more
    assert later or not (tmp_path / "run").exists()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_every_rank_refuses_a_finished_run_before_anything_heavy(rank, tmp_path):
    files_of_a_new_user(tmp_path)
    words = [QUICKSTART, f"output={tmp_path / 'finished'}"]
    ranks = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    [(code, _, _, packages)] = run_all(tmp_path, [words], **ranks)
    assert code == 2 and not packages & HEAVY


PAIR = {"prompt": "Say a letter.", "chosen": "This is a.", "rejected": "I say no."}
RATED = {"prompt": "Say a letter.", "completion": "This is a.", "label": True}


def test_preparing_and_checking_import_no_torch_and_a_run_finds_the_tokens(tmp_path, monkeypatch):
    save_model(tmp_path / "model")
    rows = {"": None, "dpo": [PAIR] * 24, "reward": [PAIR] * 24, "kto": [RATED] * 24}
    recipes = []
    for name, own in rows.items():
        tables = tiny_tables(tmp_path / f"for{name}", own)
        tables |= {"model": {"path": str(tmp_path / "model")}}
        tables |= {"plugins": {name: {}} if name else {}}
        recipes.append(write_recipe(tmp_path / f"for{name}.toml", tables))
    # A plugin of others may import torch.
    with_torch = LOUD.replace("rendered = yield", "rendered = yield\n            import torch")
    activate(install(tmp_path / "site", loud=with_torch), monkeypatch)
    other = write_recipe(tmp_path / "loud.toml", tiny_tables(tmp_path) | {"plugins": {"loud": {}}})
    scratch = QUICKSTART, f"output={tmp_path / 'run'}"
    words = [*(["prepare", recipe] for recipe in recipes), ["prepare", other]]
    words += [["check", *scratch], ["prepare", *scratch], ["prepare", *scratch]]
    for n, (code, out, problems, packages) in enumerate(run_all(tmp_path, words)):
        assert code == 0, problems
        assert "torch" in packages if words[n][1] == other else not packages & TOKENIZING
        assert "24 rows" in out or n > len(recipes)
    for recipe in recipes:
        done = run_plugsft("prepare", recipe)  # torch is imported here
        assert done.returncode == 0 and "from cache" in done.stdout


def test_importing_plugins_imports_nothing_heavy():
    modules = [plugin.target.partition(":")[0] for plugin in find().values()]
    code = f"""import importlib, sys
for name in {modules}:
    importlib.import_module(name)
    heavy = {HEAVY} & {{*sys.modules}}
    if heavy:
        sys.exit(f"{{name}} imports {{heavy}}")"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert not done.returncode, done.stderr
