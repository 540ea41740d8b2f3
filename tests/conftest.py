"""Fixtures and helpers: tiny data, tiny recipes, and real processes."""

import atexit
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing import connection
from pathlib import Path
from typing import Any

# Before torch is imported. Tests are written for processors; processes that they start inherit it.
if os.environ.get("PLUGSFT_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import tomli_w
import torch
from forks import FORK_TRIALS, FORKS, Running, run_fork, start_fork_server

from plugsft import cli
from plugsft.lab import trials

pytest_plugins = ["watch"]
ROOT = Path(__file__).parents[1]
TEXT = "the quick brown fox jumps over a lazy dog while naïve cafés serve 東京 ramen to 12 owls"
FULL = os.environ.get("PLUGSFT_FULL") == "1"
only_full = pytest.mark.skipif(not FULL, reason="only tools/test --full runs it")
# Tests of what calls torch and transformers most closely. tools/test --full runs them once more,
# under the oldest versions that pyproject.toml allows.
OLDEST = {
    "activation_offload", "agree", "bfd_packing", "chat", "cli", "compile", "flash_attention",
    "fp8", "fused_loss", "gpu_interfaces", "gradient_checkpointing", "hf_schedule", "launch",
    "launch_settings", "liger", "loop", "lora", "lora_fused", "model_families", "model_loading",
    "packed_documents", "precision", "private_names", "quantize", "rank_operations", "recipe",
    "selective_checkpointing", "torch_optimizer", "versions",
}  # fmt: skip
# Tests must not use the network.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ.update(OFFLINE)
# Tests must not write to the user's home folder.
os.environ["PLUGSFT_CACHE"] = tempfile.mkdtemp(prefix="plugsft-tests-")
atexit.register(shutil.rmtree, os.environ["PLUGSFT_CACHE"], ignore_errors=True)
# A shell's background job ignores ctrl-C, and a job under nohup ignores SIGHUP; processes that
# tests start would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if worker := os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw"):
    # One core per worker: threads that compete for a core are ten times slower.
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[int(worker) % len(allowed)]})
    torch.set_num_threads(1)  # torch has counted the cores before


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what need not run under the oldest libraries; a path in the command runs."""
    name = collection_path.stem.removeprefix("test_")
    oldest = os.environ.get("PLUGSFT_OLDEST") == "1" and collection_path.suffix == ".py"
    return True if oldest and name not in OLDEST else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the quickstart first: it takes minutes, and would delay the end."""
    items.sort(key=lambda item: item.path.stem != "test_quickstart")
    # Importing the laws of plugins asks for a fork server that has imported less.
    FORKS.set_forkserver_preload(["preloaded"])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start the fork server before a law does: it would not find what to import, without tests/."""
    if "testing" in vars(getattr(item, "module", pytest)):
        start_fork_server()


def chats(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return chats of various lengths."""
    rng = random.Random(seed)

    def make_text(longest: int) -> str:
        return " ".join(rng.choices(TEXT.split(), k=rng.randint(2, longest)))

    rows = []
    for _ in range(count):
        messages = []
        for _ in range(rng.choice([1, 1, 2])):
            messages.append({"role": "user", "content": make_text(8)})
            messages.append({"role": "assistant", "content": make_text(14)})
        rows.append({"messages": messages})
    return rows


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    """Write rows as lines of JSON."""
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf8")
    return path


