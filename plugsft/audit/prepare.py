"""`plugsft prepare`: tokens on disk, before training.

Several of them, on one or on several hosts, prepare the slices of one data set. Each process is a
member: it has a claim to the whole folder. Whoever tokenizes a slice has a claim to it meanwhile.
Only one process can create a claim, and it beats: that of a dead process counts for nothing, and
its slice is free for the others. When all shards are there, one process publishes them.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from ..base.atomic import HOST_ID, IsComplete, remove, write_text, writing
from ..base.build_once import BUILDER, Claims, build_folders, take_over
from ..base.console import format_count, say
from ..base.errors import DataError, RecipeError
from ..base.machine import look
from ..base.types import Shard, Slice
from ..data.defaults import DataDefaults
from ..data.prepare import prepare
from ..data.slices import ShardWriter
from ..data.sources import OpenSource
from ..hooks import DATA
from ..output.folder import ensure_inputs
from ..recipe.tables import Recipe
from ..registry.active import Active
from ..start.checks import Case, ensure
from ..tokens.store import Prepared

FAILED = ".failed"
"""File in the shared folder that names the bad rows; it ends all members."""
POLL_SECONDS = 0.2
COUNT_SECONDS = 2.0
"""Seconds between two counts of the finished slices: listing a folder of a server takes time."""


@dataclass
class SharedShardWriter(ShardWriter):
    """Writes the shards of slices that no other member has claimed."""

    members: Claims = field(kw_only=True)
    num_slices: int = 0
    _counted: tuple[float, str] = (0.0, "")

    def tokenize(self, part: Slice) -> Shard:
        """Write a slice as one shard; an empty shard stands for another member's slice."""
        failed = self.folder / FAILED
        if failed.exists():
            raise DataError(failed.read_text())
        path = self.path(part)
        with slice_claims(self.folder).hold(path.stem) as claim:
            if claim is None or path.with_suffix(".json").exists():
                return Shard("", rows=part.stop - part.start)
            return super().tokenize(part)

    def team(self) -> str:
        """Say how many slices are finished, and by how many hosts."""
        counted, text = self._counted
        if time.monotonic() - counted > COUNT_SECONDS:
            finished = len([*self.folder.glob("data-*.json")])
            members = self.folder.parent.glob(self.members.path("*-*").name)
            hosts = {path.name.rpartition("-")[0] for path in members}
            by = format_count(len(hosts), "host")
            text = f"{finished:,} of {format_count(self.num_slices, 'slice')} by {by}, "
            self._counted = time.monotonic(), text
        return text


def share_slices(
    work: ShardWriter, sources: Sequence[OpenSource], folder: Path, is_complete: IsComplete
) -> None:
    """Prepare slices together with other processes until all shards of a folder are finished."""
    slices, claims = work.slices(sources), Claims(folder)
    shared = folder.with_name(f".{folder.name}.parts-shared")
    name = f"{HOST_ID}-{os.getpid()}"
    try:
        with writing(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            claims.path(name).unlink(missing_ok=True)  # of a dead process that had our number
            with claims.hold(name) as member:
                # A process that builds or publishes the folder does so alone.
                alone = claims.path(BUILDER) in claims.living()
                if member and not alone and not is_complete(folder):
                    _share_in(shared, slices, work, claims)
    except Exception:
        # The last member to leave sees no other.
        if not claims.living():
            remove(shared)
        raise


def slice_claims(shared: Path) -> Claims:
    """The claims to slices, each by the process that tokenizes it just now."""
    return Claims(shared / "slice")


def _share_in(shared: Path, slices: list[Slice], work: ShardWriter, members: Claims) -> None:
    """Prepare slices in the shared folder; tell the other members about bad rows."""
    folders = build_folders(members.folder)
    if shared not in folders:
        take_over(folders, shared)
    values = {each.name: getattr(work, each.name) for each in fields(work)}
    values |= {"folder": shared, "members": members, "num_slices": len(slices)}
    try:
        # An earlier failure; if its cause is still there, we find it too.
        (shared / FAILED).unlink(missing_ok=True)
        _prepare_slices(slices, SharedShardWriter(**values))
    except Exception as error:
        if not shared.exists():
            return  # another process took it over, and publishes it
        if isinstance(error, DataError):
            write_text(shared / FAILED, str(error))
        raise


def _prepare_slices(slices: list[Slice], work: SharedShardWriter) -> None:
    """Prepare free slices until all are finished; say how many this process prepared."""
    before = len(slices) - len(_unfinished(slices, work))
    if before:
        say(f"data: continuing after {before:,} of {len(slices):,} slices")
    done, claims = 0, slice_claims(work.folder)
    while unfinished := _unfinished(slices, work):
        taken = claims.living()
        free = [part for part in unfinished if claims.path(work.path(part).stem) not in taken]
        if free:
            shards = work.hooks.tokenize(slices=free, work=work)
            done += sum(not shard.elsewhere for shard in shards)
        else:
            time.sleep(POLL_SECONDS)
    if before + done < len(slices):
        say(f"data: this process prepared {done:,} of {format_count(len(slices), 'slice')}")


def _unfinished(slices: list[Slice], work: SharedShardWriter) -> list[Slice]:
    """The slices without a shard; raises the error that ended another member."""
    files = {*os.listdir(work.folder)}
    if FAILED in files:
        raise DataError((work.folder / FAILED).read_text())
    return [part for part in slices if work.path(part).with_suffix(".json").name not in files]


def prepare_data(recipe: Recipe, active: Active, path: Path) -> Prepared:
    """Tokenize a recipe's data into its output folder; return it."""
    ensure_inputs(recipe, path)
    if recipe.data.tokens:
        raise RecipeError(
            f"data.tokens: {recipe.data.tokens} is prepared already; leave data.tokens out to "
            "prepare data.source"
        )
    active.attach(DataDefaults(recipe.folder))
    # Only the data hooks: the data may be for another machine.
    case = Case(recipe, active, look(), hooks=DATA)
    ensure(case, "plugins", "model")
    data = prepare(recipe, active, share_slices)
    for tokens in filter(None, (data.tokens, data.evaluation)):
        ensure(replace(case, tokens=tokens), "tokens")
    for name, summary in active.summaries(DATA).items():
        if summary != "active":
            say(f"plugin {name}: {summary}")
    if recipe.model.scratch and not recipe.model.tokenizer:
        say(f"tokenizer: {data.tokenizer_folder}")
    say(f"tokens: {data.tokens.folder}")
    return data
