"""Tiny tokenizers with the chat templates of six model families, and chats to write with them."""

import re
from functools import cache
from pathlib import Path

import trl
from conftest import TEXT
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(trl.__file__).parent / "chat_templates"
# Family -> its template, and the tokens that begin and end a text.
FAMILIES = {
    "Qwen3": (FOLDER / "qwen3.jinja", None, "<|im_end|>"),
    "Llama 3": (FOLDER / "llama3.jinja", "<|begin_of_text|>", "<|eot_id|>"),
    "Gemma 3": (FOLDER / "gemma3.jinja", "<bos>", "<eos>"),
    "Mistral": (Path(__file__).with_name("mistral.jinja"), "<s>", "</s>"),
    "Phi 3.5": (FOLDER / "phi3_5.jinja", "<s>", "<|endoftext|>"),
    "DeepSeek V3": (
        FOLDER / "deepseekv3.jinja",
        "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    ),
    "DeepSeek R1": (
        FOLDER / "deepseek_r1_distill.jinja",
        "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    ),
}
MARKUP = re.compile(
    r"<[|\uff5c][^<>'\"|\uff5c]+[|\uff5c]>|</?think>|<(?:start|end)_of_turn>|\[/?[A-Z_]+\]"
)

ASK, TELL = {"role": "user", "content": "who?"}, {"role": "assistant", "content": "owls"}
SYSTEM = {"role": "system", "content": "be brief"}
THOUGHT = {"role": "assistant", "content": "<think>\nat night\n</think>\n\nowls"}
FUNCTION = {"name": "look_up", "arguments": {"word": "owl"}}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdef123", "type": "function", "function": FUNCTION}],
}
RESULT = {"role": "tool", "name": "look_up", "tool_call_id": "abcdef123", "content": "a bird"}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
CHATS = {
    "one answer": {"messages": [ASK, TELL]},
    "two answers": {"messages": [ASK, TELL, ASK, TELL]},
    "system prompt": {"messages": [SYSTEM, ASK, TELL, ASK, TELL]},
    "a call": {"messages": [ASK, CALL, RESULT, TELL]},
    "tools": {"messages": [ASK, CALL, RESULT, TELL], "tools": [TOOL]},
    "thoughts": {"messages": [ASK, THOUGHT, ASK, THOUGHT]},
}


@cache
def family_tokenizer(family):
    """Return a tiny byte-level tokenizer with a family's template and special tokens."""
    path, begin, end = FAMILIES[family]
    template = path.read_text("utf8")
    special = sorted({*MARKUP.findall(template), end, *([begin] if begin else [])})
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + 300,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator([TEXT], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=begin, eos_token=end, pad_token=end
    )
    tokenizer.chat_template = template
    return tokenizer
