"""A record of what plugsft computes and says, to compare with after a change.

    python tests/record.py            # what differs from tests/data/record.json
    python tests/record.py --write    # the same, and the file is written again

It uses the command line, recipes, run folders and the functions of `plugsft` only, so it holds
whatever becomes of the code between them. test_record.py compares; it says what may differ.
"""

import json
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from conftest import ROOT, read_metrics, run_launch, run_plugsft, start_plugsft, write_jsonl
from conftest import write_recipe as write
from mistakes import BAD_ROWS, MISTAKES
from safetensors.numpy import load_file

import plugsft.api

FILE = Path(__file__).parent / "data/record.json"
RELATIVE, ABSOLUTE = 1e-4, 2e-5
"""How far numbers may be off. See test_record.py."""

WORDS = "the quick brown fox jumps over a lazy dog while naïve cafés serve 東京 ramen to 12 owls"
TEMPLATE = """{%- if tools %}tools: {{ tools | tojson }}
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>
{% endif %}{{ m.content or '' }}{% for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}

{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def text(*seed: int) -> str:
    """Return a few words."""
    rng = np.random.default_rng(seed)
    return " ".join(rng.choice(WORDS.split(), 2 + seed[-1] * 5 % 11))


def turn(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def chats(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return chats of one to three rounds; every fourth counts half, and one has no system."""
    rows = []
    for n in range(count):
        turns = [turn("system", text(seed, n, 1))] if n % 3 else []
        for r in range(1 + n % 3):
            turns += [turn("user", text(seed, n, r + 2)), turn("assistant", text(seed, n, r + 5))]
        rows.append({"messages": turns} | ({"weight": 0.5} if n % 4 == 3 else {}))
    return rows


def formats() -> dict[str, list[dict[str, Any]]]:
    """Return rows of each format that is read without a plugin."""
    u, a = turn("user", text(1)), turn("assistant", text(2))
    weather = {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object"}},
    }
    calls = [call("weather", city="東京"), call("weather", city="Oslo", days=[1, 2])]
    done = turn("assistant", None, tool_calls=calls)
    results = [turn("tool", '{"sun": true}'), turn("tool", "rain"), a]
    return {
        "messages": [
            *chats(5),
            {"messages": [u, a | {"weight": 0}, u, turn("assistant", "yes", train=True)]},
            {"messages": [u, a], "weight": 2.5, "chat_template_kwargs": {"tools": ["x"]}},
        ],
        "tools": [
            {"messages": [u, done, *results], "tools": [weather]},
            {"messages": [u, done, *results], "tools": json.dumps([weather])},
            {
                "messages": [u, done | {"content": "Let me see."}, *results[:2], a],
                "tools": [weather],
            },
        ],
        "thoughts": [
            {"messages": [u, a | {"reasoning_content": "hm, so"}]},
            {"messages": [u, a, u, a | {"thinking": "two thoughts\n\nindeed"}]},
        ],
        "conversations": [
            {
                "conversations": [
                    {"from": "human", "value": "hi"},
                    {"from": "gpt", "value": text(3)},
                ]
            },
            {
                "system": "be brief",
                "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "no"}],
            },
        ],
        "texts": [{"prompt": text(n, 4), "completion": text(n, 5)} for n in range(3)],
        "parts": [{"prompt": [u], "completion": [a]}, {"prompt": [u, a, u], "completion": [a]}],
        "alpaca": [
            {"instruction": text(6), "input": text(7), "output": text(8)},
            {"instruction": "more", "output": "less", "history": [["a fox", "an owl"]]},
        ],
        "text": [{"text": text(n, 9)} for n in range(3)] + [{"text": text(10), "weight": 3}],
    }


def pairs() -> list[dict[str, Any]]:
    """Return prompts with a better and a worse answer, as texts and as chats."""
    rows = []
    for n in range(12):
        prompt = [turn("user", text(n, 1))]
        good, bad = ([turn("assistant", text(n, k))] for k in (3, 4))
        rows.append({"prompt": prompt, "chosen": good, "rejected": bad})
    return rows


