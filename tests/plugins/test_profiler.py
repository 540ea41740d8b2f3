"""profiler: where time went; each rule reports its own fault and no other."""

import gzip
import json
import re

import pytest
import torch
from conftest import (
    chats,
    must_succeed,
    only_full,
    read_metrics,
    read_record,
    run_launch,
    run_plugsft,
    run_ranks,
)
from launching import config
from peft import LoraConfig, get_peft_model
from plugin_packages import activate, install
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from plugsft.plugins.profiler.clock import PARTS
from plugsft.plugins.profiler.flops import peak_flops, shapes_of

# peft 0.21 asks the model for an attribute that transformers 5.23 calls otherwise.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

# Sleeps where it is told to, so many milliseconds.
SLEEPER = """
    import os
    import time

    @plugin()
    class Sleeper:
        slow: dict[str, float] | None = None
        rank: int = -1

        def sleep(self, part):
            if self.rank in (-1, int(os.environ.get("RANK", "0"))):
                time.sleep((self.slow or {}).get(part, 0) / 1e3)

        @hookimpl(wrapper=True)
        def collate(self):
            batch = yield
            self.sleep("wait")
            return batch

        @hookimpl(wrapper=True)
        def step(self):
            loss = yield
            self.sleep("forward")
            if loss.requires_grad:
                loss.register_hook(lambda _: self.sleep("backward"))
            return loss + 0  # the profiler's hook is on this tensor, and comes first

        @hookimpl(wrapper=True)
        def optimizer(self):
            optimizer = yield
            # Before the hook of the profiler, which ends the part.
            optimizer.register_step_post_hook(lambda *_: self.sleep("optimizer"))
            return optimizer

        @hookimpl
        def logged(self):
            self.sleep("logging")
"""


@pytest.fixture
def sleeper(tmp_path, monkeypatch):
    activate(install(tmp_path, sleeper=SLEEPER), monkeypatch)


def profiled(recipe, run=run_plugsft, *words):
    """Run a recipe; return what its profile says, and what the console did."""
    done = run(recipe, *words)
    assert done.returncode == 0, done.stderr
    folder = re.search(r"model: (.*)/model\n", done.stdout)[1]
    with open(f"{folder}/profile.json") as file:
        return json.load(file), done.stdout


def spent(profile, part, rank=0):
    return profile["seconds_a_step"][rank][part]


TRAIN = {"batch_size": 8, "micro_batch": 8, "steps": 10, "epochs": 9}


def test_time_is_reported_where_it_was_spent(tiny, tmp_path, sleeper):
    planted = {"wait": 40.0, "forward": 60.0, "backward": 50.0, "optimizer": 30.0, "logging": 20.0}
    recipe = tiny(train=TRAIN, plugins={"profiler": {}, "sleeper": {"slow": planted}})
    profile, said = profiled(recipe)
    for part, milliseconds in planted.items():
        assert milliseconds / 1e3 <= spent(profile, part), part
    assert profile["steps"] == 8  # but for the first two
    assert set(profile["shares"]) == set(PARTS)
    assert sum(profile["shares"].values()) == pytest.approx(1, abs=0.002)
    steps = [line["step_seconds"] for line in read_metrics(tmp_path / "run")][2:]
    # The loop's own clock stops before it logs, and saves.
    later = ("logging", "evaluation", "checkpoint")
    inside = sum(spent(profile, part) for part in PARTS if part not in later)
    assert inside == pytest.approx(sum(steps) / len(steps), rel=0.05)
    assert re.search(
        r"plugin profiler: [\d.]+ s a step: wait \d+%, .*MFU \d+% of [\d.]+ TFLOP", said
    )
    record = read_record(tmp_path / "run")
    assert record["profile"]["shares"] == profile["shares"]
    page = (tmp_path / "run/report.html").read_text()
    share = f"{profile['shares']['backward']:.0%}"
    assert f"<dt>backward</dt><dd>{share}</dd>" in page.partition("Where the time went")[2]


def test_nothing_else_is_learned(tiny, tmp_path):
    curves = []
    for name, plugins in (("plain", {}), ("profiled", {"profiler": {}})):
        held_out = {"every": 4, "split": "train[:8]"}
        recipe = tiny(train=TRAIN | {"micro_batch": 3}, eval=held_out, plugins=plugins)
        must_succeed(recipe, f"output={tmp_path / name}")
        curves.append([(line["loss"], line["grad_norm"]) for line in read_metrics(tmp_path / name)])
    assert curves[0] == curves[1] and len(curves[0]) == 10


def test_checkpoints_and_evaluations_are_timed_apart_from_logging(tiny, sleeper):
    recipe = tiny(
        train=TRAIN | {"steps": 6},
        eval={"every": 1, "split": "train[:8]"},
        checkpoint={"every": 1},
        plugins={"profiler": {}, "sleeper": {"slow": {"logging": 30.0}}},
    )
    profile, said = profiled(recipe)
    assert spent(profile, "checkpoint") > 0 and spent(profile, "evaluation") > 0
    assert spent(profile, "logging") >= 0.03
    assert "raise checkpoint.every from 1" in said or "raise eval.every from 1" in said


