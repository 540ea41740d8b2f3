"""Nodes of a launch, on this machine: torchrun's agents, whose ranks have imported everything."""

import atexit
import os
import signal
import socket
import tempfile
from pathlib import Path

from forks import FORKS, start_fork_server

from plugsft import cli


def free_port():
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Node:
    """A machine of a launch: an agent and its ranks, in a process group of their own."""

    def __init__(self, number, port, words, ranks=2, nodes=2):
        self.port, self.files = port, Path(tempfile.mkdtemp())
        start_fork_server()
        arguments = (number, port, [str(word) for word in words], ranks, nodes, str(self.files))
        self.process = FORKS.Process(target=run_agent, args=arguments)
        self.process.start()
        atexit.register(self.kill)  # after a failed test, Python would wait for the node

    def kill(self):
        """Kill the agent and its ranks at once, as a power cut does."""
        if self.process.is_alive():
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.join()

    def wait(self, timeout=300):
        """Wait for the end; return the exit code and all output."""
        self.process.join(timeout)
        if self.process.is_alive():
            self.kill()
            raise TimeoutError((self.files / "output").read_text())
        return self.process.exitcode, (self.files / "output").read_text()


def start_nodes(*words, ranks=2, nodes=2):
    """Start `plugsft ...` on all ranks of several nodes."""
    port = free_port()
    return [Node(number, port, words, ranks, nodes) for number in range(nodes)]


def run_agent(number, port, words, ranks, nodes, folder):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.setpgid(0, 0)
    os.environ["OMP_NUM_THREADS"] = "1"
    output = os.open(str(Path(folder, "output")), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=ranks,
        rdzv_backend="static",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"rank": number, "timeout": 60},
        run_id="tests",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="fork",
    )
    try:
        elastic_launch(config, run_rank)(words)
    except ChildFailedError:
        os._exit(1)


def run_rank(words):
    from plugsft.base import console

    console.out.quiet = os.environ["RANK"] != "0"
    cli.main(words)
