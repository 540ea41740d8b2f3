"""What a model writes, and how likely rows are to it, with plain transformers."""

from typing import Any

import torch
from peft import AutoPeftModelForCausalLM
from plain import encode, load, token_nlls
from rows import Row
from transformers import AutoTokenizer

TOKENS, BATCH = 96, 20
"""The most tokens of an answer; how many answers are written at a time."""
STOP = "<|im_end|>"


class Measured:
    """The base model with a run's tokenizer and template, or with its adapters, too."""

    def __init__(self, base: str, run: str, trained: bool) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(run)
        if trained:
            self.model = AutoPeftModelForCausalLM.from_pretrained(run).merge_and_unload()
        else:
            self.model = load(base)
        self.model.eval()

    def nlls(self, messages: list[Row], first: int = 0) -> Any:
        """The losses of the tokens of a chat's answers, but for those before the turn `first`."""
        with torch.no_grad():
            return token_nlls(self.model, *encode(self.tokenizer, messages, first))

    def loss(self, chats: list[list[Row]]) -> float:
        """The mean loss of a token of their answers."""
        return float(torch.cat([self.nlls(chat) for chat in chats]).mean())

    def gain(self, pair: Row) -> float:
        """The log-probability of a pair's chosen answer, less that of the rejected one."""
        asked = pair["prompt"]
        chosen, rejected = (
            self.nlls(asked + pair[answer], len(asked)).sum() for answer in ("chosen", "rejected")
        )
        return float(rejected - chosen)

    def prompt(self, row: Row) -> Any:
        """A row's question as the model reads it."""
        return self.tokenizer.apply_chat_template(
            row["prompt"], tools=row.get("tools"), add_generation_prompt=True, tokenize=False
        )

    def write(self, rows: list[Row]) -> list[str]:
        """The model's answers to their prompts, the likeliest token each time."""
        prompts = [self.prompt(row) for row in rows]
        order = sorted(range(len(prompts)), key=lambda at: len(prompts[at]))
        written: dict[int, str] = {}
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            texts = [prompts[at] for at in batch]
            inputs = self.tokenizer(
                texts,
                add_special_tokens=False,
                padding=True,
                padding_side="left",
                return_tensors="pt",
            )
            ids = self.model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
            answers = self.tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :])
            written.update(zip(batch, answers, strict=True))
        # Behind its end, an answer of a batch is filled up with the same token.
        parts = [written[at].partition(STOP) for at in range(len(prompts))]
        return [answer.strip() + ("" if stop else " ...") for answer, stop, _ in parts]

    def calls(self, row: Row, answer: str) -> list[Row]:
        """The calls in an answer, as transformers reads them back; none if they are malformed."""
        try:
            message = self.tokenizer.parse_response(answer + STOP, prefix=self.prompt(row))
        except ValueError:
            return []
        calls = [call["function"] for call in message.get("tool_calls", [])]
        whole = all(isinstance(call, dict) and {"name", "arguments"} <= {*call} for call in calls)
        return calls if whole else []
