"""The model card of a run's model: README.md, from the run's record."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import tomli_w
from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from ...base.console import hide_queries
from ...base.errors import PlugsftError
from ...base.limits import parse_toml, read_text
from ...base.step_folders import parse_step
from ...output.folder import ADAPTER, base_model
from ...output.report import number, read_metrics, read_record, table_of
from ...recipe.capabilities import Capability
from ..hub_names import is_hub_name
from .model_folder import is_reward_model

CARD = "README.md"
"""The file of a model card."""
MARK = re.compile(r"\n<!-- written by plugsft: ([0-9a-f]{16}) -->\n*\Z")
"""The last line of a card: the checksum of the text above, which an edit changes."""
TAGGED = (
    "adapters",
    "labelled_answers",
    "preference_pairs",
    "quantized_base",
    "reward_model",
)
"""Capabilities whose plugins are tags of the card."""
ABSOLUTE = re.compile(r"(?<![\w.:/])/(?:[^\s/,;:\"']+/)+([^\s/,;:\"']+)")
"""A path of this machine in a text."""
SECRET = re.compile(
    r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abp]-|AKIA)[\w-]{16,}|(?<=://)[^\s/@\"'`|]+(?=@)"
)
"""A token of a service, or the user and password in an address; a card may be public."""


def model_card(output: Path, model: Path, place: str) -> str | None:
    """Return the card of a run's model; None if no run is known.

    `output` is the run's folder, its model or a checkpoint. `model` is the folder that the card is
    for, `place` the name that loads it.
    """
    folder = run_of(output)
    if folder is None:
        return None
    try:
        run = read_record(folder)
        if output.parent.name == "checkpoints" or (output / "state.json").is_file():
            run |= as_of(folder, parse_step(output))
        body = "\n\n".join(filter(None, sections(run, folder, model, place)))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None  # another version's record, or a damaged one
    text = hide_queries(
        SECRET.sub("***", f"---\n{metadata(run, model).to_yaml()}\n---\n\n{body}\n")
    )
    return f"{text}\n<!-- written by plugsft: {checksum(text)} -->\n"


def run_of(output: Path) -> Path | None:
    """Return the run's folder of an output, a model or a checkpoint."""
    folders = (output.absolute(), *output.absolute().parents[:2])
    return next((folder for folder in folders if (folder / "run.json").is_file()), None)


def is_edited(text: str) -> bool:
    """Tell whether a person wrote a card, or edited one of plugsft's."""
    mark = MARK.search(text)
    return mark is None or mark[1] != checksum(text[: mark.start()])


def checksum(text: str) -> str:
    """Return a short checksum of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def add_card(folder: Path, output: Path, place: str) -> None:
    """Write the card into a model's new folder; leave that of a person."""
    card = card_for(folder, output, place)
    if card is not None:
        (folder / CARD).write_text(card, encoding="utf8")


def card_for(model: Path, output: Path, place: str) -> str | None:
    """Return the card for a folder; None to leave a person's, or without a run."""
    path = model / CARD
    own = path.is_file() and is_edited(read_text(path))
    return None if own else model_card(output, model, place)


def as_of(folder: Path, step: int | None) -> dict[str, Any]:
    """Return the entries of run.json for the card of a checkpoint."""
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if line["step"] == step]
    names = ("loss", "eval_loss")
    final = {name: line[name] for line in lines for name in names if name in line}
    steps = read_record(folder).get("steps") or {}
    ends = dict.fromkeys(("seconds", "throughput", "memory"))
    return ends | {"status": "checkpoint", "final": final, "steps": steps | {"done": step}}


def metadata(run: dict[str, Any], model: Path) -> ModelCardData:
    """Return the front matter: only what the run or its base says."""
    adapters, base = (model / ADAPTER).is_file(), base_of(run, model)
    tags = [Capability.bundled(name).plugin for name in TAGGED]
    active = [str(entry.get("name")) for entry in run.get("plugins", [])]
    sources = [str(source["name"]) for source in table_of(run, "data").get("sources", [])]
    on_hub = base if is_hub_name(base) else None
    relation = ("adapter" if adapters else "finetune") if on_hub else None
    return ModelCardData(
        base_model=on_hub,
        base_model_relation=relation,
        license=license_of(base),
        library_name="peft" if adapters else "transformers",
        pipeline_tag=None if is_reward_model(model) else "text-generation",
        datasets=[name for name in sources if is_hub_name(name)] or None,
        tags=["plugsft", *dict.fromkeys(tag for tag in tags if tag in active)],
    )


def base_of(run: dict[str, Any], model: Path) -> str:
    """Return the base model's name or folder; "" for a new model."""
    if (model / ADAPTER).is_file():
        with suppress(PlugsftError):
            return base_model(model)[0]
    source = str(table_of(run, "model").get("source") or "")
    return "" if source == "scratch" else source


def license_of(base: str) -> str | None:
    """Return the licence in the base's card, if this machine has it."""
    with suppress(OSError, ValueError, HFValidationError):
        path = Path(base) / CARD if base else None
        if path and not path.is_file():
            cached = try_to_load_from_cache(base, CARD) if is_hub_name(base) else None
            path = Path(cached) if isinstance(cached, str) else None
        if path:
            known = ModelCard.load(path, ignore_metadata_errors=True).data.get("license")
            return known if isinstance(known, str) else None
    return None


