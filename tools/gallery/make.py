"""Make the examples of docs/examples.md: tools/examples [style] [calls] [preferences] [--pilot]

Each makes its rows, trains as `plugsft RECIPE` does, and measures the model before and after with
plain transformers. When it is done, its figures go to docs/examples.json, and from there to the
page and its picture. An example that was cut is made again from its beginning.
"""

import argparse
import json
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import page
import rows
from downloads import smollm2
from measure import TOKENS, Measured
from rows import Row

import plugsft.api
from plugsft.lab.timing import head

BUILD = Path("build/examples")
BASE = BUILD / "SmolLM2-135M-Instruct"
Models = list[Measured]
"""The model before and after."""


def style(models: Models, held_out: list[Row], run: Any) -> Row:
    """The loss of held-out chats, and the length of answers to what they first ask."""
    chats = [row["messages"] for row in held_out]
    losses = [model.loss(chats) for model in models]
    chats = [chat for chat in chats if rows.asks(chat[0]) and rows.words(chat[:1]) >= 4][:20]
    answers = [model.write([{"prompt": chat[:1]} for chat in chats]) for model in models]
    asked, people = ([chat[at]["content"] for chat in chats] for at in (0, 1))
    return {
        "figures": {
            "loss of a token in held-out replies": losses,
            f"words in an answer (people: {length(people):.0f})": [*map(length, answers)],
        },
        "compared": {"eval_loss": [run.evaluations["eval_loss"].iloc[-1], losses[1]]},
        "answers": first_three(asked, answers, people),
    }


def calls(models: Models, held_out: list[Row], run: Any) -> Row:
    """How many answers are one call of the right function, and how many are exact."""
    named, exact, answers = [], [], []
    questions = [row | {"prompt": row["messages"][:-1]} for row in held_out]
    for model in models:
        answers.append(model.write(questions))
        read = [model.calls(*pair) for pair in zip(questions, answers[-1], strict=True)]
        judged = [
            ([call["name"]] == [*row["right"][0]], rows.exact(call, row["right"][0]))
            for found, row in zip(read, held_out, strict=True)
            for call in found
            if len(found) == 1
        ]
        named.append(sum(right for right, _ in judged))
        exact.append(sum(right for _, right in judged))
    asked = [row["prompt"][-1]["content"] for row in questions]
    right = [json.dumps(row["messages"][-1]["tool_calls"][0]["function"]) for row in held_out]
    return {
        "figures": {
            "answers that call the right function": [*named, len(held_out)],
            "exact calls: the arguments are right, too": [*exact, len(held_out)],
        },
        "answers": first_three(asked, answers, right),
    }


def preferences(models: Models, held_out: list[Row], run: Any) -> Row:
    """How many answers ask back, and how far held-out pairs are apart."""
    asked = held_out[:50]
    answers = [model.write(asked) for model in models]
    before, after = ([model.gain(pair) for pair in held_out] for model in models)
    questions, chosen = ([row[key][-1]["content"] for row in asked] for key in ("prompt", "chosen"))
    likelier = [sum(gain > 0 for gain in gains) for gains in (before, after)]
    last = run.evaluations.iloc[-1].to_dict()
    margin = run.recipe["plugins"]["dpo"]["beta"] * (mean(after) - mean(before))
    return {
        "figures": {
            "answers that ask back": [*(sum("?" in it for it in by) for by in answers), len(asked)],
            "pairs whose asking reply is the likelier one": [*likelier, len(held_out)],
            "reward margin of held-out pairs": [0.0, last["eval_margin"]],
            "accuracy, the share whose chosen reply gained more": [0.0, last["eval_accuracy"]],
            "words in an answer": [*map(length, answers)],
        },
        "compared": {"eval_margin": [last["eval_margin"], margin]},
        "answers": first_three(questions, answers, chosen),
    }


MEASURES = {"style": style, "calls": calls, "preferences": preferences}


def length(answers: list[str]) -> float:
    """The mean number of words."""
    return mean(len(answer.split()) for answer in answers)


def first_three(asked: list[str], answers: list[list[str]], data: list[str]) -> list[Row]:
    """What was asked and answered, word by word, and what the data has."""
    found = zip(asked, *answers, data, strict=True)
    return [dict(zip(("asked", *page.ANSWERS), texts, strict=True)) for texts in found][:3]


def make(name: str, pilot: bool) -> None:
    """Make one example, and write its figures."""
    folder, recipe = BUILD / name, f"tools/gallery/{name}.toml"
    folder.mkdir(parents=True, exist_ok=True)
    times = [time.monotonic()]
    held_out = rows.write(rows.ROWS[name](), folder, pilot)
    words = ["--overwrite", *["train.batch_size=4"] * pilot]
    print(f"{name}: plugsft {recipe}", flush=True)
    times.append(time.monotonic())
    ended = subprocess.run([Path(sys.executable).with_name("plugsft"), recipe, *words])
    if ended.returncode:
        sys.exit(ended.returncode)
    times.append(time.monotonic())
    print(f"{name}: measuring before and after", flush=True)
    run = plugsft.api.load_run(folder / "run")
    models = [Measured(str(BASE), str(folder / "run/model"), trained) for trained in (False, True)]
    found = MEASURES[name](models, held_out, run)
    times.append(time.monotonic())
    seconds = [round(end - start) for start, end in pairwise(times)]
    facts = {
        "pilot": pilot,
        "steps": run.record["steps"]["done"],
        "held_out": len(held_out),
        "tokens": TOKENS,
    }
    facts["seconds"] = dict(zip(("rows", "train", "measure"), seconds, strict=True))
    page.write(name, {**head("peft"), **facts, **found})
    print(f"{name}: {found['figures']}; {facts['seconds']}", flush=True)


def main() -> None:
    """Make the examples that the command line names, or all."""
    parser = argparse.ArgumentParser("tools/examples", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MEASURES)}")
    parser.add_argument("--pilot", action="store_true", help="few rows and steps")
    options = parser.parse_args()
    if unknown := {*options.names} - {*MEASURES}:
        parser.error(f"no example {', '.join(unknown)}; there are {', '.join(MEASURES)}")
    BUILD.mkdir(parents=True, exist_ok=True)
    BASE.unlink(missing_ok=True)
    BASE.symlink_to(smollm2())
    for name in options.names or MEASURES:
        make(name, options.pilot)


if __name__ == "__main__":
    main()