class Recorder:
    """Runs everything in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.env = folder, {"OMP_NUM_THREADS": "1"}
        for name, rows in formats().items():
            write_jsonl(folder / f"{name}.jsonl", rows)
        write_jsonl(folder / "chats.jsonl", chats(22, seed=1))
        write_jsonl(folder / "more.jsonl", chats(6, seed=2))
        write_jsonl(folder / "pairs.jsonl", pairs())
        labels = [
            {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
            for n, row in enumerate(pairs())
            for side in [("chosen", "rejected")[n % 2]]
        ]
        write_jsonl(folder / "labels.jsonl", labels)
        (folder / "template.jinja").write_text(TEMPLATE, encoding="utf8")
        self.base = folder / "base/model"

    def tables(self, source: str = "chats", **tables: Any) -> dict[str, Any]:
        """Return the tables of a recipe, with these in place of its own."""
        own: dict[str, Any] = {
            "output": str(self.folder / "run"),
            "model": {"path": str(self.base)},
            "data": {"source": str(self.folder / f"{source}.jsonl"), "max_length": 192},
            "train": {"batch_size": 8, "micro_batch": 4, "learning_rate": 3e-3, "warmup": 2.0}
            | {"steps": 6, "weight_decay": 0.5, "schedule": "cosine", "max_grad_norm": 2.0},
        }
        for name, table in tables.items():
            merges = isinstance(table, dict) and name in own
            own[name] = own[name] | table if merges else table
        return own

    def all(self, ranks: bool = True) -> dict[str, Any]:
        """Record everything; `ranks`: the runs on two ranks, too."""
        runs: dict[str, Any] = {}
        record = {"tokens": {}, "runs": runs, "mistakes": {}}
        names = [*formats(), "pairs", "labels"]
        every = [{"source": str(self.folder / f"{name}.jsonl")} for name in names[:-2]]
        scratch = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "vocab": 420}
        template = {"chat_template": str(self.folder / "template.jinja")}
        tables = self.tables(
            model={"scratch": scratch | {"context": 256}, **template},
            data={"sources": every, "max_length": 192, "on_bad_row": "drop"},
            train={"learning_rate": 0.0, "steps": 2},
        )
        del tables["model"]["path"], tables["data"]["source"]
        runs["base"] = self.train("base", tables)
        for name in names:
            plugin = {"pairs": {"dpo": {}}, "labels": {"kto": {}}}.get(name, {})
            record["tokens"][name] = self.tokens(self.tables(name, plugins=plugin))
        bad = write_jsonl(self.folder / "bad.jsonl", BAD_ROWS)
        record["tokens"]["bad rows"] = self.tokens(
            self.tables(data={"source": str(bad), "on_bad_row": "drop"})
        )
        self.record_runs(runs, ranks)
        for name, (command, change) in MISTAKES.items():
            record["mistakes"][name] = self.mistake(command, change)
        return record

    def record_runs(self, runs: dict[str, Any], ranks: bool) -> None:
        """Train each short run."""
        more = [{"source": str(self.folder / "more.jsonl"), "weight": 1.5}]
        sources = [{"source": str(self.folder / "chats.jsonl")}, *more]
        held_out = {"every": 3, "source": str(self.folder / "more.jsonl"), "split": "train[:100%]"}
        sft = self.tables(eval=held_out, checkpoint={"every": 2})
        del sft["data"]["source"]
        sft["data"]["sources"] = sources
        runs["sft"] = self.train("sft", sft)
        packing = {"capacity": 192, "overlong": "truncate"}
        packed = {"bfd_packing": packing, "lora": {"r": 4, "alpha": 8}}
        lora = self.tables(plugins=packed, eval=held_out)
        del lora["train"]["micro_batch"]  # the capacity takes its place
        runs["packed lora"] = self.train("lora", lora)
        runs["packed lora"]["merged"] = self.merged("lora")
        dpo = {"dpo": {"beta": 0.3, "nll": 0.2}, "dpo_reference": {}}
        runs["dpo"] = self.train("dpo", self.tables("pairs", plugins=dpo))
        runs["kto"] = self.train("kto", self.tables("labels", plugins={"kto": {"beta": 0.3}}))
        runs["reward"] = self.train("reward", self.tables("pairs", plugins={"reward": {}}))
        runs["killed"] = self.killed(sft)
        for kind in ("fsdp2", "zero3") if ranks else ():
            runs[kind] = self.train(kind, sft, kind)

    def recipe(self, name: str, tables: dict[str, Any]) -> Path:
        return write(self.folder / f"{name}.toml", tables | {"output": str(self.folder / name)})

    def train(self, name: str, tables: dict[str, Any], launch: str | None = None) -> dict[str, Any]:
        """Train, and return what the run's folder says."""
        recipe = self.recipe(name, tables)
        if launch is None:
            done = run_plugsft(recipe, env=self.env)
            code, problems = done.returncode, done.stderr
        else:
            config = ("--config_file", ROOT / f"recipes/accelerate/{launch}.yaml")
            words = (*config, "--num_processes", 2, "-m", "plugsft", recipe)
            code, _, problems = run_launch(*words)
        assert code == 0, problems
        return self.run(name)

    def run(self, name: str) -> dict[str, Any]:
        """Return the numbers of a finished run."""
        folder = self.folder / name
        record = json.loads((folder / "run.json").read_text())
        counts = {
            key: record["data"][key] for key in ("rows", "examples", "tokens", "trained_tokens")
        }
        steps = [f"{line['step']}: " + numbers(line) for line in read_metrics(folder)]
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        evaluations = [numbers(line) for line in lines if "eval_loss" in line]
        return {
            "status": record["status"],
            "data": counts,
            "steps": steps,
            "evaluations": evaluations,
            "summaries": [
                self.plain(f"{one['name']}: {one['summary']}") for one in record["plugins"]
            ],
            "weights": weights_of(folder / "model"),
        }

    def merged(self, name: str) -> list[str]:
        """Merge a run's adapters; return the weights that a server would load."""
        target = self.folder / f"{name}-merged"
        done = run_plugsft("export", self.folder / name, "--merge", "--to", target, env=self.env)
        assert done.returncode == 0, done.stderr
        return weights_of(target)

    def killed(self, tables: dict[str, Any]) -> dict[str, Any]:
        """Kill a run by SIGKILL once it has a checkpoint, resume it; compare with run "sft"."""
        run, recipe = self.folder / "killed", self.recipe("killed", tables)
        running = start_plugsft(recipe, env=self.env)
        while not any(run.glob("checkpoints/step-*")) and running.process.is_alive():
            time.sleep(0.001)
        running.process.kill()
        running.wait()
        done = run_plugsft(recipe, "--resume", env=self.env)
        assert done.returncode == 0, done.stderr
        models = [self.folder / name / "model/model.safetensors" for name in ("killed", "sft")]
        same = models[0].read_bytes() == models[1].read_bytes()
        return {
            "the bits of sft": same,
            "the numbers of sft": self.run("killed") == self.run("sft"),
        }

    def tokens(self, tables: dict[str, Any]) -> dict[str, Any]:
        """Return each row's tokens as `inspect` shows them, and those that `prepare` writes."""
        output = self.folder / "tokens"
        shutil.rmtree(output, ignore_errors=True)
        tables = tables | {"output": str(output)}
        seen = plugsft.api.inspect(tables, rows=100)
        found = []
        for row in seen.rows:
            ids = [(token.ids, token.trained) for token in row.tokens]
            trained = f"{sum(len(i) for i, _ in ids)} tokens {short(ids)}: {row.trained_text!r}"
            found.append(trained if ids else self.plain(row.summary))
        result: dict[str, Any] = {"rows": found}
        if seen.sources[0].examples:
            prepared = plugsft.api.prepare(tables)
            written = datasets.load_from_disk(str(prepared.folder))
            columns = [
                written[name] for name in ("input_ids", "loss_mask") if name in written.features
            ]
            result["prepared"] = short([[list(map(int, row)) for row in one] for one in columns])
            result["counts"] = [prepared.rows, prepared.tokens, prepared.trained_tokens]
            result["bad rows"] = prepared.bad_rows
        result["findings"] = [self.plain(text) for text in seen.warnings + seen.errors]
        return result

    def mistake(self, command: str, change: dict[str, Any]) -> list[str]:
        """Return the exit code and messages of a command with one mistake in its recipe."""
        tables = self.tables()
        for key, value in change.items():
            *path, last = key.split(".")
            table = tables
            for name in path:
                table = table.setdefault(name, {})
            table[last] = str(self.folder / value) if value == "bad.jsonl" else value
        done = run_plugsft(
            *command.split(), write(self.folder / "wrong.toml", tables), env=self.env
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith(("error", "warn"))]
        lines += done.stderr.splitlines()
        return [f"exit code {done.returncode}", *map(self.plain, lines)]

    def plain(self, text: str) -> str:
        """Return a message without this machine's paths and figures."""
        text = text.replace(str(self.folder), "FOLDER").replace(str(ROOT), "PLUGSFT")
        return re.sub(r"[\d.,]+ [KMG]iB|\b\d+\.\d s\b", "FIGURE", text).rstrip()


