"""The line that plugsft launch runs: from its options, Slurm, torchrun and accelerate's file."""

import json
import os
import runpy
import shlex
from pathlib import Path

import pytest
from accelerate.commands.config import config_args
from conftest import ROOT, _launch_environment, tiny_tables, write_recipe

from plugsft import cli
from plugsft.base.launch_files import STRATEGIES
from plugsft.start import launch as launch_ranks
from plugsft.start.launch import first_host
from plugsft.start.launch_file import default_launch_file

STEP = {
    "SLURM_JOB_ID": "70123",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "localhost,node[01-04]",
    "SLURM_NODEID": "1",
}
"""The variables that srun sets, as seen in a job of Slurm 22.05."""


@pytest.fixture
def recipe(tmp_path):
    return write_recipe(tmp_path / "recipe.toml", tiny_tables(tmp_path) | {"device": "cpu"})


@pytest.fixture
def launch(recipe, tmp_path, monkeypatch, capsys):
    """Give `launch(*words)`: the exit code, the lines it prints, and the command it becomes."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)

    def run(*words, recipe=recipe):
        became = []

        def execute(program, command, environment):
            assert environment["PYTHONSAFEPATH"] == "1"
            became.extend(command)
            raise SystemExit(0)

        monkeypatch.setattr(os, "execve", execute)
        with pytest.raises(SystemExit) as ended:
            cli.main(["launch", str(recipe), *words])
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return ended.value.code, (printed.out + printed.err).splitlines(), became

    return run


def test_the_printed_line_is_the_one_that_runs(launch, recipe):
    words = ("--ranks", "2", "train.steps=3", "plugins.ema={}", "--without=ema", "--resume-auto")
    code, lines, command = launch(*words)
    line = (
        f"accelerate launch --config_file recipes/accelerate/cpu2.yaml --num_processes 2 "
        f"-m plugsft {recipe} train.steps=3 'plugins.ema={{}}' --without=ema --resume-auto"
    )
    assert (code, lines) == (0, [line])
    assert command[1:] == ["-m", "plugsft.start.run_accelerate", *shlex.split(line)[2:]]
    assert cli.with_command(shlex.split(line)[8:])[0] == "train"


def test_one_rank_needs_no_launcher(launch, recipe):
    _, lines, command = launch("--overwrite")
    assert lines[1:] == [f"plugsft {recipe} --overwrite"] and "1 rank" in lines[0]
    assert command[2:] == ["plugsft", str(recipe), "--overwrite"]


def test_a_machine_of_several_says_where_it_waits(launch):
    words = ("--nodes", "4", "--node", "3", "--host", "127.0.0.1", "--ranks", "2")
    _, lines, _ = launch(*words, "--strategy", "zero3", "--port", "29900")
    assert lines[0] == (
        "launch: machine 3 of 4, numbered from 0; machine 0 is 127.0.0.1, port 29900"
    )
    for option in (
        "--config_file recipes/accelerate/zero3.yaml --num_processes 8 --num_machines 4",
        "--machine_rank 3 --main_process_ip 127.0.0.1 --main_process_port 29900",
        "--deepspeed_multinode_launcher standard",
    ):
        assert option in lines[1]


def test_outside_of_a_clone_the_files_of_the_wheel_are_used(launch, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        f"--config_file {ROOT}/recipes/accelerate/fsdp2.yaml"
        in launch(*("--ranks", "2", "--strategy", "fsdp2"))[1][-1]
    )


def test_the_options_that_the_file_for_ray_train_adds_are_taken(launch):
    source = (ROOT / "recipes/launch/ray_train.py").read_text("utf8")
    added = json.loads("[" + source.split('"words": [*words, ')[1].split("]")[0] + "]")
    code, lines, _ = launch("--ranks", "2", *added)
    assert code == 0, lines


@pytest.mark.parametrize(
    "words, says",
    [
        ("--nodes 2", "--nodes 2: give the name or address of machine 0, on every machine: --host"),
        ("--nodes 2 --host a", "--nodes 2: give each machine its number, from --node 0 (a) to"),
        ("--nodes 2 --host a --node 2", "--node 2: with --nodes 2, the last is --node 1"),
        ("--node 0", "--node 0: give the number of machines too: --nodes 2"),
        ("--host a", "--host a: give the number of machines too: --nodes 2"),
        ("--strategy fsdp", "--strategy: 'fsdp'; did you mean 'fsdp2'?"),
        ("--ranks 9999", "--ranks=9999: on the CPU of this machine, give at most"),
        ("--resume --overwrite", "--resume needs what --overwrite removes"),
        ("train.batch_sise=2", "did you mean 'batch_size'?"),
    ],
)
def test_a_contradiction_is_one_line_with_its_cure(launch, words, says):
    code, lines, command = launch(*shlex.split(words))
    errors = [line for line in lines if not line.startswith("launch: ")]
    assert (code, len(errors), command) == (2, 1, []) and says in errors[0], lines
    assert "ACCELERATE_USE_DEEPSPEED" not in os.environ


def test_a_strategy_that_is_left_in_the_environment_is_refused(launch, monkeypatch):
    """accelerate would take it in place of the strategy that was asked for."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    code, lines, _ = launch("--ranks", "2")
    assert code == 2 and "unset ACCELERATE_USE_FSDP, or give --strategy fsdp2" in lines[-1]
    code, lines, command = launch("--ranks", "2", "--strategy", "fsdp2")
    assert code == 0 and command


