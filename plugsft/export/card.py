"""The model card of a run: what its record says, in a template of huggingface_hub's metadata."""

import hashlib
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli_w
from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from jinja2 import Template

from ..base.atomic import parse_step
from ..base.errors import PlugsftError
from ..base.limits import parse_toml, read_text
from ..output.folder import ADAPTER, as_of, base_model, read_run
from ..output.run_record import RunRecord
from ..recipe.capabilities import Capability
from ..recipe.tables import is_hub_name
from .folder import is_reward_model

CARD = "README.md"
"""The file of a model card."""
TEMPLATE = Template(
    Path(__file__).with_name("card.md.jinja").read_text("utf8"),
    trim_blocks=True,
    keep_trailing_newline=True,
)
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
PIPELINES = {"CausalLM": "text-generation", "MultimodalLM": "image-text-to-text"}
"""Kind of a model -> the hub's word for its use."""
ABSOLUTE = re.compile(r"(?<![\w.:/])/(?:[^\s/,;:\"']+/)+([^\s/,;:\"']+)")
"""A path of this machine in a text."""
SECRET = re.compile(
    r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abp]-|AKIA)[\w-]{16,}|(?<=://)[^\s/@\"'`|]+(?=@)"
)
"""A token of a service, or the user and password in an address; a card may be public."""


def model_card(output: Path, model: Path, place: str) -> str | None:
    """The card of a run's model; None to leave a person's, or without a run.

    `output` is the run's folder, its model or a checkpoint. `model` is the folder that the card is
    for, `place` the name that loads it.
    """
    folder, card = run_of(output), model / CARD
    if folder is None or (card.is_file() and is_edited(read_text(card))):
        return None
    try:
        run = read_run(folder)
        if output.parent.name == "checkpoints" or (output / "state.json").is_file():
            run = as_of(run, parse_step(output) or 0, "checkpoint")
        base, recipe = base_of(run, model), recipe_of(folder)
        text = TEMPLATE.render(
            metadata=metadata(run, model, base).to_yaml(),
            name=Path(place).name,
            place=place,
            run=run,
            base=base,
            on_hub=is_hub_name(base),
            adapters=(model / ADAPTER).is_file(),
            kind=kind_of(run, model),
            recipe=recipe,
            # A text of the recipe cannot end its block.
            fence=max(["``", *re.findall("`+", recipe)], key=len) + "`",
            short=short,
        )
    except (OSError, ValueError, PlugsftError):
        return None  # another version's record, or a damaged file
    text = SECRET.sub("***", text)
    return f"{text}\n<!-- written by plugsft: {checksum(text)} -->\n"


def kind_of(run: RunRecord, model: Path) -> str:
    """The ending of transformers' class that loads a model, or the base of its adapters."""
    if is_reward_model(model):
        return "SequenceClassification"
    return "MultimodalLM" if run.model.sees else "CausalLM"


def run_of(output: Path) -> Path | None:
    """The run's folder of an output, a model or a checkpoint."""
    folders = (output.absolute(), *output.absolute().parents[:2])
    return next((folder for folder in folders if (folder / "run.json").is_file()), None)


def is_edited(text: str) -> bool:
    """Whether a person wrote a card, or edited one of plugsft's."""
    mark = MARK.search(text)
    return mark is None or mark[1] != checksum(text[: mark.start()])


def checksum(text: str) -> str:
    """A short checksum of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def add_card(folder: Path, output: Path, place: str) -> None:
    """Write the card into a model's new folder; leave that of a person."""
    card = model_card(output, folder, place)
    if card is not None:
        (folder / CARD).write_text(card, encoding="utf8")


def metadata(run: RunRecord, model: Path, base: str) -> ModelCardData:
    """The front matter: only what the run or its base says."""
    adapters = (model / ADAPTER).is_file()
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
        pipeline_tag=PIPELINES.get(kind_of(run, model)),
        datasets=[name.partition(":")[0] for name in sources if is_hub_name(name)] or None,
        tags=["plugsft", *dict.fromkeys(tag for tag in tags if tag in active)],
    )


def base_of(run: RunRecord, model: Path) -> str:
    """The base model's name or folder; "" for a new model."""
    if (model / ADAPTER).is_file():
        with suppress(PlugsftError):
            return base_model(model)[0]
    return "" if run.model.source == "scratch" else run.model.source


def license_of(base: str) -> str | None:
    """The licence in the base's card, if this machine has it."""
    if not base:
        return None
    path = Path(base) / CARD
    with suppress(OSError, ValueError, HFValidationError):
        if is_hub_name(base):
            path = Path(str(try_to_load_from_cache(base, CARD)))
        if path.is_file():
            known = ModelCard.load(path, ignore_metadata_errors=True).data.get("license")
            return known if isinstance(known, str) else None
    return None


def recipe_of(folder: Path) -> str:
    """The run's recipe without folders of this machine; "" where it is missing or damaged."""
    with suppress(OSError, ValueError):
        return tomli_w.dumps(without_paths(parse_toml(read_text(folder / "recipe.toml")))).strip()
    return ""


def short(text: object) -> str:
    """A text in one line, without folders of this machine."""
    return ABSOLUTE.sub(r"\1", " ".join(str(text).split())).replace("|", "\\|")


def without_paths(value: Any) -> Any:
    """A recipe whose absolute paths are only names."""
    if isinstance(value, dict):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value
