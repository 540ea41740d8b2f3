"""A chat and its loss, in plain transformers and torch."""

import os
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

IGNORED = -100


def load(folder: str | os.PathLike[str]) -> Any:
    """Load a model in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def encode(tokenizer: Any, messages: list[dict[str, str]], first: int = 0) -> tuple[Any, Any]:
    """Return a chat's tokens, and the labels of its answers and their stop tokens.

    Answers before the turn `first` are not labelled.
    """
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    spans = []
    for at, message in enumerate(messages):
        if message["role"] == "assistant" and at >= first:
            before = tokenizer.apply_chat_template(
                messages[:at], tokenize=False, add_generation_prompt=True
            )
            end = len(before) + len(message["content"]) + len("<|im_end|>")
            assert text[:end] == f"{before}{message['content']}<|im_end|>"
            spans.append((len(before), end))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    labels = [
        token if any(first <= start < end for first, end in spans) else IGNORED
        for token, (start, _) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    ]
    return encoded["input_ids"], labels


def token_nlls(model: Any, ids: list[int], labels: list[int]) -> Any:
    """Return the loss of each trained token of one row, which runs alone."""
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    losses = cross_entropy(logits, torch.tensor(labels)[1:], reduction="none")
    return losses[torch.tensor(labels)[1:] != IGNORED]
