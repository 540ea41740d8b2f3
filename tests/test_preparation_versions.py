"""Each stage of preparation on fixed inputs: a changed output needs a new version.

python tests/test_preparation_versions.py records versions and outputs again.
"""

import hashlib
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from conftest import ROOT, tiny_tables
from formats import ROWS
from tokenizers import decoders, models, pre_tokenizers, processors

from plugsft.base.types import Rendered, Shard, Slice
from plugsft.data.chat import CHATML
from plugsft.data.defaults import DataDefaults
from plugsft.data.examples import make_examples, trained_mask
from plugsft.data.jsonl import RowList
from plugsft.data.prepare import VERSIONS
from plugsft.data.slices import ShardWriter, render
from plugsft.data.sources import open_source
from plugsft.recipe.tables import Data, Source
from plugsft.registry.load import resolve
from plugsft.tokens.tokenizer import Tokenizer

GOLDEN = ROOT / "tests/golden/stages.json"
TEXTS = [
    "who? owls",
    "naïve cafés\n\n 東京 🦉",
    "",
    "a" * 40,
    " two  spaces ",
    "<|im_end|>\n12 345",
]
TEMPLATES = {
    "chatml": CHATML.read_text("utf8"),
    "plain": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    "marked": "{% for m in messages %}[{{ m['role'] }}]{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}</s>{% endgeneration %}{% else %}{{ m['content'] }}"
    "{% endif %}{% endfor %}",
}
FORGETTING = """
    {%- set questions = messages | selectattr("role", "equalto", "user") | list -%}
    {%- for m in messages -%}
        <|im_start|>{{ m.role + "\\n" -}}
        {%- if m.thinking and messages[loop.index0:] | select("in", questions) | list == [] -%}
            <think>{{ m.thinking }}</think>
        {%- endif -%}
        {{- m.content }}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor -%}
        <|im_end|>{{ "\\n" }}
    {%- endfor -%}
    {%- if add_generation_prompt %}<|im_start|>assistant{{ "\\n" }}{% endif -%}
""".strip()
"""It leaves out the thoughts before the last question, as many do."""
CALL = {"type": "function", "function": {"name": "hoot", "arguments": {"times": 2}}}
STEPS = [
    {"role": "user", "content": "who?"},
    {"role": "assistant", "content": "", "thinking": "an owl", "tool_calls": [CALL]},
    {"role": "tool", "content": "hoot hoot"},
    {"role": "assistant", "content": "owls", "thinking": "as heard"},
    {"role": "user", "content": "and whose?"},
    {"role": "assistant", "content": "the owl's", "thinking": "its own"},
]
PAIR = ROWS["preference"]
PAIRS = [
    PAIR,
    {name: value for name, value in PAIR.items() if name != "prompt"}
    | {side: [*PAIR["prompt"], *PAIR[side]] for side in ("chosen", "rejected")},
    {"prompt": "6 x 7 is ", "chosen": "42", "rejected": " forty"},
    {"chosen": "the owl hoots", "rejected": "the owl barks", "weight": 3},
]


