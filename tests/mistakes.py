"""Mistakes that users make: in recipes, and in rows. record.py records what plugsft says."""

from typing import Any

U, A = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "a fox"}

BAD_ROWS: list[dict[str, Any]] = [
    {"messages": [U, A]},
    {"messages": []},
    {"messages": None},
    {"messages": "hi"},
    {"messages": [U]},
    {"messages": [{"role": "robot", "content": "hi"}, A]},
    {"messages": [U, {"role": "assistant"}]},
    {"messages": [U, {"role": "assistant", "content": 7}]},
    {"messages": [U, A | {"tool_calls": "weather"}]},
    {"messages": [U, A], "weight": -1},
    {"messages": [U, A | {"weight": 0.5}]},
    {"messages": [U, A], "tools": "weather"},
    {"messages": [U, A], "chat_template_kwargs": [1]},
    {"messages": [U, A | {"train": False}]},
    {"dialogue": [U, A]},
]

MISTAKES: dict[str, tuple[str, dict[str, Any]]] = {
    "a key that does not exist": ("check", {"train.batchsize": 4}),
    "a table that does not exist": ("check", {"evaluation.every": 2}),
    "a number as text": ("check", {"train.learning_rate": "2e-4"}),
    "a type that does not exist": ("check", {"model.dtype": "bf16"}),
    "a plugin that does not exist": ("check", {"plugins.loar.r": 4}),
    "an option that does not exist": ("check", {"plugins.lora.rank": 4}),
    "no such data": ("check", {"data.source": "nowhere.jsonl"}),
    "no such model": ("check", {"model.path": "./nowhere"}),
    "an unknown kind of file": ("check", {"data.source": "rows.tsv"}),
    "an empty slice": ("check", {"data.split": "train[100:]"}),
    "longer than the context": ("check", {"data.max_length": 1024}),
    "packing and sorting": ("check", {"plugins.bfd_packing": {}, "plugins.length_group": {}}),
    "pairs without pairs": ("check", {"plugins.dpo": {}}),
    "two objectives": ("check", {"plugins.dpo": {}, "plugins.kto": {}}),
    "a reference without pairs": ("check", {"plugins.dpo_reference": {}}),
    "modules that do not exist": ("check", {"plugins.lora.targets": ["query"]}),
    "warmup and epochs": ("check", {"train.epochs": 1.5}),
    "columns that do not exist": ("check", {"data.columns": {"messages": "dialogue"}}),
    "a schedule that does not exist": ("check", {"train.schedule": "cosin"}),
    "too small a capacity": ("train", {"plugins.bfd_packing.capacity": 8, "train.micro_batch": 1}),
    "bad rows": ("prepare", {"data.source": "bad.jsonl"}),
    "a folder that is a file": ("train", {"output": "/dev/null"}),
}
