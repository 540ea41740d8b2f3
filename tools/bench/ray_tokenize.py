"""Preparing data on a Ray cluster of this machine: ray_tokenize against multiprocess_tokenize.

    .venv/bin/python tools/bench/ray_tokenize.py [--rows 100000] [--processes 2] [--rounds 3]
        [--folder DIR] [--json FILE]

Each round runs every contender once, in a fresh process that imports before the clock starts.
`ray started here` counts the start and the end of the cluster; `ray running` connects to one that
runs. The tokens of all contenders are compared.
"""

import argparse
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import prepare
import shared
from ray.cluster_utils import Cluster

PLUGINS: dict[str, dict[str, dict[str, Any]]] = {
    "multiprocess": {"multiprocess_tokenize": {}},
    "ray started here": {"ray_tokenize": {}},
    "ray running": {"ray_tokenize": {}},
}


def main() -> None:
    """Measure, compare and print."""
    options = arguments()
    if options.child:
        print(json.dumps(run(options)), flush=True)
        return
    with tempfile.TemporaryDirectory() as temporary:
        options.folder = options.folder or Path(temporary)
        prepare.write_data(options)
        # Its shutdown ends the processes of this cluster alone; `ray stop` would end all.
        node = {"num_cpus": options.processes, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=node)
        try:
            options.address = cluster.address
            results = shared.collect_rounds(
                options.rounds, {name: partial(measure, name, options) for name in PLUGINS}
            )
        finally:
            cluster.shutdown()
    assert len({result["tokens"] for times in results.values() for result in times}) == 1
    seconds = {name: [result["seconds"] for result in times] for name, times in results.items()}
    print(f"{options.rows:,} chats, {options.processes} processes; all tokens are equal")
    base = seconds["multiprocess"]
    for name, times in seconds.items():
        ratios = [one / other for one, other in zip(times, base, strict=True)]
        print(
            f"{name:<18}{shared.spread(times, '.1f')} s, {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) of multiprocess"
        )
    shared.write_report({"rows": options.rows, "seconds": seconds}, options.json)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = shared.command_line(__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="folder that keeps the data for the next call")
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=[*PLUGINS], help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one contender in a separate process."""
    words = [f"--rows={options.rows}", f"--processes={options.processes}"]
    words.append(f"--address={options.address}")
    result: dict[str, Any] = shared.run_python(
        __file__, f"--child={name}", f"--folder={options.folder}", *words, PYTHONWARNINGS="ignore"
    )
    print(f"{name} {result['seconds']:.1f} s", flush=True)
    return result


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Prepare as a run does."""
    from plugsft.base.checksums import file_digest
    from plugsft.base.machine import look
    from plugsft.data.defaults import DataDefaults
    from plugsft.data.prepare import prepare as prepare_tokens
    from plugsft.registry.active import check
    from plugsft.registry.load import resolve

    with tempfile.TemporaryDirectory() as output:
        plugins = PLUGINS[options.child]
        if "multiprocess_tokenize" in plugins:
            plugins["multiprocess_tokenize"]["workers"] = options.processes
        if options.child == "ray running":
            plugins["ray_tokenize"]["address"] = options.address
        tables = shared.tables(
            output,
            prepare.source_path(options),
            model={"tokenizer": str(options.folder / "tokenizer")},
            plugins=plugins | {"fast_tokenizer": {}},
        )
        started = time.perf_counter()
        recipe, active = resolve(tables)
        active.attach(DataDefaults(recipe.folder))
        check(active, recipe, look())
        tokens = prepare_tokens(recipe, active).tokens
        seconds = time.perf_counter() - started
        digests = [file_digest(path) for path in sorted(tokens.folder.glob("*.arrow"))]
        return {"seconds": seconds, "tokens": " ".join(digests)}


if __name__ == "__main__":
    main()
