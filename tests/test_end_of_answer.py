"""A saved model ends its answers where `plugsft chat` ends them."""

import json
import re

import pytest
import torch
from conftest import must_succeed, tiny_tables, write_recipe
from formats import FOLDER
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from plugsft.data.load_tokenizer import data_tokenizer, load_tokenizer
from plugsft.export import chat
from plugsft.recipe.tables import Model
from plugsft.tokens.ends import end_generation

# A template of each family, and the token that ends an assistant's turn in it.
ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseekv3": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "gemma3": "<end_of_turn>",
    "gptoss": "<|return|>",
    "lfm2": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "nemotron_3_nano": "<|im_end|>",
    "phi3": "<|end|>",
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
}
WORDS = ["[UNK]", "<|begin|>", "<|endoftext|>", "owls", "fly", "far"]


def tokenizer_with(template):
    """Return a tokenizer that has the special words of a template, and another end of text."""
    special = sorted({*re.findall(r"<[^<>\s'\"]+>", template)} - {*WORDS})
    vocabulary = {word: number for number, word in enumerate([*WORDS, *special])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="[UNK]",
        bos_token="<|begin|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=special,
    )
    made.chat_template = template
    return made


def answering(tokenizer, end):
    """Make a model that says "owls fly", the end of a turn, and then "far" for ever."""
    size = len(tokenizer)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size + size % 2,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    owls, fly, far = map(tokenizer.convert_tokens_to_ids, ("owls", "fly", "far"))
    follows = dict.fromkeys(range(size), owls) | {owls: fly, fly: end, end: far, far: far}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(torch.eye(*model.model.embed_tokens.weight.shape))
        for token, following in follows.items():
            model.lm_head.weight[following, token] = 1.0
    return model


@pytest.mark.parametrize("name", ENDS)
def test_plain_generation_stops_where_chat_does(tmp_path, name):
    tokenizer = tokenizer_with((FOLDER / f"{name}.jinja").read_text("utf8"))
    end = tokenizer.convert_tokens_to_ids(ENDS[name])
    assert end != tokenizer.unk_token_id
    model = answering(tokenizer, end)
    end_generation(model, tokenizer)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    # By transformers alone, with nothing but the folder.
    plain, words = (
        kind.from_pretrained(tmp_path) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    talk = [{"role": "user", "content": "far"}]
    asked = words.apply_chat_template(
        talk, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    made = plain.generate(**asked, max_new_tokens=9, do_sample=False)[0]
    made = made[asked["input_ids"].shape[1] :].tolist()
    assert made == [*words.convert_tokens_to_ids(["owls", "fly"]), end]
    speaker = chat.Speaker(plain, words, 9, 0.0)
    assert speaker.answer([talk]) == ["owls fly"]


def test_a_model_without_a_template_keeps_its_own_end(tmp_path):
    tokenizer = tokenizer_with("<|im_end|>")
    tokenizer.chat_template = None
    model = answering(tokenizer, tokenizer.convert_tokens_to_ids("<|im_end|>"))
    end_generation(model, tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_stop_ids_are_read_in_the_vocabulary_that_they_number(tmp_path):
    """Those of a model, where model.tokenizer is another's: their numbers are ordinary words."""
    tokenizer = tokenizer_with("{{ messages[0].content }}<|im_end|>")
    own, other = tmp_path / "own", tmp_path / "other"
    tokenizer.save_pretrained(own)
    far, end = map(tokenizer.convert_tokens_to_ids, ("far", "<|im_end|>"))
    for folder, stops in ((other, [far]), (own, [end])):
        folder.mkdir(exist_ok=True)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))

    def stops_of(**model):
        model = Model(**{name: str(folder) for name, folder in model.items()})
        return data_tokenizer(load_tokenizer(model, tmp_path), model, "").stops

    ends = [tokenizer.eos_token, "<|im_end|>"]
    assert stops_of(path=own) == stops_of(path=other, tokenizer=own) == ends


def test_a_run_writes_it(tiny, tmp_path):
    """The base ends its texts otherwise than the template that it is trained with."""
    must_succeed(tiny(train={"steps": 1}), f"output={tmp_path / 'base'}")
    base = tmp_path / "base/model"
    (base / "manifest.json").unlink()
    for name in ("config.json", "generation_config.json"):
        table = json.loads((base / name).read_text())
        (base / name).write_text(json.dumps(table | {"eos_token_id": 0}))
    config = json.loads((base / "tokenizer_config.json").read_text())
    config["eos_token"] = config["pad_token"]
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    tables = tiny_tables(tmp_path) | {"model": {"path": str(base)}}
    tables["train"] |= {"steps": 1}
    must_succeed(write_recipe(tmp_path / "again.toml", tables))
    written = json.loads((tmp_path / "run/model/generation_config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/model")
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in written["eos_token_id"]


def test_odd_values_for_generating_are_saved_as_they_were_published(tmp_path):
    """transformers warns of them, and refuses to save them once another value has changed."""
    tokenizer = tokenizer_with((FOLDER / "lfm2.jinja").read_text("utf8"))
    answering(tokenizer, 0).save_pretrained(tmp_path / "base")
    odd = {"eos_token_id": 0, "temperature": 0.6, "top_p": 0.9, "pad_token_id": -1}
    (tmp_path / "base/generation_config.json").write_text(json.dumps(odd))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    end_generation(model, tokenizer)
    model.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved/generation_config.json").read_text())
    assert len(saved.pop("eos_token_id")) > 1
    assert all(saved[name] == odd[name] for name in saved.keys() & odd.keys())
    assert saved.keys() >= {"temperature", "top_p"}
