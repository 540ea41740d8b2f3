"""Preparing data, from a file of chats to mapped tokens: plugsft against TRL and a lower bound.

    .venv/bin/python tools/bench/prepare.py [--rows 20000] [--processes 2] [--rounds 5]
        [--engines auto,transformers] [--folder DIR] [--against CHECKOUT] [--json FILE]

Each round runs every contender once, in a fresh process, which imports before the clock starts;
the start of the workers counts. The ids and masks of all rows are compared with TRL's before the
rounds. The script prints medians with their spread, the stages of the lower bound (reading, Jinja
and the engine, each alone on one core), and the ratios. TRL is the preparation of its SFTTrainer
with assistant_only_loss, from a cold cache.

--against compares with another commit instead, whose tokens must be equal. It takes the processor
time of one process: with --processes 1 that is all of it.
"""

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import chats
import numpy as np
import shared

VOCAB = 32_000
TRAINED_ON = 6_000
"""Rows that train the tokenizer."""


def main() -> None:
    """Measure, compare and print."""
    options = arguments()
    if options.child:
        print(json.dumps(CHILDREN[options.child](options)), flush=True)
        return
    with tempfile.TemporaryDirectory() as temporary:
        options.folder = options.folder or Path(temporary)
        write_data(options)
        if options.against:
            compare_commits(options)
            return
        contenders = ["trl", *(f"plugsft-{name}" for name in options.engines.split(","))]
        floor = measure("floor", options)
        equal = compare(options)

        def seconds(name: str) -> float:
            elapsed: float = measure(name, options)["seconds"]
            print(f"{name} {elapsed:.2f} s", flush=True)
            return elapsed

        rounds = shared.collect_rounds(
            options.rounds, {name: partial(seconds, name) for name in contenders}
        )
        report = {
            "rows": options.rows,
            "processes": options.processes,
            "bytes": source_path(options).stat().st_size,
            "equal": equal,
            "seconds": rounds,
            "floor": floor,
        }
    print_report(report)
    shared.write_report(report, options.json)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = shared.command_line(__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engines", default="auto,transformers")
    parser.add_argument("--folder", type=Path, help="folder that keeps the data for the next call")
    parser.add_argument(
        "--template", default="auto", help="model.chat_template of plugsft's recipe"
    )
    parser.add_argument("--against", type=Path, help="checkout of another commit, with its .venv")
    parser.add_argument("--child", choices=[*CHILDREN], help=argparse.SUPPRESS)
    parser.add_argument("--engine", default="auto", help=argparse.SUPPRESS)
    parser.add_argument("--keep", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def source_path(options: argparse.Namespace) -> Path:
    """Return the file of chats."""
    return Path(options.folder) / f"chats-{options.rows}.jsonl"


def write_data(options: argparse.Namespace) -> None:
    """Write the chats and train the tokenizer, if they are missing."""
    options.folder.mkdir(parents=True, exist_ok=True)
    if not source_path(options).is_file():
        half = source_path(options).with_suffix(".half")
        chats.main(options.rows, half)
        half.rename(source_path(options))
    if not (options.folder / "tokenizer").is_dir():
        with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
            chats.main(min(options.rows, TRAINED_ON), Path(file.name))
            shared.train_tokenizer(options.folder, Path(file.name), VOCAB)


def compare_commits(options: argparse.Namespace) -> None:
    """Prepare with another commit and with this one, in turns."""
    pythons = {"before": options.against.resolve() / ".venv/bin/python", "now": sys.executable}
    rounds = shared.collect_rounds(
        options.rounds,
        {name: partial(measure, "plugsft", options, python) for name, python in pythons.items()},
    )
    report = {"rows": options.rows, "processes": options.processes}
    for clock in ("processor", "seconds"):
        report[clock] = {name: [run[clock] for run in runs] for name, runs in rounds.items()}
        for name, seconds in report[clock].items():
            print(f"{clock:<10}{name:<8}{shared.spread(seconds, '.2f')} s")
        print(f"now {shared.compare_speed(report[clock]['now'], report[clock]['before'])}")
    report["digests"] = sorted({run["digest"] for runs in rounds.values() for run in runs})
    assert len(report["digests"]) == 1, "other tokens"
    shared.write_report(report, options.json)


def measure(
    name: str, options: argparse.Namespace, python: Path | str = sys.executable, **changes: object
) -> dict[str, Any]:
    """Run one contender in a separate process."""
    kind, _, engine = name.partition("-")
    arguments = {
        "child": kind,
        "engine": engine or "auto",
        "rows": options.rows,
        "processes": options.processes,
        "folder": options.folder,
        "template": options.template,
        **changes,
    }
    words = [f"--{key}={value}" for key, value in arguments.items()]
    with tempfile.TemporaryDirectory() as cache:
        quiet = {"TOKENIZERS_PARALLELISM": "true", "PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"}
        output = shared.run(
            python, __file__, *words, **quiet, HF_DATASETS_CACHE=cache, PLUGSFT_CACHE=cache
        )
        figures: dict[str, Any] = json.loads(output.splitlines()[-1])
        return figures


def run_plugsft(options: argparse.Namespace) -> dict[str, Any]:
    """Prepare as a run does, and read one example."""
    from plugsft.data import prepare
    from plugsft.data.defaults import DataDefaults
    from plugsft.registry.load import resolve

    with tempfile.TemporaryDirectory() as output:
        raw = shared.tables(
            options.keep or output,
            source_path(options),
            model={
                "tokenizer": str(options.folder / "tokenizer"),
                "chat_template": options.template,
            },
            plugins={
                "fast_tokenizer": {"engine": options.engine},
                "multiprocess_tokenize": {"workers": options.processes},
            },
        )
        started, worked = time.perf_counter(), time.process_time()
        recipe, active = resolve(raw)
        active.attach(DataDefaults(recipe.folder))
        tokens = prepare.prepare(recipe, active).tokens
        tokens.example(len(tokens) // 2)
        seconds, processor = time.perf_counter() - started, time.process_time() - worked
        digest = hashlib.sha256()
        for number in range(len(tokens)):
            for part in tokens.example(number):
                digest.update(np.asarray(part, np.int32).tobytes())
        return {"seconds": seconds, "processor": processor, "digest": digest.hexdigest()}


def run_trl(options: argparse.Namespace) -> dict[str, Any]:
    """Prepare as TRL's trainer does before its first step."""
    import transformers
    from datasets import disable_progress_bars, load_dataset
    from trl import SFTConfig, SFTTrainer

    disable_progress_bars()
    with tempfile.TemporaryDirectory() as output:
        settings = SFTConfig(
            output_dir=output,
            assistant_only_loss=True,
            dataset_num_proc=options.processes,
            max_length=shared.MAX_LENGTH,
            use_cpu=True,
            bf16=False,
            report_to="none",
        )
        started = time.perf_counter()
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.folder / "tokenizer")
        config = transformers.LlamaConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            vocab_size=len(tokenizer),
        )
        model = transformers.LlamaForCausalLM(config)
        rows = load_dataset("json", data_files=str(source_path(options)), split="train")
        trainer = SFTTrainer(model, settings, train_dataset=rows, processing_class=tokenizer)
        prepared: Any = trainer.train_dataset
        prepared[len(prepared) // 2]
        seconds = time.perf_counter() - started
        if options.keep:
            table = prepared.with_format("arrow")[:]
            np.savez(
                options.keep,
                ids=table["input_ids"].combine_chunks().flatten().to_numpy(),
                labels=flat_labels(table),
            )
    return {"seconds": seconds}


def flat_labels(table: Any) -> Any:
    """Return the mask of TRL's trained tokens."""
    name, untrained = ("labels", -100) if "labels" in table.column_names else ("assistant_masks", 0)
    labels = table[name].combine_chunks().flatten().to_numpy()
    return labels != untrained


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Prepare with both; compare all ids and masks."""
    with tempfile.TemporaryDirectory() as folder:
        trl_path = Path(folder) / "trl.npz"
        measure("trl", options, keep=trl_path)
        measure("plugsft", options, keep=Path(folder) / "ours")
        with np.load(trl_path) as arrays:
            ids, trained = arrays["ids"], arrays["labels"]
        from plugsft.tokens.store import Tokens

        (place,) = (Path(folder) / "ours/tokens").iterdir()
        tokens = Tokens(place)
        parts = [tokens.example(number) for number in range(len(tokens))]
        plugsft_ids = np.concatenate([part for part, _ in parts])
        mask = np.concatenate([part for _, part in parts])
        assert np.array_equal(plugsft_ids, ids), "other ids than TRL's"
        assert np.array_equal(mask, trained), "other masks than TRL's"
        return {"tokens": len(plugsft_ids), "trained": int(mask.sum())}


def run_floor(options: argparse.Namespace) -> dict[str, Any]:
    """Time the necessary stages, each alone on one core."""
    os.environ["RAYON_NUM_THREADS"] = "1"
    import gigatoken
    from pydantic_core import from_json

    from plugsft.data.jinja import compile_template

    def timed(function: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
        started = time.perf_counter()
        result = function(*arguments)
        return time.perf_counter() - started, result

    # A second of work to wake the processor, and one call to trigger lazy imports.
    text = (options.folder / "tokenizer/tokenizer.json").read_text()
    template = compile_template((options.folder / "tokenizer/chat_template.jinja").read_text())
    names = {"tools": None, "eos_token": "<|im_end|>"}
    engine = gigatoken.Tokenizer.from_json(text)
    engine.encode_batch(["x"], parallel=False)
    seconds = {"reading": 0.0, "jinja": 0.0, "engine": 0.0}
    with source_path(options).open("rb") as file:
        while True:
            elapsed, rows = timed(lambda: [from_json(line) for line in file.readlines(8_000_000)])
            if not rows:
                break
            seconds["reading"] += elapsed
            variables = [{**names, "messages": row["messages"]} for row in rows]
            seconds["jinja"] += timed(
                lambda rows: [*map(template.template.render, rows)], variables
            )[0]
            texts = ["".join(template.write(row["messages"], names)) for row in rows]
            seconds["engine"] += timed(
                lambda batch: engine.encode_batch(batch, parallel=False), texts
            )[0]
    return seconds


def print_report(report: dict[str, Any]) -> None:
    """Print the figures."""
    size, rows, processes = report["bytes"] / 2**20, report["rows"], report["processes"]
    machine = shared.machine_line(shared.head()["machine"])
    print(f"{rows:,} chats, {size:.0f} MiB, {processes} processes, {machine}")
    print(f"ids and masks of all rows equal TRL's: {report['equal']['tokens']:,} tokens")
    for name, seconds in report["seconds"].items():
        middle = statistics.median(seconds)
        print(
            f"{name:<22}{shared.spread(seconds, '.2f')} s {rows / middle:12,.0f} rows/s; "
            f"against TRL {shared.compare_speed(seconds, report['seconds']['trl'])}"
        )
    floor = sum(report["floor"].values())
    parts = ", ".join(f"{name} {value:.2f} s" for name, value in report["floor"].items())
    best = min(statistics.median(seconds) for seconds in report["seconds"].values())
    print(f"floor on one core: {floor:.2f} s ({parts})")
    print(f"the fastest takes {best * processes / floor:.2f} x the floor of {processes} cores")


CHILDREN = {"plugsft": run_plugsft, "trl": run_trl, "floor": run_floor}

if __name__ == "__main__":
    main()
