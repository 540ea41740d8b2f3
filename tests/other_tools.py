"""Configurations of axolotl and LLaMA-Factory, and what these tools themselves make of them.

`python tests/other_tools.py` writes tests/data/other_tools.json, where axolotl 0.19.0 and
llamafactory 0.9.5 are installed. Masks come from their own code for rows, LoRA modules from their
own search, and factors of the learning rate from their schedules.
"""

import json
import math
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

ROOT = Path(__file__).parents[1]
MADE = ROOT / "tests/data/other_tools.json"


def say(role, words, keys=("role", "content")):
    return dict(zip(keys, (role, words), strict=True))


WORDS = ["owls see at night", "6 x 7 is 42", "東京 and cafés", "who? 🦉", "a b c d e", "thank you"]
MESSAGES = [
    {
        "messages": [
            say("system", "Be brief."),
            say("user", f"{words}?"),
            say("assistant", f"Yes, {words}."),
            say("user", f"More, {n}"),
            say("assistant", f"{words} {n}"),
        ]
    }
    for n, words in enumerate(WORDS * 2)
]
SHAREGPT = [
    {
        "conversations": [
            say(
                {"user": "human", "assistant": "gpt"}.get(turn["role"], turn["role"]),
                turn["content"],
                ("from", "value"),
            )
            for turn in row["messages"]
        ]
    }
    for row in MESSAGES
]
TEXTS = [{"text": f"{words} {n}"} for n, words in enumerate(WORDS * 2)]
ALPACA = [
    {"instruction": f"Say {n}", "input": words if n % 2 else "", "output": words}
    for n, words in enumerate(WORDS * 2)
]
SAID = ("from", "value")
PAIRS = [
    {
        "ask": [say("human", f"Say {words}", SAID)],
        "good": say("gpt", f"{words} {n}", SAID),
        "bad": say("gpt", f"No, {n}", SAID),
    }
    for n, words in enumerate(WORDS * 2)
]
TURNS = {"messages": "conversations"}
AXOLOTL = {
    "full, packed, ShareGPT, cosine with a minimum": (
        [SHAREGPT],
        {
            "datasets": [
                {
                    "type": "chat_template",
                    "field_messages": "conversations",
                    "message_property_mappings": {"role": "from", "content": "value"},
                }
            ],
            "sequence_len": 256,
            "sample_packing": True,
            "attn_implementation": "flash_attention_2",
            "micro_batch_size": 2,
            "gradient_accumulation_steps": 3,
            "max_steps": 20,
            "learning_rate": "2e-5",
            "lr_scheduler": "cosine",
            "cosine_min_lr_ratio": 0.1,
            "warmup_ratio": 0.13,
            "optimizer": "adamw_torch_fused",
            "weight_decay": 0.1,
            "bf16": False,
        },
    ),
    "LoRA, several turns": (
        [MESSAGES],
        {
            "datasets": [
                {"type": "chat_template", "roles_to_train": ["assistant"], "train_on_eos": "turn"}
            ],
            "adapter": "lora",
            "lora_r": 8,
            "lora_alpha": 16,
            "lora_target_linear": True,
            "sequence_len": 256,
            "micro_batch_size": 1,
            "gradient_accumulation_steps": 2,
            "num_epochs": 2,
            "learning_rate": 2e-4,
            "warmup_ratio": 0.1,
            "bf16": "auto",
        },
    ),
    "QLoRA, linear schedule": (
        [SHAREGPT],
        {
            "datasets": [
                {
                    "type": "chat_template",
                    "field_messages": "conversations",
                    "message_field_role": "from",
                    "message_field_content": "value",
                }
            ],
            "adapter": "qlora",
            "load_in_4bit": True,
            "lora_r": 4,
            "lora_alpha": 16,
            "lora_target_modules": ["q_proj", "v_proj"],
            "lora_dropout": 0.05,
            "sequence_len": 256,
            "micro_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "num_epochs": 3,
            "learning_rate": 1e-4,
            "lr_scheduler": "linear",
            "optimizer": "paged_adamw_8bit",
        },
    ),
    "completion, constant with a warm-up": (
        [TEXTS],
        {
            "datasets": [{"type": "completion"}],
            "sequence_len": 256,
            "micro_batch_size": 2,
            "gradient_accumulation_steps": 1,
            "num_epochs": 1,
            "learning_rate": 5e-6,
            "lr_scheduler": "constant_with_warmup",
            "warmup_steps": 3,
            "bf16": True,
        },
    ),
}
FACTORY = {
    "LoRA, Alpaca and ShareGPT": (
        [ALPACA, SHAREGPT],
        {
            "stage": "sft",
            "finetuning_type": "lora",
            "lora_rank": 8,
            "lora_target": "all",
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "num_train_epochs": 2.0,
            "learning_rate": 1.0e-4,
            "lr_scheduler_type": "cosine",
            "max_steps": 9,
            "warmup_ratio": 0.15,
            "bf16": True,
        },
    ),
    "full, the last answer alone": (
        [MESSAGES],
        {
            "stage": "sft",
            "finetuning_type": "full",
            "mask_history": True,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 4,
            "num_train_epochs": 3.0,
            "learning_rate": 1.0e-5,
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": 0.2},
            "warmup_ratio": 0.1,
        },
    ),
    "DPO with LoRA": (
        [PAIRS],
        {
            "stage": "dpo",
            "finetuning_type": "lora",
            "lora_rank": 4,
            "lora_alpha": 32,
            "lora_target": "q_proj,v_proj",
            "pref_beta": 0.2,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 3,
            "num_train_epochs": 1.0,
            "learning_rate": 5.0e-6,
            "lr_scheduler_type": "linear",
        },
    ),
}
INFO = {
    "LoRA, Alpaca and ShareGPT": [
        {},
        {"formatting": "sharegpt", "columns": TURNS},
    ],
    "full, the last answer alone": [
        {
            "formatting": "sharegpt",
            "columns": {"messages": "messages"},
            "tags": {
                "role_tag": "role",
                "content_tag": "content",
                "user_tag": "user",
                "assistant_tag": "assistant",
                "system_tag": "system",
            },
        },
    ],
    "DPO with LoRA": [
        {
            "ranking": True,
            "formatting": "sharegpt",
            "columns": {"messages": "ask", "chosen": "good", "rejected": "bad"},
        },
    ],
}
"""Configuration -> the entries of its data sets in dataset_info.json."""
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}"
    "<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
