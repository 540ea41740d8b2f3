"""docs/serving.md: the names of adapters of models that see, and what finds them."""

import pytest
import torch
import transformers
from families import shrink
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn import Linear
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

# Of transformers: what peft still calls by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
# Facts of vLLM 0.33.0: the prefixes that `hf_to_vllm_mapper` of each class replaces, in order, also
# in names of adapters (https://github.com/vllm-project/vllm/tree/v0.33.0/vllm/model_executor/models:
# qwen3_vl.py, qwen3_5.py, gemma3_mm.py, gemma4_mm.py, mistral3.py, mllama4.py). Left out are towers
# and heads.
LANGUAGE = {"model.language_model.": "language_model.model."}
PREFIXES = {
    "Qwen3_5": LANGUAGE,
    "Qwen3_5Moe": LANGUAGE,
    "Qwen3VL": LANGUAGE,
    "Gemma3": LANGUAGE,
    "Gemma4": LANGUAGE | {"model": "language_model.model"},
    "Mistral3": LANGUAGE | {"model.": "language_model.model."},
    "Llama4": {},
}
READS_TEXT_NAMES = {"Gemma4", "Mistral3"}
"""Of these vLLM also finds the names of the class that only reads text."""
IDS = torch.arange(5, 25)[None]


def in_vllm(family, name):
    """Return the name of a module in vLLM."""
    for old, new in PREFIXES[family].items():
        if name.startswith(old):
            name = new + name.removeprefix(old)
    return name


def published(family):
    """Return a tiny model of the class that is published."""
    kind = getattr(transformers, f"{family}ForConditionalGeneration")
    return kind(kind.config_class.from_dict(shrink(kind.config_class().to_dict())))


@pytest.mark.parametrize("family", PREFIXES)
def test_vllm_finds_adapters_by_the_names_of_the_published_class(family):
    with torch.device("meta"):
        model = published(family)
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, Linear) and "language_model" in name and ".layers." in name
    ]
    assert names
    for name in names:
        layer = name[name.index("layers.") :]
        wanted = f"language_model.model.{layer}"
        assert in_vllm(family, name) == wanted
        # The class that only reads text calls it so.
        assert (in_vllm(family, f"model.{layer}") == wanted) == (family in READS_TEXT_NAMES)


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
def test_transformers_finds_both_names_in_the_text_class_and_one_in_the_published(tmp_path):
    torch.manual_seed(0)
    plain = published("Qwen3_5").eval()
    plain.save_pretrained(tmp_path / "base")
    readers = {"text": AutoModelForCausalLM, "published": AutoModelForImageTextToText}
    found = {}
    for names, trained in readers.items():
        config = LoraConfig(r=2, target_modules=r".*layers\.\d+\.mlp\.\w+_proj")
        config.base_model_name_or_path = str(tmp_path / "base")
        model = get_peft_model(trained.from_pretrained(tmp_path / "base"), config).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.normal_()
        expected = model(input_ids=IDS).logits
        folder = tmp_path / names
        model.save_pretrained(folder)
        for reader, auto in readers.items():
            base = auto.from_pretrained(tmp_path / "base")
            by_peft = PeftModel.from_pretrained(base, folder)
            for tool, one in (("transformers", auto.from_pretrained(folder)), ("peft", by_peft)):
                logits = one.eval()(input_ids=IDS).logits
                found[names, reader, tool] = torch.allclose(logits, expected, atol=1e-5)
                if not found[names, reader, tool]:  # it is the base, without adapters
                    torch.testing.assert_close(logits, plain(input_ids=IDS).logits)
    assert [key for key, right in found.items() if not right] == [
        ("text", "published", "transformers"),
        ("text", "published", "peft"),
        ("published", "text", "peft"),
    ]