def tiny_tables(folder: Path, rows: list[Any] | None = None) -> dict[str, Any]:
    """Return the tables of a recipe that trains in a second; its files are in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    data = write_jsonl(folder / "data.jsonl", chats(24) if rows is None else rows)
    return {
        "output": str(folder / "run"),
        "model": {"scratch": {"hidden": 32, "layers": 2, "heads": 2, "vocab": 400, "context": 256}},
        "data": {"source": str(data), "max_length": 256},
        "train": {"batch_size": 8, "micro_batch": 4, "learning_rate": 3e-3, "log_every": 1},
    }


ANSWERS = {
    "What is red?": "Blood and roses.",
    "What is blue, please?": "The sky,\nand the sea.",
    "Who?": "Me.",
    "And what is green, if I may ask?": "Grass and leaves and frogs.",
}


def tables_by_heart(folder: Path, steps: int) -> dict[str, Any]:
    """Return the tables of a recipe that learns the answers by heart."""
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in ANSWERS.items()
    ]
    tables = tiny_tables(folder, rows)
    tables["model"]["scratch"] |= {"hidden": 64, "context": 128}
    tables["data"]["max_length"] = 128
    tables["train"] |= {"batch_size": 4, "steps": steps, "learning_rate": 1e-2}
    return tables


def bare_tables(folder: Path, plugins: dict[str, Any]) -> dict[str, Any]:
    """Return the tables of a recipe that is checked and never run: its files need not exist."""
    return {
        "output": str(folder),
        "device": "cpu",
        "model": {"scratch": {}},
        "data": {"source": "chats.jsonl"},
        "train": {"batch_size": 1, "learning_rate": 0.1},
        "plugins": plugins,
    }


def write_recipe(path: Path, tables: dict[str, Any]) -> Path:
    """Write a recipe."""
    path.write_text(tomli_w.dumps(tables), encoding="utf8")
    return path


@contextmanager
def fork_trials() -> Iterator[None]:
    """Start the trials of tune, plan and bench as forks, which need not import torch."""
    start_fork_server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FORK_TRIALS, "1")
        patch.setattr(trials, "run_process", run_fork)
        yield


@pytest.fixture
def forked_trials() -> Iterator[None]:
    """Start the trials of tune, plan and bench as forks during a test."""
    with fork_trials():
        yield


@cache
def _launch_environment(words: tuple[str, ...]) -> dict[str, str]:
    """Return the variables that `accelerate launch` sets for its ranks."""
    start_fork_server()
    receiver, sender = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=_send_launch_environment, args=(words, sender))
    process.start()
    sender.close()
    environment = receiver.recv()
    process.join()
    return environment


def _send_launch_environment(words: tuple[str, ...], sender: Any) -> None:
    from accelerate.commands import launch
    from torch.distributed import run

    before, environment = dict(os.environ), {}
    run.run = lambda _: environment.update(os.environ)
    launch.launch_command(launch.launch_command_parser().parse_args(words))
    sender.send({name: value for name, value in environment.items() if before.get(name) != value})


def run_launch(
    *words: object, env: dict[str, str] | None = None, timeout: float = 240
) -> tuple[int, str, str]:
    """Run like `accelerate launch WORDS`, with ranks that have imported everything.

    Returns the exit code, and the output of all ranks.
    """
    options = [str(word) for word in words]
    start = options.index("-m")
    count = int(options[options.index("--num_processes") + 1])
    environment = {"OMP_NUM_THREADS": "1", **_launch_environment(tuple(options[: start + 2]))}
    ranks = start_ranks(count, *options[start:], env=environment | (env or {}))
    running, end = list(ranks), time.monotonic() + timeout
    while running and time.monotonic() < end:
        connection.wait([rank.process.sentinel for rank in running], timeout=1)
        running = [rank for rank in ranks if rank.process.exitcode is None]
        if running and any(rank.process.exitcode for rank in ranks):
            end = min(end, time.monotonic() + 15)
    for rank in running:
        rank.process.terminate()
    results = [rank.wait(20) for rank in ranks]
    out, err = ("".join(getattr(rank, name) for rank in results) for name in ("stdout", "stderr"))
    return next((rank.returncode for rank in results if rank.returncode), 0), out, err


def start_plugsft(
    *arguments: object, env: dict[str, str] | None = None, cwd: Path | None = None, typed: str = ""
) -> Running:
    """Start `plugsft ...` as a separate process, which reads what is typed."""
    return Running(arguments, env or {}, cwd or ROOT, typed)


def run_plugsft(
    *arguments: object,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 300,
    typed: str = "",
) -> "subprocess.CompletedProcess[str]":
    """Run `plugsft ...` as a separate process, which reads what is typed."""
    return start_plugsft(*arguments, env=env, cwd=cwd, typed=typed).wait(timeout)


def run_here(*words: object) -> int:
    """Run `plugsft ...` in this process; return its exit code."""
    try:
        cli.main([str(word) for word in words])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def must_succeed(*arguments: object, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run `plugsft ...` like run_plugsft, without an error."""
    result = run_plugsft(*arguments, **options)
    assert result.returncode == 0, result.stderr
    return result


def start_ranks(
    count: int,
    *arguments: object,
    env: dict[str, str] | None = None,
    words: list[tuple[object, ...]] | None = None,
) -> list[Running]:
    """Start `plugsft ...` on several ranks, with the environment that torchrun sets.

    `words` are the arguments of each rank, if they differ.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        **(env or {}),
    }
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), **common} for rank in range(count)]
    rank_arguments = words or [arguments] * count
    return [
        start_plugsft(*rank_arguments[rank], env=variables) for rank, variables in enumerate(ranks)
    ]


def run_ranks(
    count: int, *arguments: object, env: dict[str, str] | None = None, timeout: float = 300
) -> "subprocess.CompletedProcess[str]":
    """Run `plugsft ...` on several ranks; return the result of rank 0."""
    results = [rank.wait(timeout) for rank in start_ranks(count, *arguments, env=env)]
    assert len({rank.returncode for rank in results}) == 1, [rank.stderr for rank in results]
    return results[0]


def wait_for(condition: Callable[[], Any], nodes: Iterable[Any] = (), seconds: float = 240) -> Any:
    """Wait until a condition is true, while no node ends; return its value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end
        for node in nodes:
            assert node.process.is_alive(), node.wait(1)
        time.sleep(0.01)
    return value


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Read a run's training metrics."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def read_record(run: Path) -> Any:
    """Read what a run notes of itself."""
    return json.loads((run / "run.json").read_text())


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Path]:
    """Return `tiny(train={"steps": 3}, ...)`, which writes a tiny recipe with these tables."""

    def make(rows: list[Any] | None = None, **tables: Any) -> Path:
        merged = tiny_tables(tmp_path, rows)
        for name, table in tables.items():
            if isinstance(table, dict) and isinstance(merged.get(name), dict):
                merged[name] = {**merged[name], **table}
            else:
                merged[name] = table
        return write_recipe(tmp_path / "recipe.toml", merged)

    return make


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the cache's token folder, which does not exist yet."""
    monkeypatch.setenv("PLUGSFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/tokens"


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Mount a disk of one mebibyte, or of the size that a test is parametrized with."""
    folder = tmp_path / "disk"
    folder.mkdir()
    size = getattr(request, "param", "1m")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
