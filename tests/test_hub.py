"""export --to hub: one commit, whole or not at all, through cuts, to those who may; the card."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, chats, only_full, run_plugsft, tiny_tables, write_recipe
from hub_server import READER, TOKEN, Repo, environment, serve
from huggingface_hub import ModelCard

from plugsft.api import PlugsftError
from plugsft.base.atomic import damage
from plugsft.export.card import is_edited, model_card
from plugsft.export.folder import ensure_model
from plugsft.recipe.tables import is_hub_name

LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
hub, here = (AutoModelForCausalLM.from_pretrained(name) for name in sys.argv[1:3])
theirs, ours = hub.state_dict(), here.state_dict()
assert theirs.keys() == ours.keys()
assert all(torch.equal(theirs[name], ours[name]) for name in ours)
template = AutoTokenizer.from_pretrained(sys.argv[1]).chat_template
assert template == AutoTokenizer.from_pretrained(sys.argv[2]).chat_template
print(len(ours), "weights are equal")
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train a whole model, with a checkpoint."""
    folder = tmp_path_factory.mktemp("hub")
    tables = tiny_tables(folder, chats(20))
    tables["train"] |= {"steps": 4}
    tables["checkpoint"] = {"every": 2}
    tables["eval"] = {"split": "train[:8]"}
    tables["plugins"] = {"bfd_packing": {}}
    del tables["train"]["micro_batch"]
    result = run_plugsft(write_recipe(folder / "recipe.toml", tables))
    assert result.returncode == 0, result.stderr
    return folder / "run"


@pytest.fixture
def hub():
    with serve() as hub:
        yield hub


def call(hub, home, *words, token=TOKEN, **variables):
    """Run a program in a new process, which reads the hub's address as it starts."""
    drop = {"HF_HUB_OFFLINE", "HF_TOKEN"}
    env = {name: value for name, value in os.environ.items() if name not in drop}
    env |= environment(hub, home, token) | variables
    command = [sys.executable, *map(str, words)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    for secret in (TOKEN, READER, "signature"):
        assert secret not in result.stdout + result.stderr
    return result


def push(hub, home, run, *words, **options):
    return call(hub, home, "-m", "plugsft", "export", run, *words, **options)


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name[0] != "."}


def test_a_push_through_cuts_is_one_commit_that_transformers_loads(run, hub, tmp_path):
    hub.faults += [
        ("PUT /store", "cut"),
        ("POST .*/batch", 503),
        ("POST .*/commit", 500),
        ("POST .*/commit", 412),
        ("GET .*/tree", 429),
    ]
    result = push(hub, tmp_path, run, "--to", "hub:me/tiny")
    assert result.returncode == 0 and not result.stderr, result.stderr
    repo = hub.repos["me/tiny"]
    assert repo.private and len(repo.commits) == 2 and not hub.faults
    weights = files_of(run / "model")["model.safetensors"]
    sent = files_of(run / "model") | {"README.md": repo.files["README.md"]}
    del sent["manifest.json"]
    assert repo.files == {".gitattributes": b"x"} | sent
    assert len(hub.received) == 1 and [*hub.stored.values()] == [weights]
    assert "created the private repository me/tiny" in result.stdout
    assert "the hub answers 500" in result.stdout and "trying again in 1 s" in result.stdout
    assert result.stdout.strip().endswith(f"{hub.url}/me/tiny")
    # Again, where somebody has edited the card, and weights of another model lie.
    card = repo.files["README.md"].decode()
    check_card(card, "me/tiny")
    foreign = {"README.md": b"My own words.", "notes.txt": b"mine", "adapter_config.json": b"{}"}
    repo.commits.append(repo.files | foreign | {"model-00002-of-00002.safetensors": b"old"})
    again = push(hub, tmp_path, run, "--to", "hub:tiny")
    assert again.returncode == 0, again.stderr
    assert len(hub.received) == 1, "files that the hub has are not sent again"
    assert "README.md was edited on the hub; it stays" in again.stdout
    assert "there: adapter_config.json, model-00002-of-00002.safetensors\n" in again.stdout
    own = {name: foreign[name] for name in ("README.md", "notes.txt")}
    assert repo.files == {".gitattributes": b"x"} | sent | own
    loaded = call(hub, tmp_path, "-c", LOAD, "me/tiny", run / "model")
    assert "weights are equal" in loaded.stdout, loaded.stderr


