"""Upload a model to the hub with its card: in one commit, compared with the hub's."""

import hashlib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import tomli_w
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    ModelCardData,
    get_token,
    try_to_load_from_cache,
)
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # no __all__
from huggingface_hub.utils.tqdm import disable_progress_bars

from ..base.atomic import MANIFEST, parse_step
from ..base.console import format_count, format_size, hide_queries, is_terminal, say
from ..base.errors import PlugsftError
from ..base.limits import parse_toml, read_text
from ..output.folder import ADAPTER, as_of, base_model, read_run
from ..output.run_record import RunRecord
from ..recipe.capabilities import Capability
from ..recipe.tables import HUB, is_hub_name
from .folder import ensure_no_links, is_reward_model

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
PAUSES = (1, 4, 16, 64)
"""Seconds before a failed upload is tried again; huggingface_hub tries requests again before."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "adapter_config.json")
"""Files of an earlier model that would be loaded with, or in place of, the new one."""
LOGIN = "`hf auth login`, or set HF_TOKEN to a token with the right to write"
REFUSED = {
    401: "the hub refuses the token",
    403: "this token may not write there",
    404: "the hub has none, or hides it from this token",
}
MOMENTARY = (408, 409, 412, 425, 429)
"""Answers that may differ in a moment: too slow, another commit came first, too many requests."""


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
        yield f"{run.data.rows:,} rows: {run.data}."
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
    machine, model = run.machine, run.model
    if run.status != "completed":
        yield "status", run.status
    yield from run.figures.items()
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


Result = TypeVar("Result")


class Repository:
    """A model repository on the hub that the user may write to."""

    def __init__(self, name: str, public: bool) -> None:
        """Sign in, and create the repository if it is missing."""
        self.name = name
        try:
            validate_repo_id(name or "/")
        except HFValidationError as error:
            raise PlugsftError(
                f"{HUB}{name}: is no name of a repository, such as {HUB}me/my-model: {error}"
            ) from error
        self._token = get_token()
        if not self._token:
            raise PlugsftError(f"{HUB}{name}: there is no token for the hub: run {LOGIN}")
        # Its warnings show addresses that are signed; failures have lines of our own.
        hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # untyped upstream
        if not is_terminal():
            disable_progress_bars()
        self._api = HfApi(token=self._token)
        user = str(self._try(self._api.whoami)["name"])
        self.name = name if "/" in name else f"{user}/{name}"
        self.url = f"{self._api.endpoint}/{self.name}"
        self._try(lambda: self._ensure_writable(public))

    def upload(self, folder: Path, output: Path) -> None:
        """Upload the model in a folder, with its card; `output` is its run or checkpoint."""
        if (folder / ADAPTER).is_file() and Path(base := base_model(folder)[0]).is_absolute():
            say(
                f"warning: the adapters are for {base}, a folder of this machine. Their file has "
                "this path, and others cannot load them: upload a merged model instead (--merge)"
            )
        run, step = run_of(output), parse_step(output)
        model = "the model" if step is None else f"the model of step {step:,}"
        message = f"plugsft: {model} of {(run or output.absolute()).name}"
        ensure_no_links(folder)
        with TemporaryDirectory() as temporary:
            files = link_files(folder, Path(temporary))
            if card := card_for(folder, output, self.name):
                (Path(temporary) / CARD).unlink(missing_ok=True)
                files[CARD] = Path(temporary) / CARD
                files[CARD].write_text(card, encoding="utf8")
            self._try(lambda: self._commit(files, message))
        say(f"model, on the hub: {self.url}")

    def _ensure_writable(self, public: bool) -> None:
        """Create the repository, or refuse an existing one that does not fit."""
        try:
            info = self._api.repo_info(self.name)
        except RepositoryNotFoundError:
            self._api.create_repo(self.name, private=not public, exist_ok=True)
            say(f"created the {'public' if public else 'private'} repository {self.name}")
            return
        if bool(info.private) == public:
            word, cure = ("private", "leave out --public") if public else ("public", "add --public")
            raise PlugsftError(f"{HUB}{self.name}: exists and is {word}; {cure}, or name another")
        self._api.auth_check(self.name, write=True)

    def _commit(self, files: dict[str, Path], message: str) -> None:
        """Send files in one commit; huggingface_hub leaves out those that are there."""
        head = self._api.repo_info(self.name).sha
        there = self._api.list_repo_files(self.name, revision=head)
        if CARD in files and CARD in there:
            path = self._api.hf_hub_download(self.name, CARD, revision=head)
            if is_edited(Path(path).read_text(encoding="utf8")):
                del files[CARD]
                say(f"{CARD} was edited on the hub; it stays")
        stale = [
            name
            for name in there
            if name not in files
            and "/" not in name
            and any(fnmatch(name, pattern) for pattern in WEIGHTS)
        ]
        size = format_size(sum(path.stat().st_size for path in files.values()))
        say(f"uploading {format_count(len(files), 'file')}, {size}, to {self.url}")
        if stale:
            say(f"removing the weights that were there: {', '.join(stale)}")
        operations = [*(CommitOperationAdd(name, path) for name, path in files.items())]
        deletions = [CommitOperationDelete(name) for name in stale]
        self._api.create_commit(
            self.name, [*operations, *deletions], commit_message=message, parent_commit=head
        )

    def _try(self, action: Callable[[], Result]) -> Result:
        """Do an action; after failures that pass, try again with growing pauses."""
        for pause in (*PAUSES, None):
            try:
                return action()
            except PlugsftError:
                raise
            except Exception as error:  # of huggingface_hub, its HTTP client and its Rust parts
                passing, why = explain(error)
                # Addresses in messages may be signed.
                why = hide_queries(why.replace(str(self._token), "***"))
                if not passing or pause is None:
                    again = (
                        "; files that were sent need not be sent again: run the same command later"
                    )
                    text = f"{HUB}{self.name}: {why}{again if passing else ''}"
                    raise PlugsftError(text) from error
            say(f"{why}; trying again in {pause} s")
            time.sleep(pause)
        raise AssertionError


def link_files(folder: Path, target: Path) -> dict[str, Path]:
    """Link the files of a model, without our own marks, into a folder; return them by name."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST and not path.name.startswith("."):
            name = path.relative_to(folder).as_posix()
            files[name] = target / name
            files[name].parent.mkdir(parents=True, exist_ok=True)
            files[name].symlink_to(path.absolute())
    return files


def explain(error: BaseException) -> tuple[bool, str]:
    """Return whether a request may succeed in a moment, and why it failed."""
    why = (str(error).strip().partition("\n")[0] or "no reason given")[:300]
    cause: BaseException | None = error
    while cause is not None:
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status in REFUSED:
            return False, f"{REFUSED[status]} ({status}); log in again with {LOGIN} ({why})"
        if status is not None:
            return status in MOMENTARY or status >= 500, f"the hub answers {status}: {why}"
        client = type(cause).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore")
        # hf_xet raises RuntimeError; OfflineModeIsEnabled is a ConnectionError.
        if client or type(cause) in (RuntimeError, ConnectionError, TimeoutError):
            return True, f"no answer of the hub: {type(cause).__name__}: {why}"
        cause = cause.__cause__ or cause.__context__
    return False, f"{type(error).__name__}: {why}"
