"""axolotl's data sets: their sources, their formats, and the tokens that are trained."""

from typing import Any

from ...base.errors import RecipeError
from ...recipe.tables import TEMPLATES
from . import sources
from .conversion import By, Conversion, Named, Rule, Same
from .conversion import name as text_of
from .shared_rules import SPEED

CHATS = ("chat_template", "sharegpt", "chat_template.default", "chat_template.argilla")
OWN_TEXT = (
    "axolotl writes a prompt of its own; here the model's chat template writes the row; use "
    "model.chat_template = FILE.jinja for other words"
)
KNOWN = {
    "system": {"system"},
    "user": {"user", "human"},
    "assistant": {"assistant", "gpt", "model", "chatgpt", "bot"},
    "tool": {"tool", "observation", "function_response", "tool_response"},
}
"""Role -> the names of it that plugsft reads."""
COLUMNS = ("messages", "conversations", "conversation")


def data(c: Conversion) -> None:
    """Write the sources, and what is trained in their rows."""
    key = "datasets" if c.get("datasets") else "pretraining_dataset"
    items = c.get(key)
    if not items:
        raise RecipeError(f"{c.path}: names no data; set datasets")
    items = items if isinstance(items, list) else [{"path": items}]
    parts: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        place = f"{key}[{index}]"
        _format(c, place, item, key)
        parts += _sources(c, place, item)
    sources.set_sources(c, parts, key)
    c.lines.update({f"data.{k}": line for k, line in _columns(c, items).items()})
    if c.on("train_on_inputs"):
        c.set("data.train_on", "all", "train_on_inputs")
        c.leave(
            "train_on_inputs",
            'data.train_on = "all" trains every token, and axolotl not the words of the template; '
            'use "assistant" for the answers alone',
        )
    else:
        c.set("data.train_on", "assistant", "train_on_inputs", comment="every answer")


def _sources(c: Conversion, place: str, item: dict[str, Any]) -> list[dict[str, Any]]:
    files = item.get("data_files")
    names = files if isinstance(files, list) else [files or item.get("path")]
    if any(name is None for name in names):
        raise RecipeError(f"{c.path}: {place} has no path; set it")
    if item.get("name") not in (None, "default", "main"):
        c.leave(f"{place}.name", sources.CONFIG)
    return [sources.part(name, item.get("split")) for name in names]


def _format(c: Conversion, place: str, item: dict[str, Any], key: str) -> None:
    """Name a format whose text differs, and roles that plugsft does not know."""
    kind = item.get("type")
    if isinstance(kind, str) and kind not in (*CHATS, "completion", "pretrain", "kto", None):
        c.leave(f"{place}.type", OWN_TEXT if c.get("rl") is None else PAIRS)
    roles = item.get("roles") or {}
    for role, names in roles.items():
        if not {*names} <= KNOWN.get(role, set()):
            c.leave(
                f"{place}.roles.{role}",
                "a row's roles are system, user, assistant or tool; rename them in the data",
            )
    if item.get("roles_to_train") not in (None, ["assistant"], ["gpt"], ["assistant", "gpt"]):
        c.leave(f"{place}.roles_to_train", "answers alone are trained; use data.train_on")
    if item.get("shards"):
        c.leave(f"{place}.shards", 'use a slice: data.split = "train[:10%]"')


PAIRS = (
    "axolotl writes these pairs in its own way; here the model's chat template writes prompt, "
    "chosen and rejected; use [data.columns] for other names"
)