def findings(recipe, *words, run=run_plugsft):
    return profiled(recipe, run, *words)[0]["findings"]


def test_waiting_for_data(tiny, sleeper):
    plugins = {"profiler": {}, "sleeper": {"slow": {"wait": 200.0}}}
    found = findings(tiny(train=TRAIN, plugins=plugins))
    told = r"waited \d\d% for data: add \[plugins.async_collate\]"
    assert any(re.fullmatch(told, one) for one in found), found
    plugins["async_collate"] = {}
    found = findings(tiny(train=TRAIN, plugins=plugins), "--overwrite")
    assert any("though [plugins.async_collate] is on" in one for one in found), found
    plugins["sleeper"] = {}
    assert not any(
        "wait" in one for one in findings(tiny(train=TRAIN, plugins=plugins), "--overwrite")
    )


def long_and_short(count):
    rows = chats(count)
    for row in rows[::8]:
        row["messages"][-1]["content"] *= 12
    return rows


def test_padding(tiny):
    rows = long_and_short(80)
    found = findings(tiny(rows=rows, train=TRAIN, plugins={"profiler": {}}))
    assert any(re.fullmatch(r"padding \d\d%: add \[plugins.bfd_packing\]", one) for one in found)
    packed = {"profiler": {}, "bfd_packing": {"capacity": 512}}
    train = TRAIN | {"micro_batch": 1}
    found = findings(tiny(rows=rows, train=train, plugins=packed), "--overwrite")
    assert not any("padding" in one for one in found)


def test_operators_too_small_for_their_calls(tiny):
    often = TRAIN | {"micro_batch": 1, "steps": 40}
    found = findings(tiny(train=often, plugins={"profiler": {}}))
    assert any(
        re.fullmatch(
            r"launch-bound: \d{2,3} operators of \d{1,2} us in a forward: "
            r"raise train.micro_batch from 1 to 4",
            one,
        )
        for one in found
    ), found
    packed = {"profiler": {}, "bfd_packing": {"capacity": 64, "overlong": "truncate"}}
    found = findings(tiny(train=often, plugins=packed), "--overwrite")
    assert any("raise plugins.bfd_packing.capacity from 64 to" in one for one in found), found


