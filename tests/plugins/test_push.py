"""push: another process uploads while the training goes on; kills, cuts and failures."""

import os
import shlex
import signal
import subprocess
import sys
import time

import psutil
import pytest
from conftest import ROOT, chats, only_full, tiny_tables, write_recipe
from hub_server import READER, TOKEN, Repo, environment, serve

from plugsft.plugins.push.uploads import Uploads, link_copy


@pytest.fixture
def hub():
    with serve() as hub:
        yield hub


def recipe_of(folder, steps=6, saves=2, **options):
    """Write a recipe that pushes; without evaluation it trains in a second."""
    tables = tiny_tables(folder, chats(16))
    tables["train"] |= {"steps": steps, "log_every": 100}
    tables["checkpoint"] = {"every": saves, "keep": 1}
    tables["plugins"] = {"push": {"to": "me/tiny", **options}}
    return write_recipe(folder / "recipe.toml", tables)


def start(hub, folder, *words, token=TOKEN):
    """Start plugsft in a new process, which reads the hub's address as it starts."""
    env = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
    env |= environment(hub, folder / "home", token) | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "plugsft", *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=env, **pipes)


def ran(hub, folder, *words, token=TOKEN):
    """Return the exit code and the output of plugsft; no secret is in it, or in the run."""
    process = start(hub, folder, *words, token=token)
    out = process.communicate(timeout=600)[0]
    written = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    for secret in (TOKEN, READER):
        assert secret not in out and not any(secret.encode() in text for text in written)
    return process.returncode, out


@only_full
def test_the_model_is_on_the_hub_with_the_figures_of_its_run(hub, tmp_path):
    hub.faults += [("PUT /store", "cut"), ("POST .*/commit", 503)]
    code, out = ran(hub, tmp_path, recipe_of(tmp_path))
    assert code == 0, out
    repo = hub.repos["me/tiny"]
    weights = (tmp_path / "run/model/model.safetensors").read_bytes()
    assert repo.private and repo.files["model.safetensors"] == weights
    assert repo.messages == ["plugsft: the model of run"] and not hub.faults
    card = repo.files["README.md"].decode()
    assert "| steps | 6 of 6" in card and "| time | 0:00" in card and "- `push`: " in card
    assert "push: the process waits at most 60 minutes" in out
    assert out.strip().endswith(f"push: model, on the hub: {hub.url}/me/tiny")
    assert out.index("report:") < out.index("push: created the private repository me/tiny")
    assert not (tmp_path / "run/push").exists()


CASES = """
import os, sys
from plugsft import cli
for token, *words in (case.split() for case in sys.argv[1:]):
    os.environ["HF_TOKEN"] = token
    print("case", flush=True)
    try:
        cli.main(words)
    except SystemExit as end:
        print("exit code", end.code, flush=True)
"""


def test_what_the_hub_refuses_stops_the_run_before_it_starts(hub, tmp_path):
    hub.repos["me/tiny"] = Repo(private=False)
    recipe = recipe_of(tmp_path)
    open_to_all = f"check {recipe} plugins.push.private=false"
    cases = {
        f"{TOKEN} check {recipe}": '"me/tiny" exists and is public; set private = false',
        f"{READER} {open_to_all}": 'may not write to "me/tiny" (403)',
        f"hf_unknown {open_to_all}": 'may not write to "me/tiny" (401)',
        f"{TOKEN} {open_to_all} plugins.push.to=a//b": '"a//b" is no name of a repository',
    }
    env = os.environ | environment(hub, tmp_path / "home")
    command = [sys.executable, "-c", CASES, *cases]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    out = subprocess.run(command, cwd=ROOT, env=env, **pipes).stdout.split("case\n")[1:]
    for said, says in zip(out, cases.values(), strict=True):
        assert says in said and "exit code 2" in said, said


def test_linked_files_outlive_their_originals(tmp_path):
    original = tmp_path / "step-000002"
    (original / "inner").mkdir(parents=True)
    (original / "inner/weights").write_bytes(b"1234")
    copy = link_copy(original, tmp_path / "push/step-000002")
    (original / "inner/weights").unlink()
    assert (copy / "inner/weights").read_bytes() == b"1234"
    assert [path.name for path in copy.parent.iterdir()] == ["step-000002"]


@only_full
def test_a_killed_run_uploads_what_is_missing_after_a_resume(hub, tmp_path):
    hub.faults.append(("PUT /store", "hang"))
    recipe = recipe_of(tmp_path, steps=3000, saves=100, every="checkpoint")
    process = start(hub, tmp_path, recipe)
    while not any("export" in child.cmdline() for child in psutil.Process(process.pid).children()):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    process.send_signal(signal.SIGSTOP)  # so that it cannot end before its upload begins
    assert hub.hangs.wait(120)
    process.send_signal(signal.SIGKILL)
    out = process.communicate()[0]
    hub.goes_on.set()
    assert "report:" not in out and "me/tiny" in hub.repos
    copy = max((tmp_path / "run/push").glob("step-*"))
    code, out = ran(hub, tmp_path, recipe, "--resume")
    assert code == 0, out
    assert f"push: {copy.name} was not uploaded before; it is now" in out
    repo = hub.repos["me/tiny"]
    weights = (tmp_path / "run/model/model.safetensors").read_bytes()
    assert repo.files["model.safetensors"] == weights
    first, *_, last = repo.messages
    assert first.startswith("plugsft: the model of step ") and last == "plugsft: the model of run"
    assert not (tmp_path / "run/push").exists()


@only_full
def test_an_upload_that_fails_leaves_the_run_and_its_command(hub, tmp_path):
    hub.faults += [("POST .*/commit", 500)] * 1000
    code, out = ran(hub, tmp_path, recipe_of(tmp_path, wait_minutes=0.5))
    assert code == 0, out
    assert "warning: push: model was not uploaded: the time to wait is over" in out
    assert len(hub.repos["me/tiny"].commits) == 1
    hub.faults.clear()
    words = shlex.split(out.strip().rpartition("Upload it with: plugsft ")[2])
    code, out = ran(hub, tmp_path, *words)
    assert code == 0 and "model.safetensors" in hub.repos["me/tiny"].files, out


@only_full
def test_one_of_two_ranks_uploads(hub, tmp_path):
    recipe = recipe_of(tmp_path)
    env = os.environ | environment(hub, tmp_path / "home") | {"OMP_NUM_THREADS": "1"}
    launch = ["accelerate.commands.launch", "--config_file", "recipes/accelerate/cpu2.yaml"]
    command = [sys.executable, "-m", *launch, "-m", "plugsft", str(recipe)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    assert hub.repos["me/tiny"].messages == ["plugsft: the model of run"]
    assert done.stdout.count("push: model, on the hub") == 1


def test_the_model_waits_for_the_report_of_its_run(tmp_path, capsys):
    model = tmp_path / "run/model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    uploads = Uploads(tmp_path / "run", "me/tiny", [], 60)
    uploads.add(model)
    time.sleep(0.5)
    # The run has not ended: nothing is started yet.
    assert uploads._process is None and (tmp_path / "run/push/model/config.json").is_file()
    thread = uploads._thread
    uploads.end(wait=False)
    thread.join(30)
    assert not thread.is_alive() and not (tmp_path / "run/push").exists()
    assert "model was not uploaded: the run ended. Upload it with:" in capsys.readouterr().out
