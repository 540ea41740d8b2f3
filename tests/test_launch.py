"""Real launches by accelerate with our files, and launches that would mislead."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
import yaml
from conftest import (
    FULL,
    ROOT,
    chats,
    only_full,
    read_metrics,
    run_launch,
    run_plugsft,
    tiny_tables,
    write_recipe,
)
from launching import TRAIN, config, curve, finish, launch
from plugin_packages import activate, install

from plugsft.base.atomic import HOST_ID, damage, is_alive
from plugsft.output.folder import is_locked
from plugsft.recipe.read import read

EVAL = {"every": 2, "split": "train[:5]"}
QUIET = ("--num_machines", 1, "--mixed_precision", "no", "--dynamo_backend", "no")


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("cpu2", marks=only_full), "fsdp2", "zero3"])
def test_ranks_learn_what_one_process_learns(tiny, tmp_path, name):
    """Packed global batches of varying sizes, with clipping at work, and tied embeddings."""
    recipe = tiny(
        rows=chats(45),
        train=TRAIN | {"micro_batch": 1, "steps": 20},
        eval={"every": 5, "split": "train[:5]"},
        plugins={"bfd_packing": {"capacity": 60, "overlong": "truncate"}},
    )
    alone = run_plugsft(recipe, f"output={tmp_path / 'alone'}")
    assert alone.returncode == 0, alone.stderr
    norms = [line["grad_norm"] for line in read_metrics(tmp_path / "alone") if "loss" in line]
    assert min(norms) > 2 * TRAIN["max_grad_norm"], "all of them are clipped"
    run = tmp_path / name
    in_yaml = tmp_path / "recipe.yaml"  # the same recipe in another format
    in_yaml.write_text(yaml.safe_dump(read(recipe)))
    words = (*config(name), "-m", "plugsft", in_yaml, f"output={run}")
    # As a user does it, which takes its time; by default forks do.
    code, out, err = finish(launch(*words)) if FULL else run_launch(*words)
    assert code == 0, err
    assert curve(run) == pytest.approx(curve(tmp_path / "alone"), rel=1e-5)
    record = json.loads((run / "run.json").read_text())
    kind = {"cpu2": "DDP", "fsdp2": "FSDP2", "zero3": "ZeRO-3"}[name]
    assert (record["machine"]["launcher"], record["machine"]["ranks"]) == (kind, 2)
    # Only the main process speaks: each line stands once.
    lines = [line for line in out.splitlines() if line.startswith(("data:", "model:", "step "))]
    assert len(lines) == len(set(lines)) > 10
    answer = run_plugsft("chat", run, "--ask", "hello", "--max-tokens", "3")
    assert answer.returncode == 0, answer.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "first, then", [("fsdp2", "zero3"), pytest.param("zero3", None, marks=only_full)]
)
def test_any_kind_goes_on_from_the_checkpoint_of_another(tiny, tmp_path, first, then):
    """Sharded by rows on two ranks, by numbers on two, or not at all: one kind of checkpoint."""
    recipe = tiny(rows=chats(21), train=TRAIN, checkpoint={"every": 3}, eval=EVAL)
    assert run_plugsft(recipe, f"output={tmp_path / 'alone'}").returncode == 0
    run = tmp_path / "sharded"
    words = ("-m", "plugsft", recipe, f"output={run}")
    code, _, err = run_launch(*config(first), *words)
    assert code == 0, err
    for step in (6, 7):
        shutil.rmtree(run / f"checkpoints/step-{step:06d}")
    assert len(list((run / "checkpoints/step-000003").glob("rank-*"))) == 2
    if then is None:
        done = run_plugsft(recipe, f"output={run}", "--resume")
        code, out, err = done.returncode, done.stdout, done.stderr
    else:
        code, out, err = run_launch(*config(then), *words, "--resume")
    assert code == 0, err
    assert "going on after step 3" in out
    assert curve(run) == pytest.approx(curve(tmp_path / "alone"), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("fsdp2", marks=only_full), "zero3"])
def test_sharded_runs_resume_bit_for_bit(tiny, tmp_path, kind):
    recipe = tiny(rows=chats(21), train=TRAIN, checkpoint={"every": 4}, eval=EVAL)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    code, _, err = run_launch(*config(kind), "-m", "plugsft", recipe, f"output={whole}")
    assert code == 0, err
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints/step-000007")
    shutil.rmtree(parts / "model")
    words = ("-m", "plugsft", recipe, f"output={parts}", "--resume")
    code, out, err = run_launch(*config(kind), *words)
    assert code == 0, err
    assert "going on after step 4" in out
    assert curve(parts) == curve(whole)
    files = [run / "model/model.safetensors" for run in (whole, parts)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_launch_that_quietly_starts_one_process_is_caught(tiny):
    words = ("--cpu", "--num_processes", 2, *QUIET)
    code, out, err = finish(launch(*words, "-m", "plugsft", tiny()))
    assert code != 0
    assert "asked for several processes and started one" in err and "`plugsft launch`" in err
    assert "step 1" not in out


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, changes, says",
    [
        ("zero3", {"zero_stage: 3": "zero_stage: 2"}, "set it to '3'"),
        (
            "fsdp2",
            {
                "fsdp_offload": "fsdp_activation_checkpointing: true\n  fsdp_offload",
                "num_machines": "dynamo_config: {dynamo_backend: EAGER}\nnum_machines",
            },
            "sets dynamo_backend = EAGER (ACCELERATE_DYNAMO_BACKEND), which [plugins.compile] "
            "decides: set it to 'no'; and fsdp_activation_checkpointing = true "
            "(FSDP_ACTIVATION_CHECKPOINTING), which [plugins.gradient_checkpointing] decides",
        ),
        ("fsdp2", {"fsdp_version: 2": "fsdp_version: 1"}, "fsdp_version = 1"),
    ],
)
def test_what_a_launchers_file_asks_for_is_done_or_refused(tiny, tmp_path, name, changes, says):
    text = (ROOT / f"recipes/accelerate/{name}.yaml").read_text()
    for old, new in changes.items():
        text = text.replace(old, new, 1)
    (tmp_path / "changed.yaml").write_text(text)
    words = ("--config_file", tmp_path / "changed.yaml", "--num_processes", 1)
    code, out, err = run_launch(*words, "-m", "plugsft", tiny())
    assert code != 0 and says in err and "step 1" not in out


def test_two_strangers_become_ranks_of_one_run(tiny, tmp_path):
    """Without ACCELERATE_USE_CPU accelerate brings these up as two runs in one folder."""
    words = ("--multi_gpu", "--num_processes", 2, *QUIET, "--main_process_port", 0)
    code, out, err = run_launch(*words, "-m", "plugsft", tiny(train={"steps": 2}))
    assert code == 0, err
    assert "DDP of 2" in out


@pytest.mark.parametrize("name", ["FSDP", "DEEPSPEED"])
def test_sharding_asked_for_without_ranks_is_caught(tiny, name):
    done = run_plugsft(tiny(), env={f"ACCELERATE_USE_{name}": "true"})
    assert done.returncode == 2, done.stderr
    assert "no launcher started this process" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["cpu2", *(pytest.param(kind, marks=only_full) for kind in ("fsdp2", "zero3"))]
)
def test_a_killed_rank_ends_the_launch_and_the_rerun_goes_on(tiny, tmp_path, name):
    recipe = tiny(rows=chats(21), train=TRAIN | {"steps": 40}, checkpoint={"every": 2})
    alone = run_plugsft(recipe, f"output={tmp_path / 'alone'}", "checkpoint.every=0")
    assert alone.returncode == 0, alone.stderr
    run = tmp_path / "run"
    process = launch(*config(name), "-m", "plugsft", recipe)
    while not list((run / "checkpoints").glob("step-*")):
        assert process.poll() is None
        time.sleep(0.05)
    ranks = subprocess.run(
        ["pgrep", "-f", f"plugsft.*{recipe}"], capture_output=True, text=True
    ).stdout.split()
    os.kill(int(ranks[-1]), signal.SIGKILL)
    code, _, err = finish(process)
    assert code != 0 and "another rank has ended" in err and f"Resume with --resume ({run})" in err
    code, out, err = run_launch(*config(name), "-m", "plugsft", recipe, "--resume")
    assert code == 0, err
    assert "going on after step" in out
    assert curve(run) == pytest.approx(curve(tmp_path / "alone"), rel=1e-4)


def alive(ranks):
    return [pid for pid in ranks if is_alive(pid)]


@pytest.mark.slow
@only_full
@pytest.mark.parametrize("name", ["cpu2", "zero3"])
def test_ranks_end_in_order_when_their_launcher_is_killed(tiny, tmp_path, name):
    recipe = tiny(rows=chats(21), train=TRAIN | {"steps": 10_000, "log_every": 10_000})
    process = launch(*config(name), "-m", "plugsft", recipe)
    run = tmp_path / "run"
    while not (run / "metrics.jsonl").is_file() or not (run / "metrics.jsonl").stat().st_size:
        assert process.poll() is None
        time.sleep(0.05)
    below = psutil.Process(process.pid).children(recursive=True)
    words = {
        one.pid: one.as_dict(["cmdline"])["cmdline"] or [] for one in below if alive([one.pid])
    }
    ranks = [pid for pid in words if str(recipe) in words[pid]]
    assert len(ranks) == 2
    process.kill()
    killed = time.monotonic()
    while alive(ranks) and time.monotonic() - killed < 240:
        time.sleep(0.1)
    left = alive(ranks)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "nobody else would end them"
    assert not is_locked(run)
    record = json.loads((run / "run.json").read_text())
    assert record["status"] == "stopped" and "the end of its launcher" in record["reason"]
    [saved] = (run / "checkpoints").glob("step-*")
    assert damage(saved) is None and saved.name == f"step-{record['steps']['done']:06d}"
    process.communicate()


@only_full
@pytest.mark.slow
def test_a_process_that_a_shell_leaves_behind_goes_on(tiny, tmp_path):
    """Nobody launched it: neither its shell's end nor, under nohup, a hangup stops it."""
    recipe = tiny(rows=chats(21), train=TRAIN | {"steps": 200, "log_every": 200})
    run = tmp_path / "run"
    names = (".model", ".samples.jsonl", "checkpoints/.step-000900")
    left = [run / f"{name}.{HOST_ID}-{2**22 + 1}.tmp" for name in names]
    for folder in left:
        folder.mkdir(parents=True)
    mine = run / ".notes.tmp"
    mine.write_text("a user's")
    os.utime(mine, (0, 0))
    command = shlex.join([sys.executable, "-m", "plugsft", str(recipe)])
    shell = f"nohup {command} > {tmp_path / 'log'} 2>&1 & echo $!"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, cwd=ROOT)
    pid = int(done.stdout)
    while not (run / "metrics.jsonl").is_file() and is_alive(pid):
        time.sleep(0.05)
    os.kill(pid, signal.SIGHUP)
    while is_alive(pid):
        time.sleep(0.1)
    record = json.loads((run / "run.json").read_text())
    assert (record["status"], record["steps"]["done"]) == ("completed", 200), record["reason"]
    assert not any(folder.exists() for folder in left) and mine.exists()


