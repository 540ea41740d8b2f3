"""Compute the reference's log-probabilities once, before step 1, and keep them."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator
from contextlib import nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray
from pydantic import Field

from plugsft import (
    DataError,
    Ints,
    Prelude,
    Recipe,
    RecipeError,
    TrainError,
    digest,
    hookimpl,
    plugin,
    progress,
    state,
)
from plugsft.kit.tokens import Tokens

if TYPE_CHECKING:
    import torch

SCHEMA = pa.schema(
    {"example": pa.int64(), "id": pa.uint64(), "chosen": pa.float32(), "rejected": pa.float32()}
)
BLOCK = 16
"""Micro-batches of each rank after which what was computed is written down."""
NEAR = {True: (1e-4, 1e-3), False: (2e-2, 0.5)}
"""How far a pair that is computed again may be off, in float32 or not: a share of it, and at least
so much."""

Values = NDArray[np.float32]


@plugin(after=["dpo", "bfd_packing", "fused_loss", "lora"], requires=["dpo"])
class DpoReference:
    """Compute the reference's log-probabilities once, before step 1, and keep them.

    Other runs find them with [plugins.arrow_cache], and else only those with the same output. All
    ranks go through the pairs sorted by length, without gradients, packed if the run is. Two
    numbers per pair are kept, by what it is computed of: the pair, the reference's weights, their
    type and the kernel. A run that is killed goes on where it was, and so does one on other rows.
    """

    capacity: Annotated[int, Field(ge=2)] | None = None
    """Most tokens in a micro-batch of this pass. Default: as in training."""
    probes: Annotated[int, Field(ge=0)] = 4
    """Pairs, chosen at random, that are computed again at the start of each run."""

    given: str = state("")
    """The model that is the reference, if another."""
    packed: bool = state(False)
    room: int = state(0)
    epochs: int = state(1)
    said: list[str] = state([])

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Take what the run says of its reference and of its micro-batches."""
        self.given = recipe.plugins["dpo"].get("reference") or ""
        self.packed = recipe.has("bfd_packing")
        packing = recipe.plugins.get("bfd_packing", {})
        longest = 2 * recipe.data.max_length
        most = packing.get("capacity") or longest
        self.room = self.capacity or (most if self.packed else recipe.train.micro_batch * longest)
        if packing.get("scope") == "dataset" and self.room > most:
            raise RecipeError(
                f'capacity: rows have {most:,} tokens with scope = "dataset"; lower it to that'
            )
        self.epochs = recipe.train.epochs

    @hookimpl(wrapper=True)
    def annotate(
        self, model: Any, tokens: Tokens, prelude: Prelude
    ) -> Generator[None, Tokens, Tokens]:
        """Find the log-probabilities, or compute them, and look again at some."""
        tokens = yield
        pass_ = Pass(self, model, tokens, prelude)
        try:
            kept = prelude.keep(pass_.key, pass_.build, Reference)
            pass_.look_again(kept)
        finally:
            pass_.close()
        tokens.columns = {**tokens.columns, "reference": kept.values}
        self.said.append(self.told(pass_, kept))
        return tokens

    @hookimpl
    def verdict(self) -> str | None:
        """Say what it took, and what it saves."""
        return "; ".join(self.said) or None

    def told(self, done: Pass, kept: Reference) -> str:
        """Say what the pass over a data set took, what it saves, and where it is kept."""
        count = len(done.tokens)
        cost = f"{count:,} pairs known"
        if done.computed:
            cost = f"{done.computed:,} of {count:,} pairs computed in {done.seconds:.1f} s"
        again = f", {self.probes} of them again as a check ({done.off:.0e} off)" * bool(self.probes)
        # What training would compute in each epoch, were it not kept.
        saved = kept.facts["seconds_per_pair"] * count * self.epochs - done.seconds
        saves = [f"{saved:.1f} s of such passes"] if saved > 0.05 else []
        saves += [f"{size} GiB on each rank"] if (size := round(done.spared / 2**30, 2)) else []
        saving = f"; saves {' and '.join(saves) or 'nothing'} in this run"
        return f"{cost}{again}{saving}; kept in {kept.folder}"


