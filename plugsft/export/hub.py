"""Upload a model to the hub with its card: in one commit, compared with the hub's."""

import re
import time
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # no __all__
from huggingface_hub.utils.tqdm import disable_progress_bars

from ..base.atomic import MANIFEST, parse_step
from ..base.console import format_count, format_size, is_terminal, say
from ..base.errors import PlugsftError
from ..output.folder import ADAPTER, base_model
from ..recipe.tables import HUB
from .card import CARD, is_edited, model_card, run_of
from .folder import ensure_no_links

PAUSES = (1, 4, 16, 64)
"""Seconds before a failed upload is tried again; huggingface_hub tries requests again before."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "adapter_config.json")
"""Files of an earlier model that would be loaded with, or in place of, the new one."""
LOGIN = "`hf auth login`, or set HF_TOKEN to a token with the right to write"
STATUS_REASONS = {
    401: "the hub refuses the token",
    403: "this token may not write there",
    404: "the hub has none, or hides it from this token",
}
MOMENTARY = (408, 409, 412, 425, 429)
"""Answers that may differ in a moment: too slow, another commit came first, too many requests."""
SIGNATURE = re.compile(r"\?[^\s\"'`<>|\\]*")
"""The query of an address: a store's may be signed."""


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
        files = {
            path.relative_to(folder).as_posix(): path
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name != MANIFEST and not path.name.startswith(".")
        }
        card = model_card(output, folder, self.name)
        self._try(lambda: self._commit(files, card, message))
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

    def _commit(self, files: dict[str, Path], card: str | None, message: str) -> None:
        """Send files in one commit; huggingface_hub leaves out those that are there."""
        head = self._api.repo_info(self.name).sha
        there = self._api.list_repo_files(self.name, revision=head)
        added = {name: CommitOperationAdd(name, path) for name, path in files.items()}
        if card is not None:
            added[CARD] = CommitOperationAdd(CARD, card.encode())
        if CARD in added and CARD in there:
            path = self._api.hf_hub_download(self.name, CARD, revision=head)
            if is_edited(Path(path).read_text(encoding="utf8")):
                del added[CARD]
                say(f"{CARD} was edited on the hub; it stays")
        others = [name for name in there if name not in added and "/" not in name]
        stale = [name for name in others if any(fnmatch(name, kind) for kind in WEIGHTS)]
        size = format_size(sum(one.upload_info.size for one in added.values()))
        say(f"uploading {format_count(len(added), 'file')}, {size}, to {self.url}")
        if stale:
            say(f"removing the weights that were there: {', '.join(stale)}")
        operations: list[CommitOperationAdd | CommitOperationDelete] = [*added.values()]
        operations += [CommitOperationDelete(name) for name in stale]
        self._api.create_commit(self.name, operations, commit_message=message, parent_commit=head)

    def _try(self, action: Callable[[], Result]) -> Result:
        """Do an action; after failures that pass, try again with growing pauses."""
        for pause in (*PAUSES, None):
            try:
                return action()
            except PlugsftError:
                raise
            except Exception as error:  # of huggingface_hub, its HTTP client and its Rust parts
                passing, why = explain(error)
                why = SIGNATURE.sub("", why.replace(str(self._token), "***"))
                if not passing or pause is None:
                    again = (
                        "; files that were sent need not be sent again: run the same command later"
                    )
                    text = f"{HUB}{self.name}: {why}{again if passing else ''}"
                    raise PlugsftError(text) from error
            say(f"{why}; trying again in {pause} s")
            time.sleep(pause)
        raise AssertionError


def explain(error: BaseException) -> tuple[bool, str]:
    """Whether a request may succeed in a moment, and why it failed."""
    why = (str(error).strip().partition("\n")[0] or "no reason given")[:300]
    cause: BaseException | None = error
    while cause is not None:
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status in STATUS_REASONS:
            return False, f"{STATUS_REASONS[status]} ({status}); log in again with {LOGIN} ({why})"
        if status is not None:
            return status in MOMENTARY or status >= 500, f"the hub answers {status}: {why}"
        client = type(cause).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore")
        # hf_xet raises RuntimeError; OfflineModeIsEnabled is a ConnectionError.
        if client or type(cause) in (RuntimeError, ConnectionError, TimeoutError):
            return True, f"no answer of the hub: {type(cause).__name__}: {why}"
        cause = cause.__cause__ or cause.__context__
    return False, f"{type(error).__name__}: {why}"
