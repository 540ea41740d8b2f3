"""The launch files that travel with plugsft, and the options that use them."""

import re
from dataclasses import dataclass
from pathlib import Path

STRATEGIES = {"ddp": "gpu8.yaml", "fsdp2": "fsdp2.yaml", "zero3": "zero3.yaml"}
"""Strategy, as `plugsft launch` calls it -> its file in recipes/accelerate/."""
ON_CPU = "cpu2.yaml"
"""The same for DDP on CPUs, where accelerate needs other settings."""


@dataclass(frozen=True)
class Layout:
    """The ranks of a launch: their number, nodes and strategy."""

    ranks: int
    """Ranks of each node."""
    strategy: str = "ddp"
    cpu: bool = False
    nodes: int = 1
    node: int = 0
    """This machine's number."""
    host: str = ""
    """The address of node 0."""
    port: int = 0
    """Node 0's port for all nodes."""

    def options(self) -> list[str]:
        """Return the options of `accelerate launch`."""
        file = ON_CPU if self.cpu and self.strategy == "ddp" else STRATEGIES[self.strategy]
        options: dict[str, object] = {
            "config_file": launch_file(file),
            "num_processes": self.ranks * self.nodes,
        }
        if self.nodes > 1:
            options |= {
                "num_machines": self.nodes,
                "machine_rank": self.node,
                "main_process_ip": self.host,
                "main_process_port": self.port,
            }
            if self.strategy == "zero3":
                # Otherwise DeepSpeed would start the other nodes itself, through pdsh.
                options["deepspeed_multinode_launcher"] = "standard"
        return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def bundled_folder() -> Path:
    """Return the folder of `recipes/`: in a wheel the package, else the clone."""
    package = Path(__file__).parents[1]
    return package if (package / "recipes").is_dir() else package.parent


def launch_file(name: str) -> Path:
    """Return a file of recipes/accelerate/: the user's own, or the one in the wheel."""
    path = Path("recipes/accelerate", name)
    return path if path.exists() else bundled_folder() / path


def explain_missing(text: str) -> list[str]:
    """Return a line about a message's launch files, if they are not here."""
    names = re.findall(r"recipes/accelerate/(?:\w+\.yaml)?", text)
    if all(Path(name).exists() for name in names):
        return []
    return [f"{names[0]} is not here yet: `plugsft init launch` writes it"]
