"""Refuse inputs that a run cannot train on, before torch is imported."""

from pathlib import Path

from ..base.errors import DataError
from ..base.limits import parse_json, read_json_object
from ..data.render import lead_row, readable_format
from ..data.slices import describe_unknown_columns
from ..data.sources import open_source
from ..data.token_rows import hold_tokens
from ..model.schedule import check_schedule
from ..output.folder import ensure_inputs
from ..recipe.capabilities import Capability
from ..recipe.tables import Data, Model, Recipe, Source, ensure_context
from ..registry.active import Active

SLOW = (".json", ".parquet", ".arrow")
"""Files that are read whole, or by `datasets`, when they are opened."""


def check_inputs(recipe: Recipe, active: Active, path: Path) -> None:
    """Refuse wrong paths, schedules and lengths, and data files without usable rows.

    Opening the run repeats these checks on the whole data, and makes those that need torch.
    """
    ensure_inputs(recipe, path)
    check_schedule(recipe.train)
    ensure_context(recipe, written_context(recipe.model))
    renders = any(active.implements(name, ("render",)) for name in active.plugins)
    sources = [] if recipe.data.tokens else recipe.data.all_sources()
    keyed = [("data.source", source) for source in sources]
    keyed += [("eval.source", recipe.eval_source())] if recipe.eval else []
    for key, source in keyed:
        file = Path(source.source)
        if file.is_file() and (file.suffix not in SLOW or not file.stat().st_size):
            open_source(source, key)
            if recipe.data.on_bad_row == "error" and source.split == "train" and not renders:
                check_first_row(source, recipe.data)


def one_at_a_time(recipe: Recipe, ranks: int) -> str:
    """Warn of one example a forward, unless the recipe asks for it."""
    train, share = recipe.train, recipe.train.batch_size // ranks
    if share < 2 or "micro_batch" in train.model_fields_set or recipe.provides("packed_rows"):
        return ""
    return (
        "the model computes one example at a time, which is slow. Add "
        f"{Capability.bundled('packed_rows').table}, or set train.micro_batch = {min(8, share)} "
        "(1 if you mean it)"
    )


def written_context(model: Model) -> int | None:
    """Return the context that a model's config.json names; None if transformers is needed."""
    if model.scratch:
        return model.scratch.context
    try:
        config = read_json_object(Path(str(model.path), "config.json"))
    except (OSError, ValueError):
        return None
    text = config.get("text_config", config)
    context = text.get("max_position_embeddings") if isinstance(text, dict) else None
    return context if isinstance(context, int) and context > 0 else None


def check_first_row(source: Source, data: Data) -> None:
    """Refuse a jsonl file whose first row no format reads."""
    with Path(source.source).open("rb") as file:
        line = next(filter(bytes.strip, file), b"")
    try:
        row = parse_json(line)
    except ValueError:
        return  # reported with all other bad rows
    if not isinstance(row, dict) or not row.keys() >= {*data.columns.values()}:
        return
    named = lead_row([row], data)
    if not hold_tokens(named) and readable_format(named) is None:
        raise DataError(describe_unknown_columns(named, data, source.source))
