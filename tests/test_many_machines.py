"""Two machines, as two of torchrun's agents with two ranks each: one is lost, the run goes on."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from agents import free_port, start_nodes
from conftest import ROOT, chats, only_full, read_metrics, wait_for
from plugin_packages import activate, install

from plugsft.ranks.failures import connect_store, store_key

TRAIN = {"batch_size": 8, "micro_batch": 2, "steps": 30, "learning_rate": 1e-3}
"""Time in which the other machines end, as docs/many_gpus.md promises."""
# Prepares until a node is killed; waits for a node's next beat for 2 seconds, not for 30.
SLOW = """
    import time
    from pathlib import Path

    from plugsft.ranks import failures

    failures.SILENT = 5.0

    @plugin()
    class Slow:
        folder: str

        @hookimpl(wrapper=True)
        def render(self):
            Path(self.folder, "begun").touch()
            while not Path(self.folder, "killed").exists():
                time.sleep(0.1)
            return (yield)
"""
SLOW_STEP = """
    import time
    from pathlib import Path

    @plugin()
    class Slow:
        folder: str
        seconds: float

        @hookimpl(wrapper=True)
        def step(self):
            Path(self.folder, "begun").touch()
            time.sleep(self.seconds)
            return (yield)
"""


def curve(run):
    return [(line["step"], line["loss"], line["grad_norm"]) for line in read_metrics(run)]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, pytest.param(0, marks=only_full)])
def test_a_lost_machine_ends_the_others_and_the_rerun_is_exact(tiny, tmp_path, lost):
    recipe = tiny(rows=chats(45), train=TRAIN, checkpoint={"every": 5})
    whole, run = tmp_path / "whole", tmp_path / "run"
    for node in start_nodes(recipe, f"output={whole}"):
        code, output = node.wait()
        assert code == 0, output
    words = (recipe, f"output={run}", "--resume-auto")
    nodes = start_nodes(*words)
    wait_for(lambda: [*(run / "checkpoints").glob("step-*")], nodes)
    nodes[lost].kill()
    code, output = nodes[1 - lost].wait()
    assert code == 1, output
    assert "error: another rank has ended [127.0.0.1]; see" in output
    assert f"Resume with --resume ({run})" in output
    outputs = []
    for node in start_nodes(*words):
        code, output = node.wait()
        assert code == 0, output
        outputs.append(output)
    assert "going on after step" in outputs[0] and "DDP of 4" in outputs[0]
    assert curve(run) == curve(whole) and len(curve(run)) == TRAIN["steps"]
    weights = [folder / "model/model.safetensors" for folder in (run, whole)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, pytest.param(0, marks=only_full)])
def test_a_machine_lost_while_data_is_prepared_ends_the_others(tiny, tmp_path, monkeypatch, lost):
    activate(install(tmp_path / "site", slow=SLOW), monkeypatch)
    nodes = start_nodes(tiny(plugins={"slow": {"folder": str(tmp_path)}}), ranks=1)
    wait_for((tmp_path / "begun").exists, nodes)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(nodes[0].port))
    beats = connect_store()
    wait_for(lambda: beats.check([store_key(f"beat-{node}") for node in (0, 1)]), nodes)
    nodes[lost].kill()
    (tmp_path / "killed").touch()
    code, output = nodes[1 - lost].wait()
    assert code == 1 and f"error: machine {lost} has ended, before step 1" in output, output
    assert "step 1/" not in output


FAILS_EARLY = """
    import os

    @plugin()
    class Fails:
        @hookimpl(wrapper=True)
        def cache(self):
            if os.environ["RANK"] == "1":
                raise RuntimeError("boom before the group")
            return (yield)
