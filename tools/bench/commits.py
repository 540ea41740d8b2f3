"""Another commit against this one: preparation, planning with collation, steps, and answers.

    .venv/bin/python tools/bench/commits.py --against CHECKOUT [--rounds 5] [--json FILE]

CHECKOUT is a working tree of the other commit with a .venv of its own. Each round is a fresh
process of either commit (one_commit.py); they take turns. Both read the same rows and models. Of
the steps of a run, the median counts. Losses must be equal to the bit.
"""

import json
import random
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import chats
import shared

ROWS, PAIRS = 10_000, 128
CASES = {
    "prepare": "s, of a processor",
    "plan and collate": "s a step",
    "packed step": "s",
    "DPO step": "s",
    "answers": "s",
}
MODELS = {"small": {"hidden": 128, "layers": 2}, "tiny": {"hidden": 16, "layers": 1}}


def main() -> None:
    """Take turns, and print how fast this commit is relative to the other."""
    parser = shared.command_line(__doc__ or "")
    parser.add_argument("--against", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    pythons = {"before": options.against.resolve() / ".venv/bin/python", "now": sys.executable}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_inputs(folder)
        rounds = shared.collect_rounds(
            options.rounds,
            {name: partial(measure, python, folder) for name, python in pythons.items()},
        )
    report: dict[str, Any] = {"rows": ROWS, "seconds": {}}
    for case, unit in CASES.items():
        seconds = {name: [run["seconds"][case] for run in runs] for name, runs in rounds.items()}
        for name, values in seconds.items():
            print(f"{case:<18}{name:<8}{shared.spread(values, '.4f')} {unit}")
        print(f"now {shared.compare_speed(seconds['now'], seconds['before'])}")
        report["seconds"][case] = seconds
    losses = [run["losses"] for runs in rounds.values() for run in runs]
    report["losses_equal"] = {
        case: all(one[case] == losses[0][case] for one in losses) for case in losses[0]
    }
    print(f"losses equal to the bit: {report['losses_equal']}")
    shared.write_report(report, options.json)


def write_inputs(folder: Path) -> None:
    """Write rows, pairs and two models, which both commits read."""
    chats.main(ROWS, folder / "rows.jsonl")
    lines = (folder / "rows.jsonl").read_text(encoding="utf8").splitlines()
    dice = random.Random(0)
    with (folder / "pairs.jsonl").open("w", encoding="utf8") as file:
        for turns in (json.loads(line)["messages"] for line in lines[:PAIRS]):
            words = turns[1]["content"].split()
            answers = {"chosen": words, "rejected": ["No.", *dice.sample(words, len(words))]}
            pair = {
                name: [{"role": "assistant", "content": " ".join(answer)}]
                for name, answer in answers.items()
            }
            file.write(json.dumps({"prompt": turns[:1], **pair}) + "\n")
    for name, shape in MODELS.items():
        recipe = shared.write_recipe(
            folder / f"{name}.toml",
            folder / f"{name}-run",
            folder / "rows.jsonl",
            model={"scratch": {"heads": 2, "vocab": 4096, "context": shared.MAX_LENGTH, **shape}},
            train={"steps": 1, "batch_size": 1, "micro_batch": 1},
        )
        shared.run(sys.executable, "-m", "plugsft", recipe)


def measure(python: Path | str, folder: Path) -> dict[str, Any]:
    """Measure in a fresh process of a commit, with a cache of its own."""
    with tempfile.TemporaryDirectory() as cache:
        program = Path(__file__).with_name("one_commit.py")
        output = shared.run(python, program, folder, PLUGSFT_CACHE=cache, HF_HUB_OFFLINE="1")
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


if __name__ == "__main__":
    main()