def wide(folder):
    """Make a model whose head is most of it, and its tokenizer."""
    config = LlamaConfig(
        vocab_size=30_000,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=512,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@only_full
def test_a_head_that_takes_the_memory(tiny, tmp_path):
    made = run_plugsft("prepare", tiny())
    tokenizer = re.search(r"tokenizer: (/.*)\n", made.stdout)[1]
    model = {"scratch": None, "path": str(wide(tmp_path / "wide")), "tokenizer": tokenizer}
    rows = chats(96)
    train = TRAIN | {"batch_size": 64, "micro_batch": 64, "steps": 4}
    model = {name: value for name, value in model.items() if value is not None}
    recipe = tiny(rows=rows, train=train, plugins={"profiler": {}})
    text = recipe.read_text()
    start, end = text.index("[model.scratch]"), text.index("[data]")
    lines = "".join(f'{name} = "{value}"\n' for name, value in model.items())
    recipe.write_text(f"{text[:start]}[model]\n{lines}\n{text[end:]}")
    profile, _ = profiled(recipe, run_plugsft, "--overwrite")
    [said] = [finding for finding in profile["findings"] if "loss head" in finding]
    share = int(re.fullmatch(r"loss head (\d\d)% of memory: add \[plugins.fused_loss\]", said)[1])
    with_head = read_record(tmp_path / "run")["memory"]["peak_gib"]
    recipe.write_text(recipe.read_text() + "\n[plugins.fused_loss]\n")
    assert not any("head" in one for one in findings(recipe, "--overwrite"))
    without = read_record(tmp_path / "run")["memory"]["peak_gib"]
    assert share / 100 == pytest.approx(1 - without / with_head, rel=0.3)


def test_the_slowest_rank(tiny, sleeper):
    plugins = {"profiler": {}, "sleeper": {"slow": {"forward": 400.0}, "rank": 1}}
    recipe = tiny(train=TRAIN | {"micro_batch": 4}, plugins=plugins)

    def ranks(*words):
        return run_ranks(2, *words)

    profile, said = profiled(recipe, ranks)
    assert len(profile["seconds_a_step"]) == 2
    assert spent(profile, "forward", 1) > spent(profile, "forward", 0) + 0.3
    assert any(
        re.match(r"others wait \d\d% for rank 1, the slowest", finding)
        for finding in profile["findings"]
    )
    assert said.count("profile: others wait") == 1


def test_a_healthy_run_gets_no_advice(tiny):
    """Batches that fill, operators that compute, nothing saved: as a run should be."""
    recipe = tiny(
        rows=chats(120),
        model={"scratch": {"hidden": 192, "layers": 2, "heads": 4, "vocab": 400, "context": 2048}},
        data={"max_length": 2048},
        train=TRAIN | {"batch_size": 60, "micro_batch": 1, "steps": 5},
        checkpoint={"every": 0},
        plugins={"profiler": {}, "async_collate": {}, "bfd_packing": {"capacity": 2048}},
    )
    profile, said = profiled(recipe)
    assert profile["findings"] == [] and "profile:" not in said
    assert 0.02 < profile["mfu"] < 2  # what else runs here slows the large product, too


def test_a_trace_is_written_for_perfetto(tiny, tmp_path):
    recipe = tiny(train=TRAIN | {"steps": 5}, plugins={"profiler": {"trace": [3, 5]}})
    profile, _ = profiled(recipe)
    assert profile["steps"] == 1, "what is traced does not count"
    files = sorted((tmp_path / "run/profile").glob("*"))
    assert [file.name for file in files] == [f"step-00000{n}-rank-0.json.gz" for n in (3, 5)]
    events = json.loads(gzip.decompress(files[0].read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"forward", "aten::mm"} & names == {"forward", "aten::mm"}
    assert any("Optimizer.step" in str(name) for name in names)


def test_a_step_that_never_comes_is_not_waited_for(tiny, tmp_path):
    recipe = tiny(train=TRAIN | {"steps": 5}, plugins={"profiler": {"trace": [3, 99]}})
    result = run_plugsft(recipe)
    assert result.returncode == 2 and not (tmp_path / "run/run.json").exists()
    assert result.stderr == (
        "error: plugins.profiler.trace: step 99 does not exist; the run has 5 steps\n"
    )


def test_a_run_that_is_stopped_early_has_no_profile(tiny, tmp_path):
    result = run_plugsft(tiny(train=TRAIN | {"steps": 2}, plugins={"profiler": {}}))
    assert result.returncode == 0 and not (tmp_path / "run/profile.json").exists()


@only_full
@pytest.mark.parametrize("name", ["cpu2", "fsdp2", "zero3"])
def test_every_rank_of_every_kind(tiny, tmp_path, name):
    recipe = tiny(train=TRAIN | {"micro_batch": 2, "steps": 6}, plugins={"profiler": {}})
    code, _, err = run_launch(*config(name), "-m", "plugsft", recipe)
    assert code == 0, err
    profile = json.loads((tmp_path / "run/profile.json").read_text())
    assert len(profile["seconds_a_step"]) == 2
    seen = ["forward", "backward", "optimizer"]
    assert all(one[part] > 0 for one in profile["seconds_a_step"] for part in seen)
    steps = [line["step_seconds"] for line in read_metrics(tmp_path / "run")][2:]
    shares = profile["shares"]
    inside = 1 - sum(shares[part] for part in ("logging", "evaluation", "checkpoint"))
    whole = read_record(tmp_path / "run")["plugins"][0]["summary"]
    seconds = float(re.match(r"([\d.e-]+) s a step", whole)[1])
    assert inside * seconds == pytest.approx(sum(steps) / len(steps), rel=0.1)


SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_work_is_what_is_computed(tied, lora):
    config = LlamaConfig(**SHAPE, tie_word_embeddings=tied, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config)
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    ids = torch.randint(64, (1, 40))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    # Plain attention computes those that are masked, too.
    expected = shapes_of(model).flops(40, 40 * 40)
    assert expected == pytest.approx(counter.get_total_flops(), rel=0.06 if lora else 0.01)


def test_of_experts_those_count_that_are_chosen():
    dense = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE))
    config = MixtralConfig(**SHAPE, num_local_experts=8, num_experts_per_tok=2)
    sparse = AutoModelForCausalLM.from_config(config)
    three = 3 * 64 * 96 * 6
    router = 8 * 64 * 6
    assert shapes_of(sparse).trained == shapes_of(dense).trained + three + router


def test_a_gpu_that_is_known_has_its_data_sheet_s_rate(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    for dtype in ("bfloat16", "float16"):
        assert peak_flops(torch.device("cuda"), dtype) == (989e12, "H200, from its data sheet")
    rate, said = peak_flops(torch.device("cpu"), "float32")
    assert 1e9 < rate < 1e14 and said == "measured with a large matrix product"


def test_the_work_of_a_run_is_that_of_its_documents(tiny, tmp_path):
    """Steps of one example: their length is known."""
    train = {"batch_size": 1, "micro_batch": 1, "steps": 12}
    profile, _ = profiled(tiny(train=train, plugins={"profiler": {}}))
    shapes = shapes_of(AutoModelForCausalLM.from_pretrained(tmp_path / "run/model"))
    lengths = [line["tokens"] for line in read_metrics(tmp_path / "run")][2:]
    [parts] = profile["seconds_a_step"]
    done = profile["flops_per_second"] * sum(parts.values()) * len(lengths)
    assert done == pytest.approx(sum(shapes.flops(n, n * n / 2) for n in lengths), rel=1e-3)
