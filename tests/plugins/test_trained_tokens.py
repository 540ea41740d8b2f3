"""docs/trained_tokens.md: plugsft and TRL train each row as its table says."""

import re
import warnings
from itertools import pairwise
from types import SimpleNamespace

import pytest
from conftest import ROOT
from datasets import Dataset
from dpo_steps import prepared_by_trl
from formats import ASK, TELL, tokenizer_of

from plugsft.data.defaults import DataDefaults
from plugsft.data.jsonl import RowList
from plugsft.data.slices import ShardWriter
from plugsft.data.sources import slices_of
from plugsft.recipe.tables import Data, Source
from plugsft.registry.active import rebuild
from plugsft.tokens.shards import write_index
from plugsft.tokens.store import Tokens
from plugsft.tokens.tokenizer import lighten

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl import SFTTrainer, get_training_chat_template

pytestmark = pytest.mark.filterwarnings("ignore")  # trl's own

OTHER = {"role": "assistant", "content": "5"}
ROWS = {
    "messages": {"messages": [ASK, TELL]},
    "prompt, completion: chats": {"prompt": [ASK], "completion": [TELL]},
    "preference: chats": {"prompt": [ASK], "chosen": [TELL], "rejected": [OTHER]},
    'prompt, completion: "who?␣", owls': {"prompt": "who? ", "completion": "owls"},
    'prompt, completion: "who?␣", 5': {"prompt": "who? ", "completion": "5"},
    'preference: prompt "who?␣"': {"prompt": "who? ", "chosen": "owls", "rejected": "5"},
    "preference: no prompt": {"chosen": "who? owls", "rejected": "who? 5"},
}
TEMPLATES = {"ChatML": "chatml", "Qwen2.5": "qwen2_5", "Llama 3": "llama3", "none": None}
PAGE = (ROOT / "docs/trained_tokens.md").read_text("utf8")
TABLE = [
    re.split(r"\s{2,}", line)
    for line in PAGE.partition("```text\n")[2].partition("```")[0].splitlines()[1:]
]


def of_trl(tokenizer, row):
    """Return [(ids, mask)] of a row as TRL's trainers prepare it."""
    if "chosen" in row:
        [pair] = prepared_by_trl(tokenizer, [row])
        return [(ids, [place >= begin for place in range(len(ids))]) for ids, begin in pair]
    chats = "messages" in row
    names = ("dataset_num_proc", "max_length", "dataset_kwargs", "shuffle_dataset", "packing")
    args = SimpleNamespace(
        **dict.fromkeys(names), dataset_text_field="text", assistant_only_loss=chats
    )
    trainer = SimpleNamespace(
        _tokenizer=tokenizer,
        chat_template=get_training_chat_template(tokenizer) if chats else None,
        completion_only_loss="prompt" in row,
    )
    rows = Dataset.from_list([row])
    [made] = SFTTrainer._prepare_dataset(trainer, rows, tokenizer, args, False, None, "train")
    return [(made["input_ids"], [label != -100 for label in made["labels"]])]


def of_ours(tokenizer, row, folder):
    """Return [(ids, mask)] of a row as plugsft prepares it."""
    plugins = {"dpo": {}} if "chosen" in row else {}
    hook = rebuild(plugins).attach(DataDefaults(folder)).hooks
    sources = [Source(source="rows")]
    work = ShardWriter(
        Data(source="rows"), sources, lighten(tokenizer), folder, plugins, _hooks=hook
    )
    [part] = slices_of([RowList([row])], [Data(source="x")])
    write_index(folder, [work.tokenize(part)], {"key": ""})
    tokens = Tokens(folder)
    ids, mask = (some.tolist() for some in tokens.example(0))
    cuts = [0, *tokens.sequences([0])[0].cumsum().tolist()]
    return [(ids[a:b], mask[a:b]) for a, b in pairwise(cuts)]


def shown(tokenizer, made):
    """Write what is trained as the table does."""
    texts = [
        tokenizer.decode([one for one, on in zip(ids, mask, strict=True) if on])
        for ids, mask in made
    ]
    return " ".join(text.replace("\n", "⏎").replace(" ", "␣") for text in texts)


def test_the_table_has_every_row():
    assert {line[1] for line in TABLE} == ROWS.keys() and len(TABLE) == 13


@pytest.mark.parametrize(("template", "row", "here", "there"), TABLE)
def test_what_is_trained_is_what_the_page_says(tmp_path, template, row, here, there):
    tokenizer = tokenizer_of("BPE", TEMPLATES[template])
    ours, theirs = of_ours(tokenizer, ROWS[row], tmp_path), of_trl(tokenizer, ROWS[row])
    assert [ids for ids, _ in ours] == [ids for ids, _ in theirs]
    assert (shown(tokenizer, ours), shown(tokenizer, theirs)) == (here, there)