class Pass:
    """The pass over one data set."""

    def __init__(self, plugin: DpoReference, model: Any, tokens: Tokens, prelude: Prelude) -> None:
        self.plugin, self.tokens, self.prelude = plugin, tokens, prelude
        self.model, self.trained = model, model
        self.adapted: Any = None
        plain = getattr(model, "module", model)
        self.kernel = plain.config.get_text_config()._attn_implementation
        if not plugin.given:
            self.adapted = getattr(plain, "disable_adapter", None)
        self.spared = (
            0
            if self.adapted
            else sum(
                getattr(one, "ds_tensor", getattr(one, "_local_tensor", one)).nbytes
                for one in plain.parameters()
            )
        )
        self.training = model.training
        self.seconds, self.computed, self.off = 0.0, 0, 0.0
        model.eval()

    def close(self) -> None:
        """Let the model train again; a reference that was loaded goes."""
        self.trained.train(self.training)
        self.model = self.trained

    @cached_property
    def key(self) -> dict[str, Any]:
        """All that the log-probabilities depend on."""
        from plugsft.kit.model import weights_digest

        load = self.prelude.load
        path = self.plugin.given or load.path
        revision = None if self.plugin.given else load.kwargs.get("revision")
        families = {"plugsft_documents": "sdpa"}
        reference = {
            "weights": weights_digest(path, revision),
            "dtype": str(load.kwargs.get("dtype")),
            "exact": self.prelude.exact,
            "kernel": families.get(self.kernel, self.kernel),
            "device": self.device.type,
        }
        return {"kind": "reference", "tokens": self.tokens.facts["key"], "reference": reference}

    @property
    def device(self) -> torch.device:
        """Where it is computed."""
        device: torch.device = next(iter(self.trained.parameters())).device
        return device

    def build(self, folder: Path | None) -> None:
        """Compute the missing values on all ranks; the main process writes them."""
        import torch

        started = time.perf_counter()
        count = len(self.tokens)
        values, done = np.zeros((count, 2), np.float32), np.zeros(count, np.float32)
        ids = np.zeros(0, np.uint64)
        with self.prelude.agreed("reading known log-probabilities"):
            if folder is not None:
                ids = ids_of(self.tokens)
                take_over(folder, self.key, ids, values, done)
        done = self.prelude.added(torch.from_numpy(done)).cpu().numpy()
        left = np.flatnonzero(done == 0)
        first = len([*folder.glob("data-*")]) if folder is not None else 0
        tokens = 0
        with progress("reference", len(left), "pairs") as advance:
            for number, parts in enumerate(self.blocks(left), start=first):
                chosen = np.concatenate(parts)
                sums = self.sums(parts)
                with self.prelude.agreed("writing log-probabilities"):
                    if folder is not None:
                        write(folder / f"data-{number:06d}.arrow", chosen, ids[chosen], sums)
                tokens += int(self.tokens.lengths[chosen].sum())
                self.seconds = time.perf_counter() - started
                advance(len(chosen), f"{tokens / self.seconds:,.0f} tokens/s")
        self.computed = len(left)
        with self.prelude.agreed("writing log-probabilities"):
            if folder is not None:
                self.finish(folder)

    def finish(self, folder: Path) -> None:
        """Write what tells what the folder holds."""
        facts = {
            "kind": "reference",
            "key": digest(self.key),
            "key_parts": self.key,
            "rows": len(self.tokens),
            "tokens": int(self.tokens.lengths.sum()),
            "seconds_per_pair": self.seconds / max(1, self.computed),
            "sources": self.tokens.facts["sources"],
        }
        (folder / "facts.json").write_text(json.dumps(facts, indent=1))

    def blocks(self, left: Ints) -> Iterator[list[Ints]]:
        """Yield so many micro-batches at a time, the longest pairs first."""
        parts = laid_out(self.tokens, left, self.plugin.room, self.plugin.packed)
        size = BLOCK * self.prelude.ranks
        for start in range(0, len(parts), size):
            yield parts[start : start + size]

    def sums(self, parts: list[Ints]) -> Values:
        """Return the log-probabilities of some micro-batches' pairs; each rank takes its share."""
        import torch

        rank, ranks = self.prelude.rank, self.prelude.ranks
        if self.plugin.given and self.model is self.trained:
            self.model = self.prelude.frozen(self.plugin.given)
        whole = torch.zeros(sum(map(len, parts)), 2, device=self.device)
        starts = np.cumsum([0, *map(len, parts)])
        for step in range(0, len(parts), ranks):
            place = step + rank
            mine = parts[place] if place < len(parts) else parts[0][:0]
            found = self.pairs(mine)
            if len(mine):
                whole[starts[place] : starts[place + 1]] = found
        added: Values = self.prelude.added(whole).cpu().numpy()
        return added

    def pairs(self, examples: Ints) -> torch.Tensor:
        """Return the log-probabilities of pairs, in one micro-batch."""
        import torch

        counts = torch.from_numpy(self.tokens.sequence_targets(examples)).to(self.device)
        with self.adapted() if self.adapted else nullcontext():
            losses = self.prelude.losses(self.model, self.tokens, examples)
        sums = torch.segment_reduce(losses, "sum", lengths=counts, unsafe=True, initial=0)
        return -sums.view(-1, 2)

    def look_again(self, kept: Reference) -> None:
        """Compute some pairs again, and compare."""
        import torch

        chosen = torch.zeros(self.plugin.probes, device=self.device, dtype=torch.float64)
        if self.prelude.rank == 0:
            picked = np.random.default_rng().integers(0, len(self.tokens), self.plugin.probes)
            chosen += torch.from_numpy(picked).to(chosen)
        picks = self.prelude.added(chosen).cpu().numpy().astype(np.int64)
        share, least = NEAR[self.prelude.exact]
        for number in picks:
            # Every rank computes the same one, in a micro-batch of its own.
            [now] = self.sums([np.array([number])] * self.prelude.ranks)[:1]
            then = kept.values[number]
            off = np.abs(now - then)
            self.off = max(self.off, float(off.max()))
            if not (off <= np.maximum(share * np.abs(then), least)).all():
                raise TrainError(
                    f"plugins.dpo_reference: pair {number} (row {self.tokens.rows[number]}) has "
                    f"the log-probabilities {now.tolist()} now, and {then.tolist()} in "
                    f"{kept.folder}. They are of other weights or another kernel, or were damaged: "
                    "remove that folder, and they are computed again"
                )


