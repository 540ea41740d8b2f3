"""Upload a model to the Hugging Face hub in one commit, and compare it."""

import hashlib
import time
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils._validators import validate_repo_id
from huggingface_hub.utils.tqdm import disable_progress_bars

from ...base.console import format_count, format_size, is_terminal, say
from ...base.errors import PlugsftError
from ..hub_names import HUB
from .card import CARD, is_edited
from .hub_errors import LOGIN, explain, momentary

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds until a failed request is tried again; each failure doubles them."""
SHOWN = 2**20
"""Smallest size of a file that has a line of its own, in bytes."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "adapter_config.json")
"""Files of an earlier model that would be loaded with, or in place of, the new one."""

Files = Mapping[str, Path | bytes]
"""Name in the repository -> its file, or its content."""
Result = TypeVar("Result")


class Repository:
    """A model repository on the hub that the user may write to."""

    def __init__(self, name: str, public: bool, patience: float) -> None:
        """Sign in, and create the repository if it is missing.

        `patience`: seconds of pauses after failures of a moment, before it gives up.
        """
        ensure_name(name)
        self._token = get_token()
        if not self._token:
            raise PlugsftError(f"{HUB}{name}: there is no token for the hub: run {LOGIN}")
        # Its warnings show addresses that are signed; failures have lines of our own.
        hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # untyped upstream
        if not is_terminal():
            disable_progress_bars()
        self._api, self._patience, self.name = HfApi(token=self._token), patience, name
        user = str(self._try(self._api.whoami)["name"])
        self.name = name if "/" in name else f"{user}/{name}"
        self.url = f"{self._api.endpoint}/{self.name}"
        self._try(lambda: self._ensure_writable(public))

    def upload(self, files: Files, message: str) -> None:
        """Upload new files in one commit; compare all with their source."""
        started, additions = time.monotonic(), dict[str, CommitOperationAdd]()
        digests = Digests(files)
        self._try(lambda: self._commit(digests, additions, message))
        remote = self._try(self._read)[1]
        wrong = [name for name in digests.files if not digests.same(name, remote.get(name))]
        if wrong:
            raise PlugsftError(
                f"{self.url}: {wrong[0]} differs from the file here; somebody else changed it, or "
                "the folder was changed during the upload: run the same command again"
            )
        seconds = time.monotonic() - started
        say(f"{format_count(len(digests.files), 'file')} compared with the hub's, {seconds:.0f} s")

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

    def _read(self) -> tuple[str | None, dict[str, Any]]:
        """Return the newest commit, and its files by name."""
        head = self._api.repo_info(self.name).sha
        entries = self._api.list_repo_tree(self.name, recursive=True, revision=head)
        return head, {entry.path: entry for entry in entries if hasattr(entry, "blob_id")}

    def _commit(
        self, digests: "Digests", additions: dict[str, CommitOperationAdd], message: str
    ) -> None:
        """Upload what the newest commit lacks, then commit; `additions` outlive a failure."""
        head, remote = self._read()
        if CARD in digests.files and self._edited_card(head, remote.get(CARD)):
            del digests.files[CARD]
            say(f"{CARD} was edited on the hub; it stays")
        new = [name for name in digests.files if not digests.same(name, remote.get(name))]
        stale = [
            name
            for name in remote
            if name not in digests.files
            and "/" not in name
            and any(fnmatch(name, pattern) for pattern in WEIGHTS)
        ]
        there = len(digests.files) - len(new)
        size = format_size(sum(map(digests.size, new)))
        say(f"uploading {format_count(len(new), 'file')}, {size}, to {self.url}; {there} are there")
        for name in new:
            source = digests.files[name]
            addition = additions.setdefault(name, CommitOperationAdd(name, source))
            self._send(addition, digests.size(name))
        if stale:
            say(f"removing the weights that were there: {', '.join(stale)}")
        if new or stale:
            self._api.create_commit(
                self.name,
                [*(additions[name] for name in new), *map(CommitOperationDelete, stale)],
                commit_message=message,
                parent_commit=head,
            )

    def _send(self, addition: CommitOperationAdd, size: int) -> None:
        """Send the content of a file, unless an earlier attempt has."""
        started = time.monotonic()
        self._api.preupload_lfs_files(self.name, [addition], free_memory=False)
        if size >= SHOWN:
            seconds = time.monotonic() - started
            say(f"sent {addition.path_in_repo}, {format_size(size)}, in {seconds:.0f} s")

    def _edited_card(self, head: str | None, entry: Any) -> bool:
        """Tell whether somebody wrote or edited the model card of the repository."""
        if entry is None:
            return False
        path = self._api.hf_hub_download(self.name, CARD, revision=head)
        return is_edited(Path(path).read_text(encoding="utf8"))

    def _try(self, action: Callable[[], Result]) -> Result:
        """Do an action; after failures that pass, try again with growing pauses."""
        pause, waited = FIRST_PAUSE, 0.0
        while True:
            try:
                return action()
            except PlugsftError:
                raise
            except Exception as error:  # of huggingface_hub, its HTTP client and its Rust parts
                reason = momentary(error)
                if reason is None:
                    raise PlugsftError(self._clean(explain(error, self.name))) from error
                if waited >= self._patience:
                    raise PlugsftError(
                        self._clean(
                            f"{HUB}{self.name}: {reason}; tried again for {waited:.0f} s. "
                            "The repository is as it was, and files that were sent need not be "
                            "sent again: run the same command later"
                        )
                    ) from error
            say(self._clean(f"{reason}; trying again in {pause:.0f} s"))
            time.sleep(pause)
            waited, pause = waited + pause, min(2 * pause, LONGEST_PAUSE)

    def _clean(self, text: str) -> str:
        return text.replace(str(self._token), "***")


class Digests:
    """The files to upload, and their checksums as the hub computes them."""

    def __init__(self, files: Files) -> None:
        self.files = dict(files)
        self._known: dict[tuple[str, bool], str] = {}

    def size(self, name: str) -> int:
        """Return the size of a file."""
        source = self.files[name]
        return len(source) if isinstance(source, bytes) else source.stat().st_size

    def same(self, name: str, entry: Any) -> bool:
        """Tell whether the hub's entry has the bytes of a file."""
        if entry is None or entry.size != self.size(name):
            return False
        expected: str = entry.lfs.sha256 if entry.lfs else entry.blob_id
        return self._digest(name, bool(entry.lfs)) == expected

    def _digest(self, name: str, large: bool) -> str:
        """Return a large file's SHA-256, or a small file's object id in git."""
        if (name, large) not in self._known:
            source = self.files[name]
            if large and isinstance(source, Path):
                with source.open("rb") as file:
                    value = hashlib.file_digest(file, "sha256").hexdigest()
            else:
                content = source if isinstance(source, bytes) else source.read_bytes()
                head = b"" if large else b"blob %d\0" % len(content)
                value = hashlib.new("sha256" if large else "sha1", head + content).hexdigest()
            self._known[name, large] = value
        return self._known[name, large]


def ensure_name(name: str) -> None:
    """Refuse a name that no repository can have."""
    try:
        validate_repo_id(name)
        if not name:
            raise HFValidationError("it is empty")
    except HFValidationError as error:
        raise PlugsftError(
            f"{HUB}{name}: is no name of a repository, such as {HUB}me/my-model: {error}"
        ) from error
