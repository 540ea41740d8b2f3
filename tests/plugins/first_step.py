"""First steps of tiny runs on preferences, to compare with TRL's; and rows of pairs."""

import random
from functools import cached_property
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from conftest import TEXT, tiny_tables

from plugsft.base.machine import look
from plugsft.data.chat import CHATML
from plugsft.loop import forward_backward
from plugsft.registry.load import resolve
from plugsft.start.open import open_recipe

NAMES = ("input_ids", "attention_mask", "labels")
# What TRL trains of a turn is all behind what it gives a model to write it.
LIKE_TRL = (
    CHATML.read_text()
    .replace("{% endgeneration %}\n", "\n{% endgeneration %}")
    .replace(
        "{%- else -%}\n{{ message['content'] }}<|im_end|>\n{%- endif %}{{ '\\n' }}",
        "{%- else -%}\n{{ message['content'] }}<|im_end|>{{ '\\n' }}\n{%- endif %}",
    )
)


def say(words, role="assistant"):
    return {"role": role, "content": words}


def ask(words):
    return say(words, "user")


def pairs(count, seed=0):
    """Make rows of a prompt and two answers, of various lengths."""
    rng = random.Random(seed)

    def words(most):
        return " ".join(rng.choices(TEXT.split(), k=rng.randint(2, most)))

    rows = []
    for _ in range(count):
        prompt = [ask(words(8))]
        if rng.random() < 0.4:
            prompt = [say("be brief", "system"), *prompt, say(words(5)), ask(words(6))]
        rows.append({"prompt": prompt, "chosen": [say(words(14))], "rejected": [say(words(14))]})
    return rows


ROWS = pairs(8, seed=3)


def like_trl(folder):
    """Return the table of a model whose chats are trained as TRL trains them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "like.jinja").write_text(LIKE_TRL)
    return {"chat_template": str(folder / "like.jinja")}


class FirstStep:
    """An opened run, and the global batch of its first step, which has all rows."""

    def __init__(self, folder, rows, plugins, model, train=None, **others):
        self.rows = rows
        tables = tiny_tables(folder, rows) | others
        tables["model"] = model if "path" in model else tables["model"] | model
        tables["plugins"] = plugins
        tables["train"] |= {"batch_size": len(rows)} | (train or {})
        recipe, active = resolve(tables)
        # An earlier test of this process may have left another kind of run.
        AcceleratorState._reset_state(reset_partial_state=True)
        self.run = open_recipe(recipe, active, look())
        self.folder, self.tokenizer = Path(self.run.model.load.path), self.run.tokenizer
        self.model, self.plan = self.run.module, self.run.plan.plan_step(1)

    @cached_property
    def batches(self):
        """The micro-batches of the step."""
        load, tokens = self.run.loader.load_batch, self.run.tokens
        return [load(tokens, examples) for examples in self.plan.layout[0]]

    def losses(self):
        """Return the loss and the metrics of the step; leave its gradients behind."""
        batch = next(self.run.global_batches())
        loss = sum(float(part) for part in forward_backward(self.run, batch))
        sums = self.run.active.metrics(self.run)
        return loss, {name: float(value) / self.plan.denominator for name, value in sums.items()}


def shaken(model, much=0.05, seed=3):
    """Move what is trained in a model."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                moved = torch.randn(parameter.shape, generator=draw) * much
                parameter += moved.to(parameter.device)
    return model


def logps_of(model, run):
    """Return the log-probabilities and lengths of answers, each computed alone."""
    sums, counts = [], []
    for batch in run.batches:
        for ids, there, labels in zip(*(batch[name] for name in NAMES), strict=True):
            count = int(there.sum())
            logits = model(input_ids=ids[None, :count]).logits[0, :-1].double()
            picked = labels[1:count] != -100
            found = logits.log_softmax(-1).gather(1, ids[1:count, None])[:, 0][picked]
            sums.append(found.sum())
            counts.append(len(found))
    return torch.stack(sums).view(-1, 2), torch.tensor(counts).view(-1, 2)


def text_pairs(prompt=""):
    """Make rows of plain texts, which these trainers read without a chat template."""
    return [
        {
            "prompt": prompt or f"{row['prompt'][-1]['content']}\n",
            "chosen": row["chosen"][0]["content"],
            "rejected": row["rejected"][0]["content"],
        }
        for row in pairs(6, seed=3)
    ]
