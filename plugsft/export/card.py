"""The model card of a run's model: README.md, from the run's record."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli_w
from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from ..base.atomic import parse_step
from ..base.console import hide_queries
from ..base.errors import PlugsftError
from ..base.limits import parse_toml, read_text
from ..output.folder import ADAPTER, as_of, base_model, read_run
from ..output.results import describe
from ..output.run_record import RunRecord
from ..recipe.capabilities import Capability
from ..recipe.tables import is_hub_name
from .folder import is_reward_model

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
        run = read_run(folder)
        if output.parent.name == "checkpoints" or (output / "state.json").is_file():
            run = as_of(run, parse_step(output) or 0, "checkpoint")
        body = "\n\n".join(filter(None, sections(run, model, place)))
    except (OSError, ValueError, PlugsftError):
        return None  # another version's record, or a damaged file
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


def metadata(run: RunRecord, model: Path) -> ModelCardData:
    """Return the front matter: only what the run or its base says."""
    adapters, base = (model / ADAPTER).is_file(), base_of(run, model)
    tags = [Capability.bundled(name).plugin for name in TAGGED]
    active = [plugin.name for plugin in run.plugins]
    sources = [source.name for source in run.data.sources] if run.data else []
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


def base_of(run: RunRecord, model: Path) -> str:
    """Return the base model's name or folder; "" for a new model."""
    if (model / ADAPTER).is_file():
        with suppress(PlugsftError):
            return base_model(model)[0]
    return "" if run.model.source == "scratch" else run.model.source


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


def sections(run: RunRecord, model: Path, place: str) -> Iterator[str]:
    """Yield the parts of the text."""
    base = base_of(run, model)
    name = f"[{base}](https://huggingface.co/{base})" if is_hub_name(base) else f"`{short(base)}`"
    version = run.versions.get("plugsft", "")
    adapters = (model / ADAPTER).is_file()
    kind = "Adapters, trained on" if adapters else "A model, fine-tuned from"
    origin = f"{kind} {name}" if base else "A model, trained from random weights"
    yield f"# {Path(place).name}\n\n{origin} with plugsft {version}. The run wrote this card."
    yield f"## Use\n\n```python\n{usage(model, place, adapters)}\n```"
    if run.data:
        rows = [
            f"| `{short(source.name)}` | {source.examples:,} | {source.weight} |"
            for source in run.data.sources
        ]
        yield "\n".join(["## Data\n\n| source | examples | weight |\n|---|---|---|", *rows])
        yield f"{run.data.rows:,} rows: {describe(run.data)}."
    yield "## Training\n\n" + table(dict(training(run)))
    plugins = [f"- `{one.name}`: {short(one.summary or 'active')}" for one in run.plugins]
    yield "## Plugins\n\n" + "\n".join(plugins) if plugins else ""
    with suppress(OSError, ValueError):
        recipe = tomli_w.dumps(without_paths(parse_toml(read_text(run.folder / "recipe.toml"))))
        fence = max(["``", *re.findall("`+", recipe)], key=len) + "`"
        yield (
            "## Recipe\n\n<details><summary>The whole recipe; folders are left out</summary>\n\n"
            f"{fence}toml\n{recipe}{fence}\n\n</details>"
        )
    yield "## Versions\n\n" + table(run.versions)


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


def training(run: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield the figures of the run."""
    steps, machine, model = run.steps, run.machine, run.model
    if run.status != "completed":
        yield "status", run.status
    epochs = steps.done / max(1, steps.per_epoch)
    yield "steps", f"{steps.done:,} of {steps.total:,}, {epochs:.2f} epochs"
    for _, name, text in run.figures:
        yield name, text
    yield "parameters", f"{model.parameters:,}, of them {model.trained_parameters:,} trained"
    yield "precision", short(run.precision or "-")
    device = ", ".join(dict.fromkeys(machine.gpus or [machine.device]))
    yield "hardware", f"{machine.ranks} x {device}, {machine.cores} CPU cores"


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