"""


@pytest.mark.slow
def test_a_rank_that_fails_before_the_group_ends_those_of_other_machines(
    tiny, tmp_path, monkeypatch
):
    activate(install(tmp_path / "site", fails=FAILS_EARLY), monkeypatch)
    nodes = start_nodes(tiny(plugins={"fails": {}}), ranks=1)
    outputs = [node.wait() for node in nodes]
    assert [code for code, _ in outputs] == [1, 1], outputs
    assert "error: rank 1 failed: RuntimeError: boom before the group" in outputs[0][1], outputs
    assert "step 1/" not in outputs[0][1]


class Machine:
    """A command of the documentation, as a machine runs it."""

    def __init__(self, words, output, **variables):
        self.output = output
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = os.environ | {"OMP_NUM_THREADS": "1", "PATH": path} | variables
        with output.open("w") as file:
            self.process = subprocess.Popen(
                list(map(str, words)), env=env, cwd=ROOT, stdout=file, stderr=file
            )

    def kill(self):
        """Kill its processes at once; each rank is a process group of its own."""
        if self.process.poll() is None:
            launcher = psutil.Process(self.process.pid)
            for process in [launcher, *launcher.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.wait()

    def wait(self, timeout=300):
        try:
            return self.process.wait(timeout), self.output.read_text()
        except subprocess.TimeoutExpired:
            raise TimeoutError(self.output.read_text()) from None


@pytest.fixture
def machines(tmp_path):
    """Give `machines(*words, **variables)`, which starts a machine; all end with the test."""
    started = []

    def start(*words, **variables):
        started.append(Machine(words, tmp_path / f"output-{len(started)}", **variables))
        return started[-1]

    yield start
    for machine in started:
        machine.kill()


def wait_for_checkpoint(run, started):
    while not [*(run / "checkpoints").glob("step-*")]:
        assert all(machine.process.poll() is None for machine in started), started[0].wait(1)
        time.sleep(0.02)


@pytest.fixture
def endless(tiny):
    """Return a recipe that runs until it is stopped."""
    train = TRAIN | {"steps": 9000}
    return tiny(rows=chats(9), device="cpu", train=train, checkpoint={"every": 5})


def test_a_launch_ends_with_the_exit_code_of_its_run(endless, tmp_path, machines):
    words = ("plugsft", "launch", endless, "--ranks", 2)
    running = machines("nohup", *words)
    wait_for_checkpoint(tmp_path / "run", [running])
    running.process.send_signal(signal.SIGHUP)  # as at a logout
    time.sleep(1)
    running.process.terminate()
    code, output = running.wait()
    assert code == 143 and "stopped by SIGTERM after step" in output, output
    refused, said = machines(*words).wait()
    assert refused == 2 and "resume with --resume, start again with --overwrite" in said, said
    assert "Traceback" not in output + said


@pytest.fixture
def slow(tiny, tmp_path, monkeypatch):
    """Give `slow(seconds)`: a recipe whose steps take that long; each writes the file "begun"."""
    activate(install(tmp_path, slow=SLOW_STEP), monkeypatch)

    def make(seconds):
        plugins = {"slow": {"folder": str(tmp_path), "seconds": seconds}}
        train = TRAIN | {"micro_batch": 8}
        return tiny(rows=chats(9), device="cpu", train=train, plugins=plugins)

    return make


@only_full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_single_process_of_accelerates_file_saves_too(slow, tmp_path, machines, number):
    file = tmp_path / "home/accelerate/default_config.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("distributed_type: 'NO'\nnum_processes: 1\nuse_cpu: true\n")
    running = machines("plugsft", "launch", slow(8), HF_HOME=str(tmp_path / "home"))
    wait_for((tmp_path / "begun").exists)
    running.process.send_signal(number)
    code, output = running.wait()
    assert code == 128 + number and f"stopped by {number.name} after step 1" in output, output
    assert f"{file} decides" in output and "Traceback" not in output


@only_full
def test_a_step_may_take_longer_than_the_launchers_own_patience(slow, tmp_path, machines):
    running = machines("plugsft", "launch", slow(40), "--ranks", 2)
    wait_for((tmp_path / "begun").exists)
    running.process.terminate()
    code, output = running.wait()
    assert code == 143 and "stopped by SIGTERM after step 1: saved" in output, output


@only_full
def test_a_killed_rank_is_named(endless, tmp_path, machines):
    running = machines("plugsft", "launch", endless, "--ranks", 2)
    wait_for_checkpoint(tmp_path / "run", [running])
    psutil.Process(running.process.pid).children()[1].kill()
    code, output = running.wait()
    assert code == 137 and "was ended by SIGKILL; the kernel does so when" in output, output


@only_full
def test_a_machine_of_plugsft_launch_is_killed(tiny, tmp_path, machines):
    recipe = tiny(
        rows=chats(45), device="cpu", train=TRAIN | {"steps": 3000}, checkpoint={"every": 5}
    )
    words = ("launch", recipe, "--ranks", 2, "--nodes", 2, "--host", "127.0.0.1")
    port = free_port()
    started = [machines("plugsft", *words, "--port", port, "--node", node) for node in (0, 1)]
    wait_for_checkpoint(tmp_path / "run", started)
    started[1].kill()
    code, output = started[0].wait()
    assert code == 1, output
    assert "error: another rank has ended [127.0.0.1]; see" in output
    assert "machine 0 of 2, numbered from 0; machine 0 is 127.0.0.1" in output


@only_full
def test_a_machine_of_the_torchrun_file_is_killed_and_both_start_again(tiny, tmp_path, machines):
    recipe = tiny(rows=chats(45), device="cpu", train=TRAIN, checkpoint={"every": 5})
    whole, run = tmp_path / "whole", tmp_path / "run"
    for node in start_nodes(recipe, f"output={whole}"):
        code, output = node.wait()
        assert code == 0, output
    words = ("bash", ROOT / "recipes/launch/torchrun.sh", recipe, f"output={run}")
    settings = {"NODES": "2", "HOST": "127.0.0.1", "RANKS": "2", "PORT": str(free_port())}
    started = [machines(*words, **settings) for _ in range(2)]
    wait_for_checkpoint(run, started)
    started[1].kill()
    code, output = started[0].wait()
    assert code == 1, output
    settings["PORT"] = str(free_port())
    outputs = [machine.wait() for machine in [machines(*words, **settings) for _ in range(2)]]
    assert [code for code, _ in outputs] == [0, 0], outputs
    assert any("going on after step" in output for _, output in outputs)
    assert curve(run) == curve(whole) and len(curve(run)) == TRAIN["steps"]
