"""This machine's place in a Slurm job, from the variables that Slurm sets."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..base.console import format_count
from ..base.errors import LaunchError
from ..base.machine import env_number


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

    def __str__(self) -> str:
        gpus = f", {format_count(self.gpus, 'GPU')} each" if self.gpus else ""
        machines = format_count(self.nodes, "machine")
        return f"Slurm job {self.job}: this step has {machines}{gpus}; the first is {self.host}"


def slurm_step(environment: Mapping[str, str]) -> Slurm | None:
    """Return the Slurm step of this process; None outside of Slurm.

    Refuses a job of several nodes outside of `srun`, and several tasks on a node: one would wait
    for ever, the other would start all ranks more than once.
    """
    job = environment.get("SLURM_JOB_ID", "")
    if not job.isdigit():
        return None
    if "SLURM_STEP_NUM_NODES" not in environment:
        machines = env_number("SLURM_JOB_NUM_NODES", 1, 1, environment)
        if machines > 1:
            raise LaunchError(
                f"Slurm job {job} has {machines} machines, and this command runs on one of them; "
                "start it on all: srun --ntasks-per-node=1 plugsft launch ..."
            )
        return None
    nodes = env_number("SLURM_STEP_NUM_NODES", 1, 1, environment)
    tasks = env_number("SLURM_STEP_NUM_TASKS", nodes, 1, environment)
    if tasks > nodes:
        raise LaunchError(
            f"srun starts {tasks} tasks on {format_count(nodes, 'machine')}; plugsft launch "
            "starts the ranks itself: srun --ntasks-per-node=1"
        )
    gpus = environment.get("SLURM_GPUS_ON_NODE", "0")
    return Slurm(
        int(job),
        nodes,
        env_number("SLURM_NODEID", environment=environment),
        first_host(environment.get("SLURM_STEP_NODELIST", "localhost")),
        int(gpus) if gpus.isdigit() else 0,
    )


def first_host(names: str) -> str:
    """Return the first host of Slurm's short list, as in "node[01-04,7],x3"."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", names).partition(",")[0]
