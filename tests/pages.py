"""The pages: their texts, the commands in them, and a folder in which these run."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import typer
from conftest import ROOT, chats, must_succeed, tiny_tables, write_jsonl, write_recipe

from plugsft import cli

README = (ROOT / "README.md").read_text(encoding="utf8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# families.md is written by tests/family_runs.py, with the errors of other programs in it.
TEXTS = {page: page.read_text(encoding="utf8") for page in PAGES if page.stem != "families"}
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.S)

TOOLS = {"tools/quickstart", ".venv/bin/plugsft chat runs/quickstart", "tools/test"}
"""The first two run in test_quickstart.py; the third runs these tests."""
TOO_SLOW = {
    "pip install .": "test_wheel.py installs the wheel",
    "plugsft quickstart": "test_wheel.py runs it with few steps, test_quickstart.py with all",
    "plugsft chat runs/quickstart": "test_quickstart.py runs it",
    "tools/install fast,quantize": "tools/test installs more",
    "tools/install dev,deepspeed,fast,fp8,liger,quantize,trackers": "tools/test runs it",
    "tools/install --oldest dev,deepspeed,fast,fp8,liger,quantize,trackers": "tools/test "
    "--full runs it",
    "PLUGSFT_OLDEST=1 .venv-oldest/bin/pytest -W ignore::DeprecationWarning "
    "-W ignore::FutureWarning tests/test_loop.py": "tools/test --full runs it",
    "tools/check": "its parts are in tools/test",
    **dict.fromkeys(
        ("tools/examples style", "tools/examples calls", "tools/examples preferences"),
        "a quarter of an hour each; test_examples.py makes their rows and judges calls",
    ),
    "plugsft recipes/quickstart_dpo.toml": "test_quickstart.py runs it with --full",
    "tools/test --full": "takes longer than CI has",
    "plugsft bench my.toml --only bfd_packing --rounds 1 --steps 3": "a minute; "
    "test_bench.py runs benches",
    "plugsft fetch s3://bucket/chats.jsonl data": "test_fetch.py has a bucket",
    "plugsft tune my.toml": "half a minute; test_tune.py tunes",
    "plugsft export runs/my-model --to hub:me/my-model": "test_hub.py has a hub to upload to",
    **dict.fromkeys(
        (
            "plugsft launch my.toml --nodes 2 --node 0 --host 10.0.0.1",
            "plugsft launch my.toml --nodes 2 --node 1 --host 10.0.0.1",
        ),
        "they need two machines; test_many_machines.py runs both on one, with --full",
    ),
    "NODES=2 HOST=10.0.0.1 bash recipes/launch/torchrun.sh my.toml": "it needs two machines; "
    "test_many_machines.py has torchrun's agents, without this file",
    "accelerate launch -m plugsft recipes/tulu_sft.toml": "8 billion weights; test_recipes.py runs "
    "it with few",
    "sbatch recipes/launch/slurm.sbatch my.toml": "test_slurm.py has a Slurm and runs it with "
    "--full",
    **dict.fromkeys(
        (
            "plugsft init tools",
            "plugsft recipes/tools.toml",
            "plugsft export runs/tools --merge",
        ),
        "test_init.py runs them",
    ),
    "plugsft launch my.toml --ranks 2": "test_many_machines.py launches so",
    "plugsft launch my.toml --ranks 2 --strategy fsdp2": "the next line of accelerate is the same",
    "accelerate launch --config_file recipes/accelerate/gpu8.yaml --num_processes 2 "
    "-m plugsft my.toml": "plugsft launch runs the same line, but for the file",
    "accelerate launch --config_file recipes/accelerate/zero3.yaml --num_processes 2 "
    "-m plugsft my.toml": "DeepSpeed's start; test_launch.py trains with this file",
}
"""Command -> why it is only parsed."""
REFUSED = {"plugsft my.toml data.too_long=cut"}
"""Commands that show a mistake."""


def blocks(language):
    """Return (page, text) of each block in a language."""
    return [
        (page, text)
        for page, content in TEXTS.items()
        for name, text in BLOCK.findall(content)
        if name == language
    ]


def commands(text):
    """Return the commands of a block, without comments."""
    lines = [line.partition(" #")[0].strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


COMMANDS = list(dict.fromkeys(line for _, text in blocks("bash") for line in commands(text)))

RUN = [command for command in COMMANDS if command not in TOOLS and command not in TOO_SLOW]


def make_place(folder):
    """Put into a folder what the README's recipe names: a model, rows, and the recipe."""
    tables = tiny_tables(folder / "tiny", chats(70))
    tables["model"]["scratch"]["context"] = 2048
    tables["train"]["steps"] = 1
    must_succeed(write_recipe(folder / "tiny/recipe.toml", tables))
    for name in ("Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M-Instruct"):
        shutil.copytree(folder / "tiny/run/model", folder / name)
    write_jsonl(folder / "chats.jsonl", chats(70))
    for kind in ("launch", "quickstart", "tools"):
        must_succeed("init", kind, cwd=folder)
    # Smaller steps than the README's, for speed.
    recipe = dict(BLOCK.findall(README))["toml"].replace("batch_size = 64", "batch_size = 16")
    (folder / "my.toml").write_text(recipe, encoding="utf8")
    for name, settings in OTHERS.items():
        (folder / name).write_text(json.dumps(settings))
    return folder


OTHERS = {
    "qlora.yaml": {"base_model": "m", "datasets": [{"path": "d"}], "learning_rate": 1e-4},
    "sft.yaml": {"model_name_or_path": "m", "stage": "sft", "dataset": "identity"},
    "dpo.yaml": {"model_name_or_path": "m", "dataset_name": "d", "beta": 0.1},
}
"""Configurations of axolotl, LLaMA-Factory and TRL."""


def prepare_for(command, run, place):
    """Make the runs that a command needs; each is trained once, and a copy of it is used."""
    if "--resume" in command or "--overwrite" in command or " runs/my-model" in command:
        give_run(place, run, "my-model", " plugins.lora.r=4" if "--merge" in command else "")
    if "model.path=tenth-step" in command:
        give_run(place, run, "my-model")
        shutil.copytree(place / "runs/my-model/model", place / "tenth-step")
    if " diff " in command:
        give_run(place, run, "other", " output=runs/other")


def give_run(place, run, name, words=""):
    trained = place / f"trained{words.replace('/', '-')}"
    if trained.exists():
        shutil.copytree(trained, place / "runs" / name)
    else:
        assert run(place, f"plugsft my.toml{words}").returncode == 0
        shutil.copytree(place / "runs" / name, trained)


def in_a_shell(place, command, programs=Path(sys.executable).parent):
    """Run a command as a user would, with the programs of an environment."""
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    env.pop("PYTHONPATH", None)
    return subprocess.run(
        command,
        shell=True,
        cwd=place,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )


def parse_command(words):
    """Parse the words of a plugsft command; an unknown option or a wrong value is an error."""
    command = typer.main.get_command(cli.app)
    rest = cli.with_command(words)
    while hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    command.make_context("plugsft", rest)