class Reference:
    """What is kept: two log-probabilities for each example of a data set."""

    def __init__(self, folder: Path, _in_memory: bool = False) -> None:
        self.folder = folder
        try:
            self.facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
            tables = [read(path) for path in sorted(folder.glob("data-*.arrow"))]
            examples = np.concatenate([table["example"] for table in tables])
            self.ids = np.zeros(self.facts["rows"], np.uint64)
            self.values = np.full((self.facts["rows"], 2), np.nan, np.float32)
            self.ids[examples] = np.concatenate([table["id"] for table in tables])
            for place, side in enumerate(("chosen", "rejected")):
                self.values[examples, place] = np.concatenate([table[side] for table in tables])
            if np.isnan(self.values).any():
                raise ValueError("some pairs are missing")
        except (OSError, LookupError, TypeError, ValueError, pa.ArrowException) as error:
            raise DataError(
                f"{folder}: damaged: {error}. Remove it: it is computed again"
            ) from error


def laid_out(tokens: Tokens, examples: Ints, room: int, packed: bool) -> list[Ints]:
    """Return micro-batches of pairs, the longest first: as many tokens as there is room for."""
    sizes = tokens.lengths[examples]
    if not packed:
        # A row for each answer, as long as the longest of all.
        firsts = tokens.sequences(examples)[0].reshape(-1, 2)
        sizes = 2 * firsts.max(1)
    order = np.argsort(-sizes, kind="stable")
    examples, sizes = examples[order], sizes[order]
    ends = np.cumsum(sizes)
    parts, start = [], 0
    while start < len(examples):
        begun = ends[start] - sizes[start]
        stop = int(np.searchsorted(ends, begun + room, "right"))
        if not packed:
            stop = start + room // int(sizes[start])
        stop = max(stop, start + 1)
        parts.append(examples[start:stop])
        start = stop
    return parts


def ids_of(tokens: Tokens) -> NDArray[np.uint64]:
    """Return a checksum of each pair: its tokens, and which of them are targets."""
    ids = np.zeros(len(tokens), np.uint64)
    for number in range(len(tokens)):
        words, mask = tokens.example(number)
        ids[number] = xxhash.xxh3_64_intdigest(words.tobytes() + np.packbits(mask).tobytes())
    return ids


def take_over(
    folder: Path, key: dict[str, Any], ids: NDArray[np.uint64], values: Values, done: Values
) -> None:
    """Fill in what is known: of this folder's build that was killed, and of other data sets."""
    begun = [read(path) for path in sorted(folder.glob("data-*.arrow"))]
    for table in begun:
        values[table["example"]] = np.stack([table["chosen"], table["rejected"]], 1)
        done[table["example"]] = 1
    before = done.copy()
    for other in sorted(folder.parent.glob("[0-9a-f]*/facts.json")):
        with suppress(OSError, ValueError, LookupError, DataError):
            parts = json.loads(other.read_text())["key_parts"]
            if parts["reference"] == key["reference"]:
                kept = Reference(other.parent)
                order = np.argsort(kept.ids)
                places = order[np.searchsorted(kept.ids, ids, sorter=order) % len(order)]
                found = (kept.ids[places] == ids) & (done == 0)
                values[found], done[found] = kept.values[places[found]], 1
    taken = np.flatnonzero(done > before)
    if len(taken):
        write(folder / f"data-{len(begun):06d}.arrow", taken, ids[taken], values[taken])


def write(path: Path, examples: Ints, ids: NDArray[np.uint64], values: Values) -> None:
    """Write the log-probabilities of some pairs, at once or not at all."""
    half = path.with_name(f".{path.name}.tmp")
    columns = [examples, ids, *np.ascontiguousarray(values.T)]
    batch = pa.record_batch([pa.array(one) for one in columns], schema=SCHEMA)
    with pa.OSFile(str(half), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as file:
        file.write_batch(batch)
    half.replace(path)


def read(path: Path) -> dict[str, Any]:
    """Read such a file."""
    with pa.OSFile(str(path)) as file:
        table = pa.ipc.open_file(file).read_all()
    return {name: table[name].to_numpy() for name in SCHEMA.names}