def check_card(text, name):
    """The card says what run.json says, in a front matter that is valid."""
    card = ModelCard(text)
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["plugsft"],
    }
    assert f'AutoModelForCausalLM.from_pretrained("{name}")' in text
    for line in (
        "A model, trained from random weights with plugsft",
        "| `data.jsonl` | 20 | 1.0 |",
        "| steps | 4 of 4, 1.33 epochs |",
        "| eval loss | ",
        "- `bfd_packing`: ",
        'source = "data.jsonl"',
        "| hardware | 1 x cpu, ",
    ):
        assert line in text, text
    assert not re.search(r"/(tmp|root|home)/", text) and not is_edited(text)
    assert is_edited(text.replace("20 rows", "9,999 rows")) and is_edited("Mine")


CASES = """
import os, sys
from plugsft import cli
from plugsft.export import hub
run, reader, owner = sys.argv[1:]
hub.PAUSES = ()
words = ["export", run, "--to"]
cases = {
    "no token": ("", "hub:me/x"),
    "wrong token": ("hf_unknown", "hub:me/x"),
    "reader creates": (reader, "hub:me/x"),
    "reader writes": (reader, "hub:me/open", "--public"),
    "public": (owner, "hub:me/open"),
    "private": (owner, "hub:me/closed", "--public"),
    "name": (owner, "hub:me/a b"),
    "empty": (owner, "hub:"),
    "slashes": (owner, "hub:me/x/y"),
    "folder": (owner, run + "/copy", "--public"),
    "no answer": (owner, "hub:me/cut"),
    "no commit": (owner, "hub:me/closed"),
    "later": (owner, "hub:me/closed"),
}
for name, (token, *more) in cases.items():
    os.environ["HF_TOKEN"] = token
    print("case", name, file=sys.stderr, flush=True)
    code = 0
    try:
        cli.main([*words, *more])
    except SystemExit as end:
        code = end.code or 0
    print("exit code", code, file=sys.stderr, flush=True)
"""


def test_what_cannot_be_pushed_says_why_and_changes_nothing(run, hub, tmp_path):
    hub.repos |= {"me/open": Repo(False), "me/closed": Repo(True), "me/cut": Repo(True)}
    hub.faults += [("GET /api/models/me/cut", "cut"), ("POST .*me/closed/commit", 500)]
    result = call(hub, tmp_path, "-c", CASES, run, READER, TOKEN)
    cases = dict(part.split("\n", 1) for part in result.stderr.split("case ")[1:])
    for case, says in {
        "no token": "there is no token for the hub: run `hf auth login`, or set HF_TOKEN",
        "wrong token": "the hub refuses the token (401); log in again",
        "reader creates": "this token may not write there (403",
        "reader writes": "this token may not write there (403",
        "public": "me/open: exists and is public; add --public",
        "private": "me/closed: exists and is private; leave out --public",
        "name": "is no name of a repository, such as hub:me/my-model",
        "empty": "is no name of a repository",
        "slashes": "is no name of a repository",
        "no answer": "no answer of the hub: ",
        "no commit": "the hub answers 500",
        "folder": "--public is for the hub; add --to hub:OWNER/NAME",
    }.items():
        assert says in cases[case] and "exit code 2" in cases[case], cases[case]
        assert len(cases[case].strip().splitlines()) == 2, cases[case]
    assert "files that were sent need not be sent again" in cases["no commit"]
    # What was sent before the failed commit is not sent again.
    assert "exit code 0" in cases["later"] and len(hub.received) == 1
    assert {name: len(repo.commits) for name, repo in hub.repos.items()} == {
        "me/open": 1,
        "me/closed": 2,
        "me/cut": 1,
    }


