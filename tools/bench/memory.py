"""Peak memory of the workers that tokenize, on sources of several sizes.

    .venv/bin/python tools/bench/memory.py [--sizes 0.25,1,2] [--engine auto] [--json FILE]

Prints, for each size in GiB, the most that any worker held beyond what it held once its imports
were done (private and shared pages alike), and the rate. It should not grow with the source.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import chats
import psutil

CHATS = 20_000
IMPORTS = "import plugsft.work, plugsft.plugins.multiprocess_tokenize, psutil;"
HELD = IMPORTS + "print(psutil.Process().memory_info().rss)"


def main() -> None:
    """Measure each size, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", default="0.25,1,2")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    held = int(subprocess.check_output([sys.executable, "-c", HELD]))
    report = {"imports": held, "sizes": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        some = folder / "some.jsonl"
        chats.main(CHATS, some)
        for size in map(float, options.sizes.split(",")):
            one = measure(folder, some, int(size * 2**30), options.engine) | {"gib": size}
            report["sizes"].append(one)
            print(
                f"{size:5.2f} GiB: {one['workers']} workers, the largest held "
                f"{(one['peak'] - held) / 1e6:,.0f} MB above the {held / 1e6:,.0f} MB of its "
                f"imports; {one['seconds']:.1f} s, {size * 2**30 / 1e6 / one['seconds']:,.0f} MB/s"
            )
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def measure(folder: Path, some: Path, size: int, engine: str) -> dict:
    """Prepare a source of so many bytes; watch the workers."""
    source = folder / "source.jsonl"
    text = some.read_bytes()
    with source.open("wb") as file:
        while file.tell() < size:
            file.write(text)
    recipe = folder / "recipe.toml"
    recipe.write_text(
        f"""
        output = "{folder / "run"}"
        [model]
        tokenizer = "{tokenizer(folder, some)}"
        [model.scratch]
        context = 4096
        [data]
        source = "{source}"
        max_length = 4096
        on_bad_row = "drop"
        [train]
        batch_size = 8
        learning_rate = 1e-5
        [plugins.multiprocess_tokenize]
        workers = 2
        [plugins.fast_tokenizer]
        engine = "{engine}"
        """
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
    for path in (folder / "run/tokens").glob("*/*"):
        path.unlink()
    subprocess.run(["rm", "-r", folder / "run"], check=True)
    return {"peak": max(peaks.values()), "workers": len(peaks), "seconds": seconds}


def tokenizer(folder: Path, some: Path) -> Path:
    """Train a tokenizer on the chats, once."""
    place = folder / "tokenizer"
    if not place.is_dir():
        short = folder / "short.jsonl"
        with some.open("rb") as file:
            short.write_bytes(b"".join(file.readlines(12_000_000)))
        recipe = folder / "tokenizer.toml"
        recipe.write_text(
            f"""
            output = "{folder / "made"}"
            [model.scratch]
            context = 4096
            vocab = 32000
            [data]
            source = "{short}"
            max_length = 4096
        on_bad_row = "drop"
            [train]
            batch_size = 8
            learning_rate = 1e-5
            """
        )
        subprocess.run([sys.executable, "-m", "plugsft", "prepare", recipe], check=True)
        next((folder / "made/scratch").glob("tokenizer-*")).rename(place)
    return place


if __name__ == "__main__":
    main()
