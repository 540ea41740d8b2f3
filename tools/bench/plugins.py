"""Measure each bundled plugin on a CPU with `plugsft bench`: the table in docs/benchmarks.md.

    .venv/bin/python tools/bench/plugins.py [--rounds 5] [--steps 10] [--warmup 4] [--rows 2000]
        [--tiny] [--json tools/bench/results/plugins.json]
        [--page docs/benchmarks.md]

A new decoder with about ten million weights trains on chats of many lengths. Plugins that conflict
have separate benches; plugins that need a GPU or preferences are not measured. The script writes
the figures, and the table between its marks in docs/benchmarks.md.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import chats
import shared
import tomli_w

from plugsft.lab.timing import PLUGINS, Bench

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- tools/bench/plugins.py writes this -->\n", shared.END
SCRATCH = {"hidden": 320, "layers": 4, "heads": 5, "vocab": 8192, "context": 1024}
TINY = {"hidden": 32, "layers": 2, "heads": 2, "vocab": 512, "context": 1024}
TOGETHER = (
    "fast_tokenizer",
    "bfd_packing",
    "async_collate",
    "fused_loss",
    "flash_attention",
    "gradient_checkpointing",
)
APART = ("length_group", "lora", "profiler")
"""Plugins that conflict with packing, or affect results."""
COMPILED = ("bfd_packing", "compile")
"""compile has its own bench: it takes minutes, and needs rows of one shape."""


def main() -> None:
    """Measure all plugins; write the figures and the table."""
    parser = shared.command_line(__doc__)
    parser.set_defaults(json=ROOT / "tools/bench/results/plugins.json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--rows", type=int, default=2_000)
    parser.add_argument("--tiny", action="store_true", help="use a tiny model, for a test")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/benchmarks.md")
    options = parser.parse_args()
    counts = {name: getattr(options, name) for name in ("rounds", "steps", "warmup")}
    words = [f"--{name}={count}" for name, count in counts.items()]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        chats.main(options.rows, folder / "chats.jsonl")
        scratch = TINY if options.tiny else SCRATCH
        # Packing refuses a micro-batch: where it is off, each chat is a micro-batch.
        together = bench(folder, scratch, TOGETHER, {}, words)
        apart = bench(folder, scratch, APART, {"micro_batch": 4}, words)
        compiled = bench(folder, scratch, COMPILED, {}, words)
    report = {"benches": [together, apart, compiled]}
    shared.write_report(report, options.json)
    shared.write_table(options.page, BEGIN, table(report))


def bench(
    folder: Path,
    scratch: dict[str, Any],
    plugins: tuple[str, ...],
    train: dict[str, Any],
    words: list[str],
) -> dict[str, Any]:
    """Run `plugsft bench` on a recipe with these plugins; return its report."""
    tables = {
        "output": "run",
        "device": "cpu",
        "model": {"scratch": scratch},
        "data": {"source": "chats.jsonl", "max_length": 1024},
        "train": {"batch_size": 8, "learning_rate": 1e-4} | train,
        "plugins": {name: {} for name in plugins},
    }
    (folder / "chats.toml").write_text(tomli_w.dumps(tables))
    command = [sys.executable, "-m", "plugsft", "bench", "chats.toml", "--overwrite", *words]
    subprocess.run(command, cwd=folder, check=True)
    report: dict[str, Any] = json.loads((folder / "run-bench/bench.json").read_text())
    return report


def table(report: dict[str, Any]) -> str:
    """Return the table of all plugins, with a line about machine and rounds."""
    benches = [Bench(part) for part in report["benches"]]
    results = [result for bench_ in benches for result in bench_.results()]
    rows = sorted(row for row in (result.row() for result in results) if row[-1] != "within noise")
    settings = benches[0].report["settings"]
    machine = shared.machine_line(benches[0].report["machine"])
    note = (
        f"{machine}, {benches[0].report['date'][:10]}: medians of {settings['rounds']} rounds, "
        "with minimum and maximum."
    )
    lines = [" | ".join(row) for row in (PLUGINS, ["---"] * len(PLUGINS), *rows)]
    return "".join(f"| {line} |\n" for line in lines) + f"\n{note}\n"


if __name__ == "__main__":
    main()