@only_full
def test_merged_models_checkpoints_and_copies_have_their_cards(run, hub, tmp_path):
    tables = tiny_tables(tmp_path, chats(20)) | {"output": str(tmp_path / "adapters")}
    base = shutil.copytree(run / "model", tmp_path / "base")
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    tables["model"] = {"path": str(base)}
    tables["train"] |= {"steps": 4}
    tables["checkpoint"] = {"every": 2}
    tables["plugins"] = {"lora": {"r": 4}}
    result = run_plugsft(write_recipe(tmp_path / "lora.toml", tables))
    assert result.returncode == 0, result.stderr
    adapters = tmp_path / "adapters"
    for words, repo, kind in (
        ([adapters], "me/adapters", "peft"),
        ([adapters, "--merge"], "me/adapters", "transformers"),
        ([adapters / "checkpoints/step-000002"], "me/early", "peft"),
        ([adapters / "checkpoints/step-000002", "--merge"], "me/merged", "transformers"),
    ):
        result = push(hub, tmp_path / "home", *words, "--to", f"hub:{repo}")
        assert result.returncode == 0, result.stderr
        local = f"warning: the adapters are for {base}, a folder of this machine"
        assert (local in result.stdout) == (kind == "peft")
        card = ModelCard(hub.repos[repo].files["README.md"].decode())
        assert card.data.library_name == kind and card.data.license == "apache-2.0"
        assert ("adapter_config.json" in hub.repos[repo].files) == (kind == "peft")
        assert "lora" in card.data.tags
        steps = "2 of 4" if "step" in str(words[0]) else "4 of 4"
        assert f"| steps | {steps}" in card.text, card.text
    further = write_recipe(tmp_path / "further.toml", tables | {"output": str(tmp_path / "next")})
    words = ["-m", "plugsft", further, "plugins.lora.adapter=me/early"]
    assert call(hub, tmp_path / "home", *words).returncode == 0
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    refused = call(hub, tmp_path / "home", *words, "--overwrite")
    assert refused.returncode == 2 and "me/early: was trained on another model" in refused.stderr
    (base / "config.json").write_text(json.dumps(config))
    merged = run_plugsft("export", adapters, "--merge")
    assert merged.returncode == 0, merged.stderr
    assert call(hub, tmp_path / "home", "-c", LOAD, "me/adapters", adapters / "merged").stdout
    assert not [*adapters.parent.glob(".export-*")]


def test_weights_that_were_not_copied_are_not_uploaded(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(PlugsftError, match=r"model.safetensors: is empty; copy the model again"):
        ensure_model(tmp_path)


def test_a_card_has_no_secret_of_the_recipe_and_stays_valid(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "läuf: #1")
    prompts = [f"my token: {TOKEN}", "```\n---\nlicense: mine", "https://me:hush@hub.org/x"]
    with (copy / "recipe.toml").open("a", encoding="utf8") as recipe:
        recipe.write(f"\n[plugins.samples]\nprompts = {json.dumps(prompts)}\n")
    card = model_card(copy, copy / "model", "me/x")
    assert TOKEN not in card and "hush" not in card and card.count("***") == 2
    assert ModelCard(card).data.to_dict().keys() == {"library_name", "pipeline_tag", "tags"}
    fence = re.search(r"^(`+)toml\n", card, re.M)[1]
    assert len(fence) == 4 and card.count(fence) == 2


def test_a_copy_has_a_card_unless_somebody_wrote_one(run, tmp_path):
    assert run_plugsft("export", run, "--to", tmp_path / "copy").returncode == 0
    text = (tmp_path / "copy/README.md").read_text()
    check_card(text, "copy")
    assert damage(tmp_path / "copy") is None
    (tmp_path / "copy/README.md").write_text("My own words.")
    edited = shutil.copytree(run, tmp_path / "edited")
    (edited / "model/README.md").write_text("My own words.")
    assert run_plugsft("export", edited, "--to", tmp_path / "other").returncode == 0
    assert (tmp_path / "other/README.md").read_text() == "My own words."


READ = """
import sys
from plugsft.data.sources import open_source
from plugsft.recipe.tables import Source
for name in sys.argv[1:]:
    print([row["text"] for row in open_source(Source(source=name)).read(0, 9)])
"""


def test_a_subset_of_a_data_set(hub, tmp_path):
    configs = [f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in "ab"]
    card = f"---\nconfigs:\n{''.join(configs)}---\n"
    rows = {"a.jsonl": b'{"text": "one"}\n', "b.jsonl": b'{"text": "two"}\n{"text": "three"}\n'}
    hub.repos["me/rows"] = Repo(False, [{"README.md": card.encode(), **rows}])
    words = ("-c", READ, "me/rows:a", "me/rows:b", "me/rows")
    result = call(hub, tmp_path, *words, HF_DATASETS_OFFLINE="0")
    assert result.stdout.split("\n")[:2] == ["['one']", "['two', 'three']"], result.stderr
    assert "Please pick one among the available configs: ['a', 'b']" in result.stderr
    assert "correct the name (owner/name:subset for a subset)" in result.stderr
    assert is_hub_name("me/rows:a")
