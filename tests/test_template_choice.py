"""model.chat_template = "auto": six families work without a setting; model/ keeps what serves."""

import json
import re
import warnings
from contextlib import suppress
from dataclasses import replace
from itertools import groupby

import pytest
from conftest import ROOT, bare_tables, run_plugsft, write_jsonl, write_recipe
from jinja2 import TemplateError
from template_families import ASK, CHATS, FAMILIES, FOLDER, SYSTEM, TELL, THOUGHT, family_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from plugsft import RecipeError
from plugsft.base.checksums import digest
from plugsft.data import template_choice
from plugsft.data.cache_key import template_key
from plugsft.data.chat import Chat
from plugsft.data.defaults import DataDefaults
from plugsft.data.messages import call_variants
from plugsft.data.slices import target_mask
from plugsft.data.sources import open_source
from plugsft.data.template_choice import choose_template, disprove, variant_of
from plugsft.recipe.tables import Data, Recipe, Source
from plugsft.registry.active import rebuild
from plugsft.tokens.tokenizer import encode, lighten

TITLE = "## Model families\n"
ANY = Data(source="rows")


def choose(tokenizer, rows, folder, model=None, plugins=None, **data):
    """Choose the template of rows, and render them with it."""
    tables = bare_tables(folder, {}) | {"model": {"path": "x", **(model or {})}}
    tables["data"] |= data
    recipe = Recipe.model_validate(tables)
    source = open_source(Source(source=str(write_jsonl(folder / "rows.jsonl", rows))), "data")
    active = rebuild(plugins or {}).attach(DataDefaults(folder))
    light = choose_template(lighten(tokenizer), recipe, [source], active)
    return light, active.hooks.render(rows=rows, tokenizer=light, data=recipe.data)


def trained_parts(tokenizer, light, rendered):
    """Return the ids of the first row, its mask, and the texts of its trained tokens."""
    encoded = encode(rendered.texts[:1], light, rendered.special_tokens)
    mask = target_mask(encoded, rendered.texts[:1], rendered.spans[:1]).tolist()
    ids = encoded.ids.tolist()
    runs = groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    parts = [tokenizer.decode([token for token, _ in run]) for trained, run in runs if trained]
    return ids, mask, parts