def numbers(line: dict[str, Any]) -> str:
    """Return what a line of metrics says of learning; times and memory are left out."""
    of_the_machine = ("seconds", "memory", "second", "step")
    kept = {k: v for k, v in line.items() if not k.endswith(of_the_machine) and k != "memory_gib"}
    return ", ".join(
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in sorted(kept.items())
    )


def weights_of(folder: Path) -> list[str]:
    """Return two numbers of each tensor: its norm, and its sum under fixed random signs, by norm.

    The second sees what a norm cannot, such as two rows that have changed places.
    """
    found = []
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in sorted(load_file(file).items()):
            values = tensor.astype(np.float64).ravel()
            signs = np.random.Generator(np.random.Philox(0)).choice([-1.0, 1.0], len(values))
            norm = float(np.linalg.norm(values))
            found.append(f"{name}: {norm:.6g} {float(values @ signs) / (norm or 1):.6g}")
    return found


def short(value: Any) -> str:
    return sha256(json.dumps(value).encode()).hexdigest()[:12]


NUMBER = re.compile(r"(?<![\w.])-?\d+\.?\d*(?:e[-+]?\d+)?(?![\w])")


def alike(old: Any, new: Any) -> bool:
    """Tell whether two texts are equal but for rounding of the numbers in them."""
    if not (isinstance(old, str) and isinstance(new, str)):
        return bool(old == new)
    if NUMBER.sub("#", old) != NUMBER.sub("#", new):
        return False
    both = zip(NUMBER.findall(old), NUMBER.findall(new), strict=True)
    return all(a == b or close(a, b) for a, b in both)


def close(one: str, other: str) -> bool:
    """Compare numbers; whole ones must be equal."""
    if one.lstrip("-").isdigit() and other.lstrip("-").isdigit():
        return False
    return math.isclose(float(one), float(other), rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """Describe each difference: where it is, what was there, and what is there now."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            yield from differences(old.get(name), new.get(name), f"{where} / {name}".lstrip(" /"))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from differences(a, b, f"{where} [{number}]")
    elif not alike(old, new):
        yield f"{where}\n  - {show(old)}\n  + {show(new)}"


def show(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        new = Recorder(Path(folder)).all()
    found = list(differences(json.loads(FILE.read_text()), new)) if FILE.exists() else []
    print("\n".join(found) or "no difference")
    if sys.argv[1:] == ["--write"]:
        FILE.write_text(json.dumps(new, indent=1, ensure_ascii=False) + "\n", encoding="utf8")
        print(f"{len(found)} differences; {FILE} is written")


if __name__ == "__main__":
    main()