def sections(run: dict[str, Any], folder: Path, model: Path, place: str) -> Iterator[str]:
    """Yield the parts of the text."""
    base = base_of(run, model)
    name = f"[{base}](https://huggingface.co/{base})" if is_hub_name(base) else f"`{short(base)}`"
    version = table_of(run, "versions").get("plugsft", "")
    adapters = (model / ADAPTER).is_file()
    kind = "Adapters, trained on" if adapters else "A model, fine-tuned from"
    origin = f"{kind} {name}" if base else "A model, trained from random weights"
    yield f"# {Path(place).name}\n\n{origin} with plugsft {version}. The run wrote this card."
    yield f"## Use\n\n```python\n{usage(model, place, adapters)}\n```"
    yield "## Data\n\n" + "\n".join(data_lines(table_of(run, "data")))
    yield "## Training\n\n" + table(dict(training(run)))
    plugins = [
        f"- `{entry['name']}`: {short(entry.get('summary') or 'active')}"
        for entry in run.get("plugins", [])
    ]
    yield "## Plugins\n\n" + "\n".join(plugins) if plugins else ""
    with suppress(OSError, ValueError):
        recipe = tomli_w.dumps(without_paths(parse_toml(read_text(folder / "recipe.toml"))))
        fence = max(["``", *re.findall("`+", recipe)], key=len) + "`"
        yield (
            "## Recipe\n\n<details><summary>The whole recipe; folders are left out</summary>\n\n"
            f"{fence}toml\n{recipe}{fence}\n\n</details>"
        )
    yield "## Versions\n\n" + table(table_of(run, "versions"))


def usage(model: Path, place: str, adapters: bool) -> str:
    """Return the Python that loads the model."""
    kind = "SequenceClassification" if is_reward_model(model) else "CausalLM"
    package, name = ("peft", "AutoPeftModel") if adapters else ("transformers", "AutoModel")
    imports = f"from {package} import {name}For{kind}\nfrom transformers import AutoTokenizer"
    if not adapters:
        imports = f"from transformers import AutoModelFor{kind}, AutoTokenizer"
    return (
        f'{imports}\n\nmodel = {name}For{kind}.from_pretrained("{place}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{place}")'
    )


def data_lines(data: dict[str, Any]) -> Iterator[str]:
    """Yield the table of sources, and the counts."""
    yield "| source | examples | weight |\n|---|---|---|"
    for source in data.get("sources", []):
        name, examples = short(source["name"]), count(source.get("examples"))
        yield f"| `{name}` | {examples} | {source['weight']} |"
    bad = sum(entry["count"] for entry in table_of(data, "bad_rows").values())
    cut = table_of(data, "truncated").get("count")
    yield (
        f"\n{count(data.get('rows'))} rows, {count(data.get('examples'))} examples, "
        f"{count(data.get('tokens'))} tokens, of them {count(data.get('trained_tokens'))} trained; "
        f"{count(bad)} bad rows, {count(cut)} truncated."
    )


def training(run: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the figures of the run that were measured."""
    steps, final, machine = (table_of(run, name) for name in ("steps", "final", "machine"))
    if run["status"] != "completed":
        yield "status", run["status"]
    epochs = steps["done"] / steps["per_epoch"]
    yield "steps", f"{count(steps['done'])} of {count(steps['total'])}, {epochs:.2f} epochs"
    for name, label in (("loss", "loss of the last step"), ("eval_loss", "evaluation loss")):
        if (loss := number(final.get(name))) is not None:
            yield label, f"{loss:.4f}"
    model = table_of(run, "model")
    trained = count(model.get("trained_parameters"))
    yield "parameters", f"{count(model.get('parameters'))}, of them {trained} trained"
    yield "precision", short(run.get("precision") or "-")
    if (seconds := number(run.get("seconds"))) is not None:
        yield "time", str(timedelta(seconds=round(seconds)))
    if (speed := number(table_of(run, "throughput").get("tokens_per_second"))) is not None:
        yield "tokens per second", f"{speed:,.0f}"
    if (peak := number(table_of(run, "memory").get("peak_gib"))) is not None:
        yield "peak memory of a process", f"{peak:.1f} GiB"
    device = ", ".join(dict.fromkeys(map(str, machine.get("gpus") or [machine.get("device")])))
    yield "hardware", f"{machine.get('ranks')} x {device}, {machine.get('cores')} CPU cores"


def table(rows: dict[str, Any]) -> str:
    """Return a table of names and values."""
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {rows[name]} |" for name in rows)])


def short(text: object) -> str:
    """Return a text in one line, without folders of this machine."""
    return ABSOLUTE.sub(r"\1", " ".join(str(text).split())).replace("|", "\\|")


def without_paths(value: Any) -> Any:
    """Return a recipe whose absolute paths are only names."""
    if isinstance(value, dict):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def count(value: Any) -> str:
    """Return a count with commas, or a dash."""
    return "-" if (known := number(value)) is None else f"{known:,.0f}"