"""Llama 3's template, which LLaMA-Factory calls llama3."""


def save_model(folder):
    """Save a tiny Llama with Llama 3's special tokens and template; return its tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        pad_token="<|pad|>",
        chat_template=TEMPLATE,
        additional_special_tokens=["<|start_header_id|>", "<|end_header_id|>"],
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=4096,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return tokenizer


def axolotl_rows(tokenizer, settings, rows):
    """Return (ids, trained) of rows by axolotl's own strategies."""
    from axolotl.prompt_strategies.chat_template import ChatTemplatePrompter, ChatTemplateStrategy
    from axolotl.prompt_strategies.completion import (
        CompletionPrompter,
        CompletionPromptTokenizingStrategy,
    )

    dataset, length = settings["datasets"][0], settings["sequence_len"]
    if dataset["type"] == "completion":
        strategy = CompletionPromptTokenizingStrategy(
            CompletionPrompter(), tokenizer, False, length, max_length=length * 64
        )
        strategy.field = "text"
        made = strategy.tokenize_prompt({"text": [row["text"] for row in rows]})
        return [*zip(made["input_ids"], made["labels"], strict=True)]
    mapping = dataset.get("message_property_mappings") or {
        "role": dataset.get("message_field_role", "role"),
        "content": dataset.get("message_field_content", "content"),
    }
    prompter = ChatTemplatePrompter(
        tokenizer,
        tokenizer.chat_template,
        message_property_mappings=mapping,
        field_messages=dataset.get("field_messages", "messages"),
    )
    # As StrategyLoader._get_strategy_params does.
    strategy = ChatTemplateStrategy(
        prompter, tokenizer, False, length, roles_to_train=["assistant"], train_on_eos="turn"
    )
    made = [strategy.tokenize_prompt(dict(row)) for row in rows]
    return [(row["input_ids"], row["labels"]) for row in made]


