"""Weights of rows are exact under FSDP2 and ZeRO-3; a row of weight 0 has no influence."""

import json

import pytest
import torch
from conftest import ROOT, chats, run_launch, run_ranks, write_jsonl
from gradients import weighted_loss
from plugin_packages import activate, install
from transformers import AutoModelForCausalLM

from plugsft.tokens.store import Tokens

POISONS = """
    import numpy as np
    import torch

    @plugin(before=["dpo_reference"])
    class Poisons:
        '''Make hidden states NaN, of tokens that only rows of weight 0 have.'''

        poisoned: bool = state(False)

        @hookimpl(wrapper=True)
        def add_columns(self, model):
            tokens = yield
            if self.poisoned:  # then these are the evaluation's
                return tokens
            counts = tokens.columns["weight"] > 0
            counted, others = (tokens.gather(np.flatnonzero(c))[0] for c in (counts, ~counts))
            ids = torch.from_numpy(np.setdiff1d(others, counted))
            modules = model.module.modules()
            embeddings = next(m for m in modules if isinstance(m, torch.nn.Embedding))

            def poison(_, inputs, hidden):
                return hidden.masked_fill(torch.isin(inputs[0], ids)[..., None], torch.nan)

            embeddings.register_forward_hook(poison)
            self.poisoned = len(ids) > 0
            return tokens
"""
PAIRS = [
    {"prompt": "who? ", "chosen": "owls" + " hoot" * (n % 5), "rejected": "elks"} for n in range(12)
]
KINDS = {
    "padded": (1, chats(12), {}, 4),
    "packed": (2, chats(12), {"bfd_packing": {"capacity": 100}, "fused_loss": {"chunk": 7}}, 1),
    "pairs, and empty micro-batches": (
        1,
        PAIRS,
        {"dpo": {"nll": 1.0}, "dpo_reference": {"probes": 20}},
        1,
    ),
}
OF_THE_CLOCK = {"tokens_per_second", "step_seconds", "data_wait_seconds", "memory_gib"}


def with_weight_0(rows):
    """Give every third row the weight 0 and the letter Z; the others count 1, 2, 1, 2."""
    result = [{**row, "weight": (1, 2, 0)[number % 3]} for number, row in enumerate(rows)]
    for row in result[2::3]:
        if "prompt" in row:
            row["prompt"] = "ZZ " + row["prompt"]
        else:
            first, *others = row["messages"]
            row["messages"] = [{**first, "content": "ZZ " + first["content"]}, *others]
    return result


def read_all(run):
    """Return the metrics of steps and evaluations that a second run must repeat."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{name: line[name] for name in line.keys() - OF_THE_CLOCK} for line in lines]


@pytest.mark.parametrize("kind", KINDS)
def test_nan_in_a_row_of_weight_0_changes_nothing(tiny, tmp_path, monkeypatch, kind):
    activate(install(tmp_path / "site", poisons=POISONS), monkeypatch)
    ranks, rows, plugins, micro_batch = KINDS[kind]
    rows = with_weight_0(rows)
    evaluation = {"source": str(write_jsonl(tmp_path / "eval.jsonl", rows[:6])), "every": 2}
    runs = [tmp_path / name for name in ("healthy", "poisoned")]
    for run, poisons in zip(runs, ({}, {"poisons": {}}), strict=True):
        recipe = tiny(
            rows,
            train={"batch_size": 12, "micro_batch": micro_batch, "steps": 2},
            eval=evaluation,
            plugins=plugins | poisons,
            output=str(run),
        )
        result = run_ranks(ranks, recipe)
        assert result.returncode == 0, result.stderr
    healthy, poisoned = map(read_all, runs)
    assert healthy == poisoned
    assert all(0 <= line["padding"] < 1 for line in healthy if "padding" in line)
    files = [(run / "model/model.safetensors").read_bytes() for run in runs]
    assert files[0] == files[1]


TRAIN = {"learning_rate": 3e-3, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
LIMIT = 0.5
"""The norm that gradients are clipped to: lower than every norm here."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", "zero3"])
def test_sharded_models_learn_weighted_rows_like_plain_torch(tiny, tmp_path, monkeypatch, kind):
    """With gradient accumulation, ranks with unequal tokens, and NaN in rows of weight 0."""
    activate(install(tmp_path / "site", poisons=POISONS), monkeypatch)
    rows = with_weight_0(chats(16))
    rows[1]["weight"], rows[3]["weight"] = 0.25, 3.5
    evaluation = {"source": str(write_jsonl(tmp_path / "eval.jsonl", rows[:9])), "every": 2}
    sizes = {"batch_size": 16, "micro_batch": 3, "steps": 2, "max_grad_norm": LIMIT}
    recipe = tiny(rows, train=TRAIN | sizes, eval=evaluation, plugins={"poisons": {}})
    config = ROOT / f"recipes/accelerate/{kind}.yaml"
    words = ("--config_file", config, "--num_processes", 2, "-m", "plugsft", recipe)
    code, _, err = run_launch(*words)
    assert code == 0, err
    run = tmp_path / "run"
    first, second, evaluated = read_all(run)
    assert min(first["imbalance"], second["imbalance"]) > 1.02

    stored = [Tokens(folder) for folder in (run / "tokens").iterdir()]
    training, others = sorted(stored, key=len, reverse=True)
    [scratch] = (run / "scratch").glob("model-*")
    model = AutoModelForCausalLM.from_pretrained(scratch)
    decayed, exempt = ([p for p in model.parameters() if (p.dim() > 1) == c] for c in (True, False))
    groups = [{"params": decayed}, {"params": exempt, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, betas=(TRAIN["beta1"], TRAIN["beta2"]), weight_decay=TRAIN["weight_decay"]
    )
    for line in (first, second):
        for group in optimizer.param_groups:
            group["lr"] = line["learning_rate"]
        optimizer.zero_grad()
        loss, divisor = weighted_loss(model, training, range(len(training)))
        (loss / divisor).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        assert line["loss"] == pytest.approx(loss.item() / divisor, rel=1e-5)
        assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-5) and norm > LIMIT
    with torch.no_grad():
        loss, divisor = weighted_loss(model, others, range(len(others)))
    assert evaluated["eval_loss"] == pytest.approx(loss.item() / divisor, rel=1e-5)
    trained = AutoModelForCausalLM.from_pretrained(run / "model").state_dict()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(trained[name], weight, rtol=1e-4, atol=2e-5)