def _columns(c: Conversion, items: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the lines of data.columns."""
    names: dict[str, str] = {}
    for item in items:
        messages = item.get("field_messages")
        if messages and messages not in COLUMNS:
            names["messages"] = messages
        text = item.get("field") or item.get("text_column")
        if text and text != "text":
            names["text"] = text
        for ours, theirs in (
            ("chosen", "field_chosen"),
            ("rejected", "field_rejected"),
            ("tools", "field_tools"),
            ("system", "field_system"),
        ):
            if item.get(theirs) not in (None, ours):
                names[ours] = item[theirs]
    if not names:
        return {}
    names = {ours: text_of(theirs) for ours, theirs in names.items()}
    c.set("data", names, comment="the names of field_messages, field, ...")
    return {"columns": c.lines.pop("data")}


def held_out(c: Conversion) -> bool:
    """Write the rows of evaluations; tell whether there are any."""
    tests = c.get("test_datasets")
    if tests:
        first = tests[0]
        files = first.get("data_files")
        c.set(
            "eval.source",
            str(files[0] if isinstance(files, list) else files or first["path"]),
            comment="test_datasets",
        )
        c.set("eval.split", str(first.get("split", "train")), comment="test_datasets")
        if len(tests) > 1:
            c.leave("test_datasets", "evaluations read one source; use one file for all")
        return True
    size = c.number("val_set_size", 0)
    return size > 0 and sources.hold_out(c, "val_set_size", size)


def chat_template(c: Conversion) -> None:
    """Write the chat template: a text becomes a file."""
    name, text = c.get("chat_template"), c.get("chat_template_jinja")
    if text is not None and "{" in str(text):
        c.files["jinja"] = str(text)
        c.set("model.chat_template", "FILE.jinja", comment="chat_template_jinja")
    elif text is not None:
        c.set("model.chat_template", str(text), "chat_template_jinja")
    elif name not in (None, "tokenizer_default", *TEMPLATES):
        c.leave(
            "chat_template",
            "axolotl brings a template of this name; here the model's own writes the rows; use "
            "model.chat_template = FILE.jinja for another",
        )


THOUGHTS = Same(
    ("thinking", "reasoning_content", "reasoning"),
    "thoughts are read from reasoning_content, thinking or reasoning; rename the column",
)
READ = (
    *("path", "data_files", "name", "split", "type", "roles_to_train", "shards", "field_messages"),
    *("field", "text_column", "field_chosen", "field_rejected", "field_tools", "field_system"),
)
"""Keys of a data set that `data` reads."""
OF_TYPE = (
    *("field_instruction", "field_input", "field_output", "field_system", "field"),
    *("system_prompt", "system_format", "format", "no_input_format"),
)
DATASET_RULES: dict[str, Rule] = {
    **{f"datasets[].{name}": By(data) for name in READ},
    **{f"pretraining_dataset[].{name}": By(data) for name in READ},
    "datasets[].roles": By(data, whole=True),
    **{f"test_datasets[].{name}": SPEED for name in ("path", "data_files", "split", "ds_type")},
    "test_datasets[].type": SPEED,  # as that of datasets
    "datasets[].ds_type": SPEED,
    "datasets[].field_human": Named(OWN_TEXT),
    "datasets[].field_model": Named(OWN_TEXT),
    "datasets[].message_property_mappings.role": Same(
        ("role", "from"), "a message has role or from; rename them in the data"
    ),
    "datasets[].message_property_mappings.content": Same(
        ("content", "value"), "a message has content or value; rename them"
    ),
    "datasets[].message_property_mappings": Named("rename these properties in the data"),
    "datasets[].message_field_role": Same(("role", "from"), "a message has role or from"),
    "datasets[].message_field_content": Same(("content", "value"), "use content or value"),
    "datasets[].message_field_training": Same(
        ("train", "weight"), "a message says with train or weight whether it is trained; rename it"
    ),
    "datasets[].message_field_training_detail": Named(
        "whole messages are trained; use train of a message"
    ),
    "datasets[].train_on_eos": Same(
        ("turn",), "the end of each trained answer is trained; use data.train_on"
    ),
    "datasets[].train_on_eot": Same(
        ("turn",), "the end of each trained answer is trained; use data.train_on"
    ),
    "datasets[].field_thinking": THOUGHTS,
    "datasets[].template_thinking_key": THOUGHTS,
    "datasets[].drop_system_message": Same((False,), "system messages stay; use data without them"),
    **{f"datasets[].type.{name}": Named(OWN_TEXT) for name in OF_TYPE},
    "datasets[].step_separator": Named("plugsft scores whole answers; use axolotl"),
    "datasets[].train_on_last_step_only": Named("plugsft scores whole answers; use axolotl"),
    "datasets[].split_thinking": Named("thoughts stay in their message; use data.template_kwargs"),
    "datasets[].trust_remote_code": Named("plugsft runs no code of data sets; download the files"),
    "datasets[].revision": Named("a source has no revision; download the files of this one"),
    "datasets[].chat_template": Named("one template writes all rows; use model.chat_template"),
    "shuffle_merged_datasets": Same(
        (True,), "rows are always shuffled; use a plugin that orders examples"
    ),
    "eot_tokens": SPEED,  # the template's end of a turn is trained
}