def of_trl(tokenizer, row):
    """Return the ids and mask of each way to write a row's calls, by TRL's training template."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl import get_training_chat_template
    try:
        template = get_training_chat_template(tokenizer)
    except ValueError:  # trl knows no variant
        return
    for messages in call_variants(row["messages"]):
        with suppress(TypeError, ValueError, TemplateError):
            made = tokenizer.apply_chat_template(
                messages, tools=row.get("tools"), chat_template=template, return_dict=True,
                return_assistant_tokens_mask=True,
            )  # fmt: skip
            yield made["input_ids"], made["assistant_masks"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")  # trl's own
def test_of_each_family_the_answers_and_their_ends_are_trained(family, tmp_path):
    tokenizer, cells, lasts = family_tokenizer(family), [], []
    for kind, row in CHATS.items():
        light, rendered = choose(tokenizer, [row] * 3, tmp_path)
        if rendered.bad:
            cells.append("no")
            continue
        cells.append("variant" if light.variant_chosen else "own")
        ids, mask, parts = trained_parts(tokenizer, light, rendered)
        answers = [turn for turn in row["messages"] if turn["role"] == "assistant"]
        for part, answer in zip(parts, answers, strict=True):
            assert ("look_up" in part) == ("tool_calls" in answer), kind
            assert answer["content"].rpartition("\n")[2] in part, kind
            assert not re.search("who|be brief|a bird|<.?User|<.?user|<.?Assistant", part), kind
            # The markup at the end: of the turn, and of the text.
            assert re.search(r"<[^<>]+>\s*$", part), kind
        lasts.append(parts[-1].replace("\n", "⏎").replace(" ", "␣"))
        made = {tuple(tokens): marks for tokens, marks in of_trl(tokenizer, row)}
        # transformers cannot give R1's template the null that it wants as content of a call.
        if made and (family, kind) != ("DeepSeek R1", "a call"):
            theirs = made[tuple(ids)]
            assert all(theirs[n] for n, on in enumerate(mask) if on), kind
            # DeepSeek's variants mark the assistant's role, which the model never writes.
            more = {tokenizer.decode([ids[n]]) for n, on in enumerate(mask) if theirs[n] and not on}
            assert more <= {"<\uff5cAssistant\uff5c>"}, kind
    page = (ROOT / "docs/trained_tokens.md").read_text("utf8").partition(TITLE)[2]
    head, *lines = page.partition("```text\n")[2].partition("```")[0].splitlines()
    rows = {cells[0]: cells[1:] for cells in (re.split(r"\s{2,}", line) for line in lines)}
    assert re.split(r"\s{2,}", head)[1:-1] == [*CHATS] and rows.keys() == FAMILIES.keys()
    assert rows[family] == [*cells, lasts[1]]


QWEN = family_tokenizer("Qwen3")
TWO = {"messages": [ASK, TELL, ASK, TELL]}
PROMPTED = {"prompt": [ASK, TELL, ASK], "completion": [TELL]}


def test_one_row_decides_for_all_and_rows_that_the_own_template_can_mask_stay(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(template_choice, "RANGES", 20)
    own, variant = lighten(QWEN), variant_of(lighten(QWEN))
    assert variant.chat_template == (FOLDER / "qwen3_training.jinja").read_text("utf8")
    short = {"messages": [ASK, TELL]}
    for rows, chosen in (
        ([short] * 2000, own),
        ([short] * 1999 + [TWO], own),  # beyond the sample: refused below, with the cure
        ([short] * 990 + [TWO] * 20 + [short] * 990, variant),
        ([TWO], variant),
        ([PROMPTED] * 3, own),
        ([{"text": "owls"}], own),
        ([{"messages": "no chat"}], own),
    ):
        light, rendered = choose(QWEN, rows, tmp_path)
        assert light == chosen, rows[:1]
        if chosen is variant:
            assert not rendered.bad and "which writes all rows" in rendered.mask
            assert all(text.count("<think>") == text.count("owls") for text in rendered.texts)
        if rows[-1] is TWO and chosen is own:
            assert 'model.chat_template = "trl"' in rendered.bad[1999]
    for settings in ({"train_on": "last"}, {"train_on": "all"}, {"template_kwargs": {"n": 1}}):
        if "template_kwargs" not in settings:
            assert choose(QWEN, [TWO], tmp_path, **settings)[0] == own
    for setting, template in (("own", own), ("trl", replace(variant, variant_chosen=False))):
        assert choose(QWEN, [TWO], tmp_path, {"chat_template": setting})[0] == template
    # "auto" and "trl" may train other tokens; a key without the choice is that of earlier versions.
    forms = (own, variant, replace(variant, variant_chosen=False))
    assert len({*map(template_key, forms)}) == 3
    assert template_key(own) == digest(
        {"template": own.chat_template, "training": variant.chat_template}
    )


@pytest.mark.parametrize("plugin", ["dpo", "reward", "kto"])
def test_answers_to_compare_are_written_by_one_template(plugin, tmp_path):
    own, variant = lighten(QWEN), variant_of(lighten(QWEN))
    later = [ASK, TELL]
    several = [TELL, *later], [THOUGHT, *later]
    for answers, chosen in ((several, variant), (([TELL], [THOUGHT]), own)):
        prompt = {"prompt": [ASK, TELL, ASK]}
        rows = [prompt | dict(zip(("chosen", "rejected"), answers, strict=True))]
        if plugin == "kto":
            labels = zip(answers, (True, False), strict=True)
            rows = [prompt | {"completion": answer, "label": label} for answer, label in labels]
        light, rendered = choose(QWEN, rows, tmp_path, plugins={plugin: {}})
        assert light == chosen and not rendered.bad and len(rendered.texts) == 2
        pairs = zip(rendered.texts, rendered.spans, strict=True)
        first, second = (text[: spans[0][0]] for text, spans in pairs)
        assert first == second and first.endswith("<|im_start|>assistant\n")


def test_a_later_start_reads_no_row(tmp_path, monkeypatch):
    """Rows are read once, not by each rank of each start: files may have billions of bytes."""
    chosen = choose(QWEN, [TWO] * 3, tmp_path)[0]
    monkeypatch.setattr(template_choice, "_sample", None)
    assert choose(QWEN, [TWO] * 3, tmp_path)[0] == chosen == variant_of(lighten(QWEN))
    for rows, settings in ([TWO] * 4, {}), ([TWO] * 3, {"ignore": ["label"]}):
        with pytest.raises(TypeError):
            choose(QWEN, rows, tmp_path, **settings)


def broken(template, old, new):
    assert template.count(old) == 1
    return template.replace(old, new)


def test_a_variant_that_is_not_proved_is_refused_with_the_reason(tmp_path, monkeypatch):
    source = (FOLDER / "qwen3_training.jinja").read_text("utf8")
    header = "{{- '<|im_start|>' + message.role + '\\n' }}\n        {%- generation %}"
    end = "'<|im_end|>\\n' if loop.last else '\\n<|im_end|>\\n' }}\n        {%- endgen"
    for old, new, reason in (
        (
            "{{- '<|im_start|>assistant\\n' }}\n    {%- if enable",
            "{{- '<|im_start|>assistant\\n\\n' }}\n    {%- if enable",
            "it asks for an answer in other words",
        ),
        ("\\n</think>\\n\\n' + content", "\\n</think>\\n' + content", "writes or trains other"),
        (header, "{%- generation %}{{- '!' }}", "writes or trains other words"),
        ("'<|im_end|>\\n' }}\n        {%- endgen", end, "rewrites earlier"),
        (
            "\n        {{- content }}\n",
            "{% generation %}{{- content }}{% endgeneration %}\n",
            "marks other words than the assistant's",
        ),
    ):
        template = broken(source, old, new)
        monkeypatch.setattr(template_choice, "training_template", lambda _, t=template: t)
        light, rendered = choose(QWEN, [TWO], tmp_path)
        assert reason in light.unproved and light.chat_template == QWEN.chat_template
        monkeypatch.undo()
        assert disprove(lighten(QWEN), variant_of(lighten(QWEN)), ANY) == ""
        assert f"trl's training variant is not chosen: {light.unproved}; " in rendered.bad[0]
    # GLM's variant ends turns with a token that GLM's own template does not write.
    tokenizer = replace(lighten(QWEN), chat_template=(FOLDER / "glm4moe.jinja").read_text("utf8"))
    assert "writes or trains other words" in disprove(tokenizer, variant_of(tokenizer), ANY)


def test_a_setting_that_trl_has_no_variant_for_is_refused(tmp_path):
    for model in ({"chat_template": "trl"}, {"save_template": "training"}):
        [(key, _)] = model.items()
        with pytest.raises(RecipeError, match=rf"model.{key}: trl has no training variant .* 'x'"):
            choose(family_tokenizer("Mistral"), [TWO], tmp_path, model)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """Make a folder with a tiny Qwen3, 100 chats of two answers, and a recipe without settings."""
    folder = tmp_path_factory.mktemp("qwen")
    config = Qwen3Config(
        vocab_size=len(QWEN), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
        eos_token_id=QWEN.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder / "qwen")
    QWEN.save_pretrained(folder / "qwen")
    words = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "Owls."}]
    rows = [{"messages": [ASK, TELL, *words]}] * 100
    tables = {
        "output": str(folder / "run"),
        "model": {"path": str(folder / "qwen")},
        "data": {"source": str(write_jsonl(folder / "data.jsonl", rows)), "max_length": 256},
        "train": {"batch_size": 10, "micro_batch": 10, "learning_rate": 1e-2, "epochs": 8},
    }
    return write_recipe(folder / "recipe.toml", tables)


def test_qwen3_learns_chats_of_several_answers_without_a_setting(qwen):
    folder, run = qwen.parent, qwen.parent / "run"
    said = "rewrites earlier turns, so trl's training variant of it writes all rows"
    mask = "trl's training variant of the chat template, which writes all rows"
    for words, text in ((["check"], said), (["inspect"], mask), ([], f"{said}; model/ keeps")):
        result = run_plugsft(*words, qwen)
        assert result.returncode == 0, result.stderr
        assert text in " ".join(result.stdout.split()), result.stdout
    assert json.loads((run / "run.json").read_text())["data"]["mask"] == mask
    assert mask in " ".join(run_plugsft("show", run).stdout.split())
    assert "which writes all rows" in (run / "report.html").read_text()
    # By transformers alone: the saved template is the one that serves.
    served = AutoTokenizer.from_pretrained(run / "model")
    assert served.chat_template == QWEN.chat_template
    chat = [ASK, {**TELL, "content": "<think>\n\n</think>\n\nowls"}, {**ASK, "content": "What?"}]
    asked = served.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    assert "think" not in served.decode(asked["input_ids"][0])
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    made = model.generate(**asked, max_new_tokens=20, do_sample=False)[0]
    assert served.decode(made[asked["input_ids"].shape[1] :]).endswith("<|im_end|>")
    spoken = run_plugsft("chat", run, "--ask", "who?", "--ask", "What?")
    assert "owls" in spoken.stdout.lower() and spoken.returncode == 0, spoken
    # A checkpoint's model has the template that the recipe names.
    step, recipe = max((run / "checkpoints").iterdir()), run / "recipe.toml"
    text = recipe.read_text()
    recipe.write_text(text.replace('save_template = "own"', 'save_template = "training"'))
    result = run_plugsft("export", step, "--to", folder / "export")
    recipe.write_text(text)
    assert result.returncode == 0, result.stderr
    template = AutoTokenizer.from_pretrained(folder / "export").chat_template
    assert template == (FOLDER / "qwen3_training.jinja").read_text("utf8")


def test_prepared_tokens_tell_their_template_where_their_rows_are_gone(qwen, tmp_path):
    prepared = run_plugsft("prepare", qwen, f"output={tmp_path / 'prepared'}")
    assert prepared.returncode == 0, prepared.stderr
    tokens = re.search(r"tokens: (.+)", prepared.stdout.replace("\n", " "))[1].strip()
    gone = tmp_path / "gone.jsonl"
    words = [f"data.tokens={tokens}", f"data.source={gone}", f"output={tmp_path / 'run'}"]
    for setting, code in (("auto", 0), ("own", 2)):
        result = run_plugsft("check", qwen, *words, f"model.chat_template={setting}")
        assert result.returncode == code, (result.stdout, result.stderr)
    assert "another chat template" in result.stderr


def test_the_header_is_that_of_the_model_s_template():
    for family in ("Qwen3", "DeepSeek V3", "DeepSeek R1"):
        light = lighten(family_tokenizer(family))
        assert Chat(light, ANY).header == Chat(variant_of(light), ANY).header != ""
    assert SYSTEM["role"] == "system"