def tokenizer(template="chatml"):
    """Make a byte-level tokenizer of a few merges, the same in every version of the library."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("o", "w"), ("ow", "l"), ("Ġ", "a"), ("w", "h"), ("wh", "o"), ("Ġ", "owl")]
    vocab = {name: number for number, name in enumerate([*names, *map("".join, merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    number = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", number)]
    )
    source = TEMPLATES.get(template, FORGETTING)
    return Tokenizer(backend, source, {"eos_token": "<|im_end|>"})


def files(folder):
    """Write the same few rows in each kind of file."""
    rows = [{"text": text, "n": number} for number, text in enumerate(TEXTS)]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    lines += ["", "no JSON", "[1]", '{"text": "half \\ud83e", "deep": [[{"a": null}]]}']
    (folder / "unix.jsonl").write_bytes("\n".join(lines).encode())
    (folder / "windows.jsonl").write_bytes("\ufeff".encode() + "\r\n".join(lines).encode())
    (folder / "array.json").write_text(json.dumps(rows, indent=1))
    pq.write_table(pa.Table.from_pylist(rows), folder / "table.parquet")
    (folder / "table.csv").write_text('text,n,m\nNA,1,1\n007,2,x\n"a, b",,1.10\n')
    return sorted(folder.iterdir())


def read(folder):
    """Rows of files, whole and in parts."""
    found = {}
    for path in files(folder):
        opened = open_source(Source(source=str(path)))
        middle = len(opened) // 2
        parts = [opened, opened.part(0, middle), opened.part(middle, len(opened))]
        # Which rows are bad counts, and not in which words that is said.
        found[path.name] = [
            [row if isinstance(row, dict) else None for row in part.read(0, len(part))]
            for part in parts
        ]
    return found


def hooks(folder, **plugins):
    recipe, active = resolve(tiny_tables(folder) | {"plugins": plugins})
    return active.attach(DataDefaults(recipe.folder)).hooks


def rendered(hook, rows, template, **data):
    made = render(hook, Data(source="x", **data), "x", rows, tokenizer(template))
    # Which rows are bad counts, and not in which words that is said, nor what columns hold there.
    columns = {name: [values[row] for row in made.rows] for name, values in made.columns.items()}
    return [made.texts, made.spans, made.rows, made.special_tokens, sorted(made.bad), columns]


def render_all(folder):
    """Texts, spans and refusals of every format, template and choice of what is trained."""
    hook, found = hooks(folder), {}
    for kind, row in ROWS.items():
        if kind == "preference":
            continue
        more = [row, {**row, "label": 1}, {**row, "score": 2}, {**row, "weight": 0.5}]
        for template in TEMPLATES:
            for train_on in ("assistant", "last", "all"):
                name = f"{kind} {template} {train_on}"
                found[name] = rendered(hook, more, template, train_on=train_on)
    found["chains"] = rendered(hook, [{"messages": STEPS}], "forgetting")
    return found


def pairs(folder):
    """Texts and spans of preferences."""
    hook = hooks(folder, dpo={})
    return {
        f"{template} {number}": rendered(hook, [row], template)
        for template in TEMPLATES
        for number, row in enumerate(PAIRS)
    }


def arrays(examples):
    """Return the arrays of examples under the names that the recorded outputs have for them."""
    return {
        "pieces" if name == "num_sequences" else name: array
        for name, array in vars(examples).items()
        if name not in ("columns", "starts")
    }


def encode_all(folder):
    """Ids, counts and ends, also of a text that is only encoded in part."""
    rows = [{"text": text} for text in [*TEXTS, "owls hunt " * 4000]]
    work = ShardWriter(
        Data(source="x", max_length=16), [Source(source="x")], tokenizer(), folder, {}, None
    )
    part = Slice(0, 0, len(rows), RowList(rows))
    work._hooks = hooks(folder)
    shard, examples = work._prepare(part)
    return {
        str(special): vars(tokenizer().encode_texts(TEXTS, special)) for special in (False, True)
    } | {"long": [arrays(examples), shard.truncated]}


def mask(folder):
    """Examples of texts and spans, cut and left out."""
    texts = [*TEXTS, "owls? yes", "owls? no"]
    spans = [[(0, 4)], [(2, 9), (12, 14)], [], [(5, 5)], [(0, 99)], [(3, 10)], [(6, 9)], [(6, 8)]]
    made = Rendered(texts, spans, rows=[0, 1, 2, 3, 4, 5, 6, 6])
    found = {}
    for too_long in ("truncate", "drop"):
        for limit in (4, 64):
            shard, encoded = Shard(""), tokenizer().encode_texts(texts, False)
            data = Data(source="x", max_length=limit, too_long=too_long)
            targets = trained_mask(encoded, made)
            examples = make_examples(encoded, targets, made, np.arange(7), data, shard)
            left_out = [shard.too_long, shard.truncated, sorted(shard.bad.values())]
            found[f"{too_long} {limit}"] = [arrays(examples), *left_out]
    return found | chains()


def chains():
    """Chains of a row, cut and left out."""
    texts = ["owls? yes. whose? ours", "owls? no"]
    made = Rendered(texts, [[(6, 10), (18, 22)], [(6, 8)]], rows=[0, 0], turns=[0, 1])
    encoded, found = tokenizer().encode_texts(texts, False), {}
    for too_long in ("truncate", "drop"):
        for limit in (5, 10, 15):
            shard, data = Shard(""), Data(source="x", max_length=limit, too_long=too_long)
            targets = trained_mask(encoded, made)
            examples = make_examples(encoded, targets, made, np.arange(1), data, shard)
            left_out = [shard.too_long, shard.truncated, shard.warnings]
            found[f"chains {too_long} {limit}"] = [arrays(examples), *left_out]
    return found


STAGES = {"read": read, "render": render_all, "pairs": pairs, "encode": encode_all, "mask": mask}


def outputs(folder):
    """Return each stage's version and a checksum of its output."""

    def plain(value):
        return value.tolist() if isinstance(value, np.ndarray) else str(value)

    found = {}
    for name, stage in STAGES.items():
        place = folder / name
        place.mkdir()
        text = json.dumps(stage(place), default=plain, sort_keys=True)
        # Where the files of a test lie is no part of its output.
        text = text.replace(str(place), "")
        found[name] = {
            "version": VERSIONS[name],
            "output": hashlib.sha256(text.encode()).hexdigest()[:16],
        }
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return outputs(tmp_path_factory.mktemp("stages"))


def test_every_stage_has_a_version():
    assert VERSIONS.keys() == STAGES.keys()


@pytest.mark.parametrize("name", STAGES)
def test_an_output_changes_with_its_version_only(found, name):
    recorded = json.loads(GOLDEN.read_text())[name]
    if found[name]["version"] == recorded["version"]:
        assert found[name]["output"] == recorded["output"], (
            f"the output of '{name}' has changed: raise VERSIONS['{name}'] "
            "beside the cache key, then run python tests/test_preparation_versions.py"
        )
    else:
        assert found[name] == recorded, (
            "run python tests/test_preparation_versions.py to record this version"
        )


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        GOLDEN.write_text(json.dumps(outputs(Path(folder)), indent=1) + "\n")