WATCH = """
    import ctypes, os, threading, time
    from pathlib import Path

    def anonymous():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    @plugin(after=["bfd_packing"])
    class Watch:
        '''Note how much memory of its own loading takes a rank at most.'''

        most: int = state(0)
        loaded: int = state(0)
        on: bool = state(True)

        @hookimpl(wrapper=True)
        def optimize_model(self):
            if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
                import deepspeed  # it takes as much memory as this model
            # What is freed goes back at once: only what is held counts.
            M_MMAP_THRESHOLD = -3
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 262144)
            before = anonymous()

            def look():
                while self.on:
                    self.most = max(self.most, anonymous() - before)
                    time.sleep(0.002)

            threading.Thread(target=look, daemon=True).start()
            model = yield
            self.loaded = self.most
            return model

        @hookimpl(wrapper=True)
        def add_columns(self, model):
            self.on = False
            # DeepSpeed makes its float32 copies and buffers in the same breath as it spreads.
            zero = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
            self.most = self.loaded if zero else self.most
            Path(os.environ["WATCHED"] + os.environ["RANK"]).write_text(str(self.most * 1024))
            return (yield)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param("cpu2", marks=only_full), "fsdp2", pytest.param("zero3", marks=only_full)],
)
def test_no_rank_holds_a_whole_model_that_is_sharded(tiny, tmp_path, monkeypatch, name):
    activate(install(tmp_path / "site", watch=WATCH), monkeypatch)
    scratch = {"hidden": 512, "layers": 8, "heads": 8, "vocab": 400, "context": 256}
    recipe = tiny(model={"scratch": scratch}, train={"steps": 1, "batch_size": 2})
    prepared = run_plugsft(recipe, f"output={tmp_path / 'base'}", "train.learning_rate=0.0")
    assert prepared.returncode == 0, prepared.stderr
    model = tmp_path / "base/model"
    size = (model / "model.safetensors").stat().st_size
    tables = {"model": {"path": str(model)}, "plugins": {"watch": {}}}
    tables = tiny_tables(tmp_path, chats(8)) | tables
    tables["train"] |= {"steps": 1}
    recipe = write_recipe(tmp_path / "sharded.toml", tables)
    env = {"WATCHED": str(tmp_path / "rank-")}
    code, _, err = run_launch(*config(name), "-m", "plugsft", recipe, env=env)
    assert code == 0, err
    shares = [int((tmp_path / f"rank-{rank}").read_text()) / size for rank in range(2)]
    print(f"{name}: {shares[0]:.2f} and {shares[1]:.2f} of {size / 2**20:.0f} MiB")
    if name == "cpu2":
        assert min(shares) > 0.9, "what is not sharded is held by every rank: the watch sees it"
    else:
        assert max(shares) < 0.85


SLOW = """
    import os, time
    from datetime import timedelta
    from pathlib import Path
    from torch.distributed import distributed_c10d

    @plugin()
    class Slow:
        folder: str
        rank: str = ""
        seconds: float = 0.0

        @hookimpl
        def check(self):
            # As short as a run's patience would be, against a preparation of hours.
            distributed_c10d.default_pg_timeout = timedelta(seconds=6)
            if os.environ["RANK"] == self.rank:
                time.sleep(9)

        @hookimpl(wrapper=True)
        def render(self):
            with Path(self.folder, f"rank-{os.environ['RANK']}").open("a") as file:
                file.write("slice\\n")
            time.sleep(self.seconds)
            return (yield)
