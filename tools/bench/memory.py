"""Peak memory of the tokenizing workers, on sources of several sizes.

    .venv/bin/python tools/bench/memory.py [--sizes 0.25,1,2] [--engine auto] [--json FILE]

For each size in GiB, prints the rate and a worker's peak memory (private and shared pages), without
the memory of its imports. The peak should not grow with the source.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import chats
import psutil
import shared

CHATS, TRAINED_ON = 20_000, 6_000
IMPORTS = "import plugsft.data.slices, plugsft.plugins.multiprocess_tokenize.worker, psutil;"
IMPORTED = IMPORTS + "print(psutil.Process().memory_info().rss)"


def main() -> None:
    """Measure each size, one after the other."""
    parser = shared.command_line(__doc__)
    parser.add_argument("--sizes", default="0.25,1,2")
    parser.add_argument("--engine", default="auto")
    options = parser.parse_args()
    imports = shared.run_python("-c", IMPORTED)
    report = {"imports": imports, "sizes": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sample = folder / "sample.jsonl"
        chats.main(CHATS, sample)
        chats.main(TRAINED_ON, folder / "short.jsonl")
        shared.train_tokenizer(folder, folder / "short.jsonl", 32_000)
        for size in map(float, options.sizes.split(",")):
            figures = measure(folder, sample, int(size * 2**30), options.engine) | {"gib": size}
            report["sizes"].append(figures)
            print(
                f"{size:5.2f} GiB: {figures['workers']} workers, the largest took "
                f"{(figures['peak'] - imports) / 2**20:,.0f} MiB above the "
                f"{imports / 2**20:,.0f} MiB of its imports; {figures['seconds']:.1f} s, "
                f"{size * 2**10 / figures['seconds']:,.0f} MiB/s"
            )
    shared.write_report(report, options.json)


def measure(folder: Path, sample: Path, size: int, engine: str) -> dict:
    """Prepare a source of `size` bytes; measure the workers."""
    source, run = folder / "source.jsonl", folder / "run"
    text = sample.read_bytes()
    with source.open("wb") as file:
        while file.tell() < size:
            file.write(text)
    recipe = shared.write_recipe(
        folder / "recipe.toml",
        run,
        source,
        model={"tokenizer": str(folder / "tokenizer")},
        data={"on_bad_row": "drop"},
        plugins={
            "multiprocess_tokenize": {"workers": 2},
            "fast_tokenizer": {"engine": engine},
        },
    )
    started, peaks = time.perf_counter(), {}
    process = subprocess.Popen([sys.executable, "-m", "plugsft", "prepare", recipe])
    while process.poll() is None:
        for worker in psutil.Process(process.pid).children():
            try:
                peaks[worker.pid] = max(peaks.get(worker.pid, 0), worker.memory_info().rss)
            except psutil.Error:
                continue
        time.sleep(0.02)
    assert process.returncode == 0
    seconds = time.perf_counter() - started
    shutil.rmtree(run)
    return {"peak": max(peaks.values()), "workers": len(peaks), "seconds": seconds}


if __name__ == "__main__":
    main()
