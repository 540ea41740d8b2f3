"""Choose the ranks of `plugsft launch`, from its options and from Slurm, and start them."""

import os
import re
import shlex
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

import torch
from accelerate.commands.config.config_args import load_config_from_file

from ..base.console import format_count, say
from ..base.errors import LaunchError, choices
from ..base.launch_files import STRATEGIES, Layout, launch_file
from ..base.machine import SWITCHES, child_environment, env_number, not_installed
from ..recipe.tables import Recipe
from .launch_file import default_launch_file, ensure_launch_file

PORT = 29500
"""Default port of node 0, as torchrun's."""
MOST_ON_CPU = 8
"""Ranks that any CPU takes; each is a process with its own model."""


@dataclass(frozen=True)
class Options:
    """The options of the command; None where the user has not set one."""

    ranks: int | None = None
    strategy: str | None = None
    nodes: int | None = None
    node: int | None = None
    host: str | None = None
    port: int | None = None


@dataclass(frozen=True)
class Slurm:
    """The step of a Slurm job that started this process."""

    job: int
    nodes: int
    node: int
    """This machine's number."""
    host: str
    """The name of machine 0."""
    gpus: int
    """GPUs of this machine; 0 if Slurm names none."""


def is_rank() -> bool:
    """Whether torchrun, or another launcher, has started this process as a rank."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def join(options: Options) -> None:
    """Take part as the rank that a launcher has made of this process."""
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    for name, value in asdict(options).items():
        if value is not None and name != "strategy":
            raise LaunchError(
                f"--{name} {value}: a launcher has started this process as rank {rank} of {size}; "
                f"leave --{name} out"
            )
    if rank == "0":
        say(f"launch: a launcher has started {size} ranks; this one joins as rank 0")
    if options.strategy:
        ensure_strategy(options.strategy)
        os.environ |= settings_of(options.strategy)


def launch_ranks(recipe: Recipe, words: list[str], options: Options) -> NoReturn:
    """Print the line that trains a recipe, and run it in place of this process."""
    slurm = slurm_step()
    several = slurm is not None and slurm.nodes > 1
    file = default_launch_file()
    if not several and options == Options() and file.is_file():
        say(f"launch: {file} decides; --ranks or --strategy replaces it")
        ensure_launch_file(file, recipe)
        _execute(["accelerate", "launch", "-m", "plugsft", *words])
    layout = layout_of(recipe, options, slurm)
    ensure_no_other_strategy(layout.strategy)
    if layout.nodes > 1:
        say(
            f"launch: machine {layout.node} of {layout.nodes}, numbered from 0; machine 0 is "
            f"{layout.host}, port {layout.port}"
        )
    if layout.ranks * layout.nodes == 1 and layout.strategy == "ddp":
        _execute(["plugsft", *words])
    _execute(["accelerate", "launch", *layout.options(), "-m", "plugsft", *words])


def layout_of(recipe: Recipe, options: Options, slurm: Slurm | None) -> Layout:
    """Lay out the ranks that the options ask for; Slurm and the GPUs fill in the rest."""
    strategy = options.strategy or "ddp"
    ensure_strategy(strategy)
    gpus = 0 if recipe.device == "cpu" else torch.cuda.device_count()
    if slurm and recipe.device != "cpu":
        gpus = slurm.gpus or gpus
    ranks = options.ranks or gpus or 1
    if not options.ranks:
        where = f"one for each of {format_count(gpus, 'GPU')}" if gpus else "no GPU is used"
        say(f"launch: {format_count(ranks, 'rank')}, {where}; --ranks changes that")
    layout = Layout(ranks, strategy, on_cpu(recipe, ranks, "--ranks"))
    if slurm and (options.nodes, options.node, options.host) == (None, None, None):
        machines = format_count(slurm.nodes, "machine")
        say(f"launch: Slurm job {slurm.job}: this step has {machines}; the first is {slurm.host}")
        # Two jobs may run on one machine.
        port = options.port or 20_000 + slurm.job % 10_000
        return replace(layout, nodes=slurm.nodes, node=slurm.node, host=slurm.host, port=port)
    for name in ("node", "host", "port"):
        if options.nodes is None and (value := getattr(options, name)) is not None:
            raise LaunchError(f"--{name} {value}: give the number of machines too: --nodes 2")
    if options.nodes is None or options.nodes == 1:
        return layout
    return _on_machines(layout, options, options.nodes)


def _on_machines(layout: Layout, options: Options, nodes: int) -> Layout:
    """Lay the ranks out on several machines; refuse options that would let them wait for ever."""
    last = nodes - 1
    if not options.host:
        raise LaunchError(
            f"--nodes {nodes}: give the name or address of machine 0, on every machine: --host HOST"
        )
    if options.node is None:
        raise LaunchError(
            f"--nodes {nodes}: give each machine its number, from --node 0 ({options.host}) to "
            f"--node {last}"
        )
    if options.node > last:
        raise LaunchError(f"--node {options.node}: with --nodes {nodes}, the last is --node {last}")
    port = options.port or PORT
    return replace(layout, nodes=nodes, node=options.node, host=options.host, port=port)


def ensure_strategy(strategy: str) -> None:
    """Refuse a strategy that does not exist, or is not installed."""
    if strategy not in STRATEGIES:
        hint = choices(strategy, STRATEGIES, "choose one of")
        raise LaunchError(f"--strategy: '{strategy}'{hint}")
    if strategy == "zero3" and (missing := not_installed("deepspeed", "deepspeed")):
        raise LaunchError(f"--strategy zero3: {missing}")


def on_cpu(recipe: Recipe, ranks: int, option: str) -> bool:
    """Whether ranks run on the CPU; refuse more ranks than GPUs."""
    if recipe.device == "cpu" or not torch.cuda.is_available():
        if ranks > (most := max(MOST_ON_CPU, os.cpu_count() or 1)):
            raise LaunchError(f"{option}={ranks}: on the CPU of this machine, give at most {most}")
        return True
    if ranks > (gpus := torch.cuda.device_count()):
        raise LaunchError(f"{option}={ranks}: each rank needs a GPU; give at most {gpus}")
    return False


def ensure_no_other_strategy(strategy: str) -> None:
    """Refuse a strategy that another launch left in the environment: accelerate would take it."""
    for other, name in SWITCHES.items():
        if other != strategy and os.environ.get(name, "").lower() in ("1", "true"):
            raise LaunchError(
                f"--strategy {strategy}: the environment has {name}={os.environ[name]}, which "
                f"means {other}: unset {name}, or give --strategy {other}"
            )


def settings_of(strategy: str) -> dict[str, str]:
    """Set a strategy by variables, as `accelerate launch` does for ranks that it starts itself."""
    if strategy not in SWITCHES:
        return {}
    file: Any = load_config_from_file(str(launch_file(STRATEGIES[strategy])))
    variables = {SWITCHES[strategy]: "true"}
    for key, value in file.fsdp_config.items():
        variables[key.upper()] = _text(value)
    for key, value in file.deepspeed_config.items():
        name = "" if key == "gradient_accumulation_steps" else "DEEPSPEED_"
        name += key.removeprefix("deepspeed_").removesuffix("_flag")
        variables[f"ACCELERATE_{name.upper()}"] = _text(value)
    return variables


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _execute(command: list[str]) -> NoReturn:
    """Print a command and run it in place of this process."""
    say(shlex.join(command))
    module, *arguments = command
    if module == "accelerate":
        module, arguments = "plugsft.start.run_accelerate", arguments[1:]
    sys.stdout.flush()
    command = [sys.executable, "-m", module, *arguments]
    os.execve(sys.executable, command, child_environment())


def slurm_step() -> Slurm | None:
    """Read the Slurm step of this process; None outside of Slurm.

    Refuses a job of several nodes outside of `srun`, and several tasks on a node: one would wait
    for ever, the other would start all ranks more than once.
    """
    job, gpus = (os.environ.get(f"SLURM_{name}", "") for name in ("JOB_ID", "GPUS_ON_NODE"))
    if not job.isdigit():
        return None
    if "SLURM_STEP_NUM_NODES" not in os.environ:
        machines = env_number("SLURM_JOB_NUM_NODES", 1, 1)
        if machines > 1:
            raise LaunchError(
                f"Slurm job {job} has {machines} machines, and this command runs on one of them; "
                "start it on all: srun --ntasks-per-node=1 plugsft launch ..."
            )
        return None
    nodes = env_number("SLURM_STEP_NUM_NODES", 1, 1)
    tasks = env_number("SLURM_STEP_NUM_TASKS", nodes, 1)
    if tasks > nodes:
        raise LaunchError(
            f"srun starts {tasks} tasks on {format_count(nodes, 'machine')}; plugsft launch "
            "starts the ranks itself: srun --ntasks-per-node=1"
        )
    host = first_host(os.environ.get("SLURM_STEP_NODELIST", "localhost"))
    node = env_number("SLURM_NODEID")
    return Slurm(int(job), nodes, node, host, int(gpus) if gpus.isdigit() else 0)


def first_host(names: str) -> str:
    """Find the first host in Slurm's short list, as in "node[01-04,7],x3"."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", names).partition(",")[0]