def test_a_slurm_step_fills_in_the_machines(launch, monkeypatch):
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    code, lines, _ = launch("--ranks", "2")
    assert lines[0] == "launch: Slurm job 70123: this step has 2 machines; the first is localhost"
    assert "machine 1 of 2, numbered from 0; machine 0 is localhost, port 20123" in lines[1]
    assert "--num_processes 4 --num_machines 2 --machine_rank 1" in lines[2]
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "16")
    code, lines, _ = launch()
    assert code == 2 and "srun starts 16 tasks on 2 machines" in lines[-1]
    assert lines[-1].endswith("srun --ntasks-per-node=1")
    monkeypatch.delenv("SLURM_STEP_NUM_NODES")
    code, lines, _ = launch()
    assert code == 2 and "Slurm job 70123 has 2 machines, and this command runs on one" in lines[-1]
    # A job of one machine needs no step.
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    assert "--num_machines" not in launch("--ranks", "2")[1][-1]


@pytest.mark.parametrize(
    "names, first",
    [
        ("node7", "node7"),
        ("node[01-04,7],x3", "node01"),
        ("gpu-[10,12]", "gpu-10"),
        ("rack[2-3]n[1-4]-ib", "rack2n1-ib"),
        ("a,b[1-2]", "a"),
    ],
)
def test_the_first_host_of_slurms_list(names, first):
    assert first_host(names) == first


def test_accelerates_default_file_decides_where_nothing_is_asked(launch, tmp_path, recipe):
    file = tmp_path / "home/accelerate/default_config.yaml"
    file.parent.mkdir(parents=True)
    text = (ROOT / "recipes/accelerate/cpu2.yaml").read_text()
    file.write_text(text)
    _, lines, _ = launch()
    assert lines == [
        f"launch: {file} decides; --ranks or --strategy replaces it",
        f"accelerate launch -m plugsft {recipe}",
    ]
    assert "cpu2.yaml --num_processes 2" in launch("--ranks", "2")[1][-1]
    file.write_text(text.replace("mixed_precision: 'no'", "mixed_precision: bf16"))
    code, lines, command = launch()
    assert (code, command) == (2, []) and f"{file} sets mixed_precision = bf16" in lines[-1]
    assert launch("model.dtype=bfloat16")[2]


@pytest.mark.parametrize("variables", [{}, {"HF_HOME": "~/hub"}, {"XDG_CACHE_HOME": "/cache"}])
def test_accelerate_looks_for_its_default_file_in_the_same_place(monkeypatch, variables):
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    accelerate = runpy.run_path(config_args.__file__, run_name=config_args.__name__)
    assert default_launch_file() == Path(accelerate["default_config_file"])


def test_under_torchrun_options_of_the_launch_are_refused(launch, monkeypatch):
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    code, lines, command = launch("--ranks", "2")
    assert (code, command) == (2, [])
    assert lines == [
        "error: --ranks 2: a launcher has started this process as rank 0 of 2; leave --ranks out"
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_of_torchrun_has_the_settings_of_accelerates_ranks(strategy):
    file = ROOT / f"recipes/accelerate/{STRATEGIES[strategy]}"
    words = ("--config_file", str(file), "--num_processes", "2", "-m", "plugsft")
    theirs = {
        name: value
        for name, value in _launch_environment(words).items()
        if name.startswith(("FSDP_", "ACCELERATE_USE_", "ACCELERATE_DEEP", "ACCELERATE_GRAD"))
    }
    ours = launch_ranks.settings_of(strategy)
    assert ours.items() <= theirs.items()
    # accelerate adds the defaults of the first FSDP.
    assert strategy == "fsdp2" or ours == theirs
    assert not ours or {"FSDP_VERSION", "ACCELERATE_DEEPSPEED_ZERO_STAGE"} & {*ours}
