"""Train on a Ray cluster: each worker of Ray Train runs `plugsft launch` as one rank.

    python recipes/launch/ray_train.py my.toml --workers 16
    python recipes/launch/ray_train.py my.toml --workers 16 --strategy fsdp2
    python recipes/launch/ray_train.py my.toml --workers 2 --cpu       # without GPUs

It runs on a node of the cluster (`ray start`), or starts a cluster of this machine alone. Recipe,
data, model and output must lie on a file system that all nodes share. `pip install 'plugsft[ray]'`
"""

import argparse
import os
import socket
import subprocess
import sys
from typing import Any

import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchTrainer


def train_rank(settings: dict[str, Any]) -> None:
    """Run plugsft as the rank that Ray Train has made of this worker."""
    # Ray's process group has only to agree on a free port: plugsft prepares the data before it
    # creates its own group.
    address = [None]
    if dist.get_rank() == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            address = [probe.getsockname()[1]]
    dist.broadcast_object_list(address, src=0)
    dist.destroy_process_group()
    context = get_context()
    environment = {
        "RANK": context.get_world_rank(),
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "MASTER_PORT": address[0],  # Ray Train has set MASTER_ADDR
    }
    subprocess.run(
        [sys.executable, "-m", "plugsft", "launch", *settings["words"]],
        env=os.environ | {name: str(value) for name, value in environment.items()},
        cwd=settings["folder"],
        check=True,
    )


def main() -> None:
    """Start the workers, and wait for the end."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, required=True, help="ranks: one for each GPU")
    parser.add_argument("--cpu", action="store_true", help="train without GPUs")
    parser.add_argument("--restarts", type=int, default=0, help="starts after a lost worker")
    options, words = parser.parse_known_args()
    # After a restart, the run resumes from its last checkpoint.
    settings = {"words": [*words, "--resume-auto"], "folder": os.getcwd()}
    trainer = TorchTrainer(
        train_rank,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=not options.cpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=options.restarts)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
