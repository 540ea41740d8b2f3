"""`plugsft prepare`: tokens on disk, before training.

Several of them, on one or on several hosts, prepare the slices of one data set. Each process is a
member: it has a claim to the whole folder, with a heartbeat. A member claims a slice by a file that
holds the name of its own claim, and that only one process can create. The slices of a member that
has died are free for the others. When all shards are there, one process publishes them.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from ..base.atomic import HOST_ID, IsComplete, remove, write_text, writing
from ..base.build_once import BUILDER, Claim, Claims, build_folders, take_over, text_of
from ..base.console import format_count, say
from ..base.errors import DataError, RecipeError
from ..base.machine import look
from ..base.types import Shard, Slice
from ..data.defaults import DataDefaults
from ..data.prepare import Prepared, prepare
from ..data.slices import ShardWriter
from ..data.sources import OpenSource
from ..hooks import DATA
from ..model.checks import check_recipe
from ..model.config import check_ids
from ..output.folder import ensure_inputs
from ..recipe.tables import Recipe
from ..registry.active import Active

FAILED = ".failed"
"""File in the shared folder that names the bad rows; it ends all members."""
POLL_SECONDS = 0.2
COUNT_SECONDS = 2.0
"""Seconds between two counts of the finished slices: listing a folder of a server takes time."""


@dataclass
class SharedShardWriter(ShardWriter):
    """Writes the shards of slices that no other member has claimed."""

    member: str = ""
    """Name of this member's claim."""
    num_slices: int = 0
    _counted: tuple[float, str] = (0.0, "")

    def tokenize(self, part: Slice) -> Shard:
        """Write a slice as one shard; return an empty shard for another member's slice."""
        failed = self.folder / FAILED
        if failed.exists():
            raise DataError(failed.read_text())
        claim, others = self.claim_path(part), Shard("", rows=part.stop - part.start)
        if self.path(part).with_suffix(".json").exists():
            return others
        try:
            with claim.open("x") as file:
                file.write(self.member)
        except FileExistsError:
            # A plugin may run a slice again after it has lost a worker.
            if text_of(claim) != self.member:
                return others
        return super().tokenize(part)

    def claim_path(self, part: Slice) -> Path:
        """The file that only one process can create."""
        path = self.path(part)
        return path.with_name(f".{path.stem}.claim")

    def team(self) -> str:
        """Say how many slices are finished, and by how many hosts."""
        counted, text = self._counted
        if time.monotonic() - counted > COUNT_SECONDS:
            finished = len([*self.folder.glob("data-*.json")])
            name, _, _ = self.member.rpartition(".claim-")
            members = self.folder.parent.glob(f"{name}.claim-*-*")
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
    try:
        with writing(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _join(claims) as member:
                if member is not None and not is_complete(folder):
                    _share_as(member, slices, work, claims)
    except Exception:
        # The last member to leave sees no other.
        if not claims.living():
            remove(_shared_folder(folder))
        raise


def _share_as(member: Claim, slices: list[Slice], work: ShardWriter, claims: Claims) -> None:
    """Prepare slices as a member; tell the others about bad rows."""
    shared = _shared_folder(claims.folder)
    folders = build_folders(claims.folder)
    if shared not in folders:
        take_over(folders, shared)
    values = {each.name: getattr(work, each.name) for each in fields(work)}
    values |= {"folder": shared, "member": member.path.name, "num_slices": len(slices)}
    try:
        # An earlier failure; if its cause is still there, we find it too.
        (shared / FAILED).unlink(missing_ok=True)
        _prepare_slices(slices, SharedShardWriter(**values), claims)
    except Exception as error:
        if not shared.exists():
            return  # another process took it over, and publishes it
        if isinstance(error, DataError):
            write_text(shared / FAILED, str(error))
        raise


@contextmanager
def _join(claims: Claims) -> Iterator[Claim | None]:
    """Become a member; yield None while a process builds or publishes the folder alone."""
    name = f"{HOST_ID}-{os.getpid()}"
    claims.path(name).unlink(missing_ok=True)  # of a dead process that had our number
    with claims.hold(name) as member:
        yield None if claims.path(BUILDER) in claims.living() else member


def _shared_folder(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.parts-shared")


def _prepare_slices(slices: list[Slice], work: SharedShardWriter, claims: Claims) -> None:
    """Prepare free slices until all are finished; say how many this process prepared."""
    before = len(slices) - len(_unfinished(slices, work))
    if before:
        say(f"data: continuing after {before:,} of {len(slices):,} slices")
    done = 0
    while unfinished := _unfinished(slices, work):
        if free := _free_slices(unfinished, work, claims):
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


def _free_slices(slices: list[Slice], work: SharedShardWriter, claims: Claims) -> list[Slice]:
    """The slices that no living member has claimed."""
    claimed = {path.name for path in work.folder.glob(".*.claim")}
    paths = {part: work.claim_path(part) for part in slices}
    # Read before we look who is alive: a member joins before it claims.
    owners = {part: text_of(path) if path.name in claimed else None for part, path in paths.items()}
    living = {path.name for path in claims.living()}
    free = []
    for part, owner in owners.items():
        # A claim without text was created just now, or its owner died at that moment.
        alive = claims.seems_alive(paths[part]) if owner == "" else owner in living
        if owner not in (None, work.member):
            if alive:
                continue
            # If two members do so at the same moment, both make the slice: the bytes are the same.
            if text_of(paths[part]) == owner:
                paths[part].unlink(missing_ok=True)
        free.append(part)
    return free


def prepare_data(recipe: Recipe, active: Active, path: Path) -> Prepared:
    """Tokenize a recipe's data into its output folder; return it."""
    ensure_inputs(recipe, path)
    if recipe.data.tokens:
        raise RecipeError(
            f"data.tokens: {recipe.data.tokens} is prepared already; leave data.tokens out to "
            "prepare data.source"
        )
    active.attach(DataDefaults(recipe.folder))
    with active.name_failing_plugin():
        # Only the data hooks: the data may be for another machine.
        check_recipe(recipe, active, look(), DATA)
        data = prepare(recipe, active, share_slices)
        check_ids(recipe, data.largest_id)
    for name, summary in active.summaries(DATA).items():
        if summary != "active":
            say(f"plugin {name}: {summary}")
    if recipe.model.scratch and not recipe.model.tokenizer:
        say(f"tokenizer: {data.tokenizer_folder}")
    say(f"tokens: {data.tokens.folder}")
    return data