def factory_rows(tokenizer, name, settings, sources):
    """Return (ids, trained) of rows by LLaMA-Factory's own converters and processors."""
    from llamafactory.data.converter import get_dataset_converter
    from llamafactory.data.parser import DatasetAttr
    from llamafactory.data.processor.pairwise import PairwiseDatasetProcessor
    from llamafactory.data.processor.supervised import SupervisedDatasetProcessor
    from llamafactory.data.template import TEMPLATES

    data = SimpleNamespace(
        mask_history=settings.get("mask_history", False),
        train_on_prompt=False,
        cutoff_len=2048,
        media_dir=None,
    )
    pairs = settings["stage"] == "dpo"
    kind = PairwiseDatasetProcessor if pairs else SupervisedDatasetProcessor
    processor = kind(TEMPLATES["llama3"], tokenizer, None, data)
    found = []
    for entry, rows in zip(INFO[name], sources, strict=True):
        attr = DatasetAttr("file", name)
        attr.join(entry)
        converter = get_dataset_converter(attr.formatting, attr, data)
        for row in map(converter, rows):
            words = [row[f"_{key}"] for key in ("prompt", "response", "system", "tools")]
            made = processor._encode_data_example(*words, [], [], [])
            found += [made[:2], made[2:]] if pairs else [made]
    return found


def factors(name, warmup, total, **options):
    """Return the factor of each step by transformers' schedule."""
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = get_scheduler(name, optimizer, warmup, total, options)
    return _walk(optimizer, schedule, total)


def _walk(optimizer, schedule, total):
    found = []
    for _ in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def axolotl_factors(settings, total):
    """As TrainerBuilderBase._configure_warmup_and_logging and SchedulerMixin.create_scheduler."""
    import torch
    from axolotl.utils.schedulers import get_cosine_schedule_with_min_lr

    ratio = settings.get("warmup_ratio")
    warmup = settings.get("warmup_steps")
    if warmup is None:
        share = min(int(0.03 * total), 100) if ratio is None else int(ratio * total)
        warmup = 2 if share == 1 else share
    if "cosine_min_lr_ratio" in settings:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        schedule = get_cosine_schedule_with_min_lr(
            optimizer, warmup, total, min_lr_ratio=settings["cosine_min_lr_ratio"]
        )
        return _walk(optimizer, schedule, total)
    return factors(settings.get("lr_scheduler", "cosine"), warmup, total)


def axolotl_steps(settings, rows):
    batch = settings["micro_batch_size"] * settings["gradient_accumulation_steps"]
    return settings.get("max_steps") or math.ceil(len(rows) / batch) * settings["num_epochs"]


def factory_steps(settings, rows):
    batch = settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"]
    epochs = settings["num_train_epochs"]
    return settings.get("max_steps") or math.ceil(math.ceil(rows / batch) * epochs)


def short(rows):
    """Return ids and labels as texts: the ids, and 1 for each trained token."""
    return [
        [" ".join(map(str, ids)), "".join(str(int(label != -100)) for label in labels)]
        for ids, labels in rows
    ]


def write():
    """Write what the tools make of the configurations."""
    for name in ("torchaudio",):  # LLaMA-Factory imports it for sounds
        sys.modules.setdefault(name, ModuleType(name)).__spec__ = SimpleNamespace(name=name)
    import trl

    trl.AutoModelForCausalLMWithValueHead = object  # what it needs for PPO is gone in TRL 1
    from axolotl.loaders.adapter import find_all_linear_names
    from llamafactory.model.model_utils.misc import find_all_linear_modules
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = save_model(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
    found = {
        "linear layers of axolotl": sorted(find_all_linear_names(model)),
        "linear layers of LLaMA-Factory": sorted(find_all_linear_modules(model, True)),
    }
    for name, ([rows], settings) in AXOLOTL.items():
        total = axolotl_steps(settings, rows)
        found[name] = {
            "rows": short(axolotl_rows(tokenizer, settings, rows)),
            "factors": axolotl_factors(settings, total),
        }
    for name, (sources, settings) in FACTORY.items():
        total = factory_steps(settings, sum(map(len, sources)))
        warmup = math.ceil(settings.get("warmup_ratio", 0) * total)
        found[name] = {
            "rows": short(factory_rows(tokenizer, name, settings, sources)),
            "factors": factors(
                settings["lr_scheduler_type"],
                warmup,
                total,
                **settings.get("lr_scheduler_kwargs", {}),
            ),
        }
    MADE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    write()