"""


@pytest.fixture
def slow(tmp_path, monkeypatch, tiny):
    """Give `slow(...)`: a recipe with a plugin that notes who prepares, and takes its time."""
    activate(install(tmp_path / "site", slow=SLOW), monkeypatch)
    assert run_plugsft(tiny()).returncode == 0
    tables = tiny_tables(tmp_path, chats(21)) | {"model": {"path": str(tmp_path / "run/model")}}
    tables["train"] |= {"steps": 2}

    def make(**options):
        tables["plugins"] = {"slow": {"folder": str(tmp_path), **options}}
        return write_recipe(tmp_path / "slow.toml", tables)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=only_full)])
def test_one_rank_prepares_for_longer_than_a_process_group_waits(slow, tmp_path, ranks):
    run = tmp_path / f"run-{ranks}"
    recipe = slow(seconds=9.0)
    words = ("-m", "plugsft", recipe, f"output={run}")
    code, out, err = run_launch(*config("cpu2", ranks), *words)
    assert code == 0, err
    assert len(list(tmp_path.glob("rank-*"))) == 1, "all others waited for it"
    assert f"DDP of {ranks}" in out


@only_full
@pytest.mark.slow
def test_a_rank_that_prepares_longer_than_the_others_is_waited_for(slow, tmp_path):
    """As a node does that has a disk of its own, and a slow one."""
    recipe = slow(rank="1")
    code, _, err = finish(
        launch(*config("cpu2"), "-m", "plugsft", recipe, "output=" + str(tmp_path / "skew"))
    )
    assert code == 0, err


@only_full
def test_a_builder_that_is_killed_is_taken_over_by_the_next_launch(slow, tmp_path):
    run = tmp_path / "killed"
    words = (*config("cpu2"), "-m", "plugsft", slow(seconds=5.0), f"output={run}")
    process = launch(*words)
    while not (noted := list(tmp_path.glob("rank-*"))):
        assert process.poll() is None
        time.sleep(0.05)
    claims = list((run / "tokens").glob(".*.claim-*"))
    os.kill(int(claims[0].read_text().split()[1]), signal.SIGKILL)
    assert finish(process)[0] != 0
    code, _, err = finish(launch(*words))
    assert code == 0, err
    assert not [path for path in run.rglob(".*") if path.name != ".plugsft.lock"], noted
