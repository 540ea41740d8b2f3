"""plugsft chat: a model answers what it has learned."""

import fcntl
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
import torch
from conftest import ANSWERS, ROOT, must_succeed, run_plugsft, tables_by_heart, write_recipe
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from plugsft.base.errors import PlugsftError
from plugsft.export import chat as talk
from plugsft.export.answers import Answers
from plugsft.export.folder import model_folder
from plugsft.output.folder import LOCK
from plugsft.tokens.ends import stop_ids


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train a model that knows its answers by heart."""
    folder = tmp_path_factory.mktemp("talk")
    tables = tables_by_heart(folder, 80)
    tables["train"]["log_every"] = 80
    must_succeed(write_recipe(folder / "recipe.toml", tables))
    return folder / "run"


@pytest.fixture(scope="module")
def speaker(run):
    return talk.Speaker(*talk.load(model_folder(run)), max_tokens=64, temperature=0.0)


def test_questions_are_answered_in_order_and_nothing_else_is_printed(run):
    words = [word for question in ANSWERS for word in ("--ask", question)]
    result = must_succeed("chat", run, *words)
    assert result.stdout == "".join(f"{answer}\n" for answer in ANSWERS.values())
    assert run_plugsft("chat", run / "model", "--ask", "Who?").stdout == "Me.\n"


def test_an_empty_answer_gives_a_note(run, tmp_path):
    mute = shutil.copytree(run / "model", tmp_path / "mute")
    (mute / "manifest.json").unlink()
    config = json.loads((mute / "generation_config.json").read_text())
    config["eos_token_id"] = list(range(400))
    (mute / "generation_config.json").write_text(json.dumps(config))
    said = run_plugsft("chat", mute, "--ask", "Who?").stdout
    assert said == f"{talk.EMPTY}\n"
    assert run_plugsft("chat", mute, typed="Who?\n").stdout == f"{talk.EMPTY}\n"


def test_an_empty_streamed_answer_gives_a_note_and_any_other_does_not(speaker, capsys):
    tokenizer, end = speaker.tokenizer, speaker.stops[0]
    for ids, says in (([end], talk.EMPTY), ([*tokenizer.encode("Me."), end], "Me.")):
        streamer = talk.Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        streamer.put(speaker.encode([speaker.ask("Who?")])["input_ids"])
        for token in ids:
            streamer.put(torch.tensor([token]))
        streamer.end()
        assert capsys.readouterr().out == f"{says}\n"
    [answer] = speaker.answer([speaker.ask("Who?")], talk.Streamer(tokenizer, skip_prompt=True))
    assert answer in capsys.readouterr().out


def test_a_batch_answers_as_single_questions_do(speaker):
    alone = [speaker.answer([speaker.ask(question)])[0] for question in ANSWERS]
    assert alone == list(ANSWERS.values())
    assert speaker.answer([speaker.ask(question) for question in ANSWERS]) == alone


def test_answers_stop_where_the_template_ends_a_turn(run, speaker):
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    # As if the model's and the tokenizer's end of text were another token.
    tokenizer.eos_token = "<|pad|>"
    for config in (speaker.model.config, speaker.model.generation_config):
        config.eos_token_id = [tokenizer.pad_token_id]
    try:
        other = talk.Speaker(speaker.model, tokenizer, 64, 0.0)
        assert other.stops == [tokenizer.pad_token_id, end]
        assert other.answer([other.ask("Who?")]) == ["Me."]
        tokenizer.chat_template = None
        assert stop_ids(speaker.model, tokenizer) == [tokenizer.pad_token_id]
    finally:
        for config in (speaker.model.config, speaker.model.generation_config):
            config.eos_token_id = end


def test_without_a_template_the_text_goes_on(run, speaker):
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    tokenizer.chat_template = None
    plain = talk.Speaker(speaker.model, tokenizer, 64, 0.0)
    text = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    assert plain.answer([plain.ask(text)]) == ["Me."]


def test_max_tokens_and_temperature_are_used(run, speaker):
    short = talk.Speaker(speaker.model, speaker.tokenizer, 1, 0.0)
    assert short.answer([short.ask("What is red?")])[0] in ("B", "Bl", "Blo", "Blood")
    hot = talk.Speaker(speaker.model, speaker.tokenizer, 16, 50.0)
    assert len({hot.answer([hot.ask("Who?")])[0] for _ in range(4)}) > 1


def test_sampling_options_and_seeds_decide_the_answer(run):
    def answer(**options):
        speaker = talk.open_speaker(run / "model", Answers(max_tokens=16, **options))
        return speaker.answer([speaker.ask("Who?")])[0]

    hot = {"temperature": 50.0}
    assert answer(**hot, top_k=1) == answer(**hot, top_p=1e-6) == answer() == "Me."
    assert answer(temperature=1e-40) == "Me."
    assert answer(**hot, seed=1) == answer(**hot, seed=1) != answer(**hot, seed=2)
    # The question has the letters of "Me."'s end; with this penalty none of them comes again.
    assert answer(repetition_penalty=1e6) != "Me."
    words = ("--temperature", "50", "--top-k", "1", "--top-p", "0.5", "--seed", "1")
    assert run_plugsft("chat", run, "--ask", "Who?", *words).stdout == "Me.\n"


def test_a_system_message_goes_before_every_chat_or_is_refused(run, tmp_path):
    told = talk.open_speaker(run / "model", Answers(system="Be brief."))
    [turns] = told.encode([told.ask("Who?")])["input_ids"]
    text = told.tokenizer.decode(turns)
    assert text.index("system\nBe brief.") < text.index("user\nWho?")
    long = [*told.ask("red " * 120), {"role": "assistant", "content": "Me."}, *told.ask("Who?")]
    short = talk.shorten(told, long)
    assert short == told.ask("Who?")
    assert "Be brief." in told.tokenizer.decode(told.encode([short])["input_ids"][0])
    deaf = shutil.copytree(run / "model", tmp_path / "deaf")
    (deaf / "manifest.json").unlink()
    template = deaf / "chat_template.jinja"
    for jinja, says in (
        ("{{ raise_exception('System role not supported') }}", "refuses a system message: System"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "leaves out a"),
        (None, "needs a chat template"),
    ):
        template.write_text(jinja) if jinja else template.unlink()
        result = run_plugsft("chat", deaf, "--ask", "Who?", "--system", "Be brief.")
        assert result.returncode == 2 and says in result.stderr, result.stderr
        assert "put its text into the question" in result.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"top_p": 1.1, "temperature": 1}, "top_p = 1.1: it should be less than or equal to 1"),
        ({"top_p": 0.0, "temperature": 1}, "top_p = 0.0: it should be greater than 0"),
        ({"top_k": 0, "temperature": 1}, "top_k = 0: it should be greater than or equal to 1"),
        ({"top_k": 5}, "top_k has no effect at temperature 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty = 0.0: it should be greater than or"),
        (
            {"repetition_penalty": float("nan")},
            "repetition_penalty = nan: it should be a finite",
        ),
        ({"temperature": float("inf")}, "temperature = inf: it should be a finite number"),
        ({"seed": -1}, "seed = -1: it should be greater than or equal to 0"),
        ({"max_tokens": 0}, "max_tokens = 0: it should be greater than or equal to 1"),
    ],
)
def test_options_out_of_their_range_are_refused(options, says):
    with pytest.raises(PlugsftError, match=says):
        Answers(**options)


def test_the_answer_stays_within_the_context(speaker):
    endless = talk.Speaker(speaker.model, speaker.tokenizer, 64, 0.0)
    endless.stops = []
    question = endless.ask("Who? " * 25)
    room = 128 - endless.encode([question])["input_ids"].shape[1]
    assert 0 < room < 64
    steps = []
    handle = speaker.model.register_forward_pre_hook(lambda *given: steps.append(1))
    endless.answer([question])
    handle.remove()
    assert len(steps) == room


def test_first_and_last_tokens_are_added_where_no_template_writes_them(run, speaker):
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|pad|> $A", special_tokens=[("<|pad|>", 0)]
    )
    other = talk.Speaker(speaker.model, tokenizer, 64, 0.0)
    assert other.encode([other.ask("Who?")])["input_ids"][0, 0] != 0
    tokenizer.chat_template = None
    assert other.encode([other.ask("Who?")])["input_ids"][0, 0] == 0


def test_the_talk_is_remembered_until_the_context_is_full(speaker):
    turns = []
    for number in range(12):
        turns += [*speaker.ask("Who?"), {"role": "assistant", "content": f"Me {number}."}]
    turns += speaker.ask("What is red?")
    assert talk.shorten(speaker, turns[-3:]) == turns[-3:]
    kept = talk.shorten(speaker, turns)
    assert kept == turns[-len(kept) :] and 1 < len(kept) < len(turns)
    assert speaker.encode([kept])["input_ids"].shape[1] <= 96
    speaker.answer([kept])
    with pytest.raises(PlugsftError, match="model's context is 128"):
        speaker.answer([speaker.ask("red " * 200)])


def test_piped_lines_are_answered_until_they_end(run):
    result = run_plugsft("chat", run, typed="Who?\n\nWhat is red?\nexit\nWho?\n")
    assert result.returncode == 0 and not result.stderr, result.stderr
    first, *_ = result.stdout.splitlines()
    assert first == "Me." and result.stdout.count("Me.") == 1


@pytest.mark.slow
def test_on_a_terminal_answers_stream_and_ctrl_d_ends(run):
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "plugsft", "chat", str(run)]
    env = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(
        command, stdin=child, stdout=child, stderr=child, cwd=ROOT, env=env, start_new_session=True
    ) as process:
        os.close(child)

        def until(text):
            shown, end = "", time.monotonic() + 240
            while text not in shown:
                assert time.monotonic() < end and select.select([parent], [], [], 240)[0], shown
                shown += os.read(parent, 4096).decode()
            return shown

        assert "Ctrl-D" in until("> ")
        os.write(parent, b"Who?\n")
        assert "Me." in until("\r\n> ")
        os.write(parent, b"\x04")
        assert process.wait() == 0
    os.close(parent)


@pytest.mark.slow
def test_ctrl_c_ends_a_chat_with_one_line(run):
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "plugsft", "chat", str(run)]
    with subprocess.Popen(command, stdin=child, stdout=child, stderr=child, cwd=ROOT) as process:
        os.close(child)
        shown = b""
        while b"\n> " not in shown:
            assert select.select([parent], [], [], 240)[0], shown
            shown += os.read(parent, 4096)
        time.sleep(1)  # one that comes as the prompt is drawn is heard with a next key
        for _ in range(6):
            process.send_signal(signal.SIGINT)
            # Long enough to end: one that comes as Python itself goes away kills it.
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
                break
        process.kill()
        assert process.returncode == 0
        assert os.read(parent, 4096).endswith(b"\r\n")
    os.close(parent)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        ([], "no such folder; did you mean 'run'. name a run's output folder"),
        (["rum/"], "holds no model"),
        (["rum"], "is a file"),
        (["rum/run.json", "rum/metrics.jsonl"], "ended at step 3 of 9; .*recipe.toml --overwrite$"),
        (
            ["rum/run.json", "rum/checkpoints/step-000003/manifest.json"],
            "ended at step 0 of 9; .* --resume; plugsft export .* --to FOLDER",
        ),
        (["rum/config.json"], "no model could be loaded"),
    ],
)
def test_a_place_without_a_model_says_what_to_do(tmp_path, make, says):
    (tmp_path / "run").mkdir()
    for name in make:
        path = tmp_path / name
        if name.endswith("/"):
            path.mkdir(parents=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            steps = {"done": 0, "total": 9}
            path.write_text(
                json.dumps({"status": "running", "steps": steps, "step": 3, "loss": 1.0})
            )
    with pytest.raises(PlugsftError, match=says):
        talk.load(model_folder(tmp_path / "rum"))


def test_a_run_in_progress_is_waited_for(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"status": "running", "steps": {"total": 9}}))
    with open(tmp_path / LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(PlugsftError, match="has no model yet: its run is at step 0 of 9; wait"):
            model_folder(tmp_path)


def test_an_empty_question_is_refused(run):
    result = run_plugsft("chat", run, "--ask", " ")
    assert result.returncode == 2 and "empty question" in result.stderr
    result = run_plugsft("chat", run, "--top-p", "2", "--temperature", "1")
    assert (
        result.returncode == 2
        and "top_p = 2.0: it should be less than or equal to 1" in result.stderr
    )
