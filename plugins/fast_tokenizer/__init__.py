"""Encode with a much faster tokenizer engine, once its ids are proved to be the same."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Literal

from plugsft import Encoded, PluginError, RecipeError, hookimpl, not_installed, plugin, state

if TYPE_CHECKING:
    from plugsft.data_kit import Tokenizer, Tokens

    from .engines import Engine

OWN = "transformers"
"""The name of the model's own tokenizer among the engines."""
CURE = 'Set plugins.fast_tokenizer.engine = "transformers"'
MIN_SHARE = 0.5
"""Smallest share of the texts that an engine must encode for "auto" to choose it."""


@plugin()
class FastTokenizer:
    """Encode with a much faster tokenizer engine, once its ids are proved to be the same.

    The proof compares its ids with those of the model's own tokenizer on a sample of the rows.
    Each later call compares one text more, and the tokens of every text must decode to it byte for
    byte. The model's own tokenizer encodes all other texts.
    """

    engine: Literal["auto", "gigatoken", "fastokens", "transformers"] = "auto"
    """auto: the first that can be loaded and proved. gigatoken and fastokens come with the extra
    `fast`. transformers: the model's own tokenizer."""

    started_run: bool = state(False)
    """Whether this process started the run; a worker of multiprocess_tokenize did not."""
    engines: Any = state({})
    """Id of a tokenizer object -> name and engine; without an engine, the tokenizer encodes."""
    reasons: dict[str, str] = state({})
    """Engine -> why it was not chosen."""
    counts: dict[str, int] = state({})
    """Engine -> number of texts that it encoded, in all processes."""

    @hookimpl
    def check(self) -> None:
        """Refuse an engine that is not installed, or where none is."""
        from .engines import ENGINES

        self.started_run = True
        wanted = ENGINES if self.engine == "auto" else {self.engine} - {OWN}
        missing = [not_installed(name, "fast") for name in wanted]
        if missing and all(missing):
            raise RecipeError(missing[0])

    @hookimpl
    def encode(self, texts: list[str], tokenizer: Tokenizer, special_tokens: bool) -> Encoded:
        """Encode with an engine; the first texts prove it, and one text of each later call."""

        from .proof import compare_one

        is_proved = id(tokenizer) in self.engines
        if texts and not is_proved:
            self.engines[id(tokenizer)] = self.choose(texts, tokenizer)
        name, engine = self.engines.get(id(tokenizer), (OWN, None))
        if engine is None:
            return tokenizer.encode_texts(texts, special_tokens)
        encoded = tokenizer.encode_texts(texts, special_tokens, engine, name)
        if texts and is_proved:
            difference = compare_one(name, encoded, texts, tokenizer, special_tokens)
            if difference:
                raise PluginError(f"{difference}. {CURE}")
        return encoded

    def choose(self, texts: list[str], tokenizer: Tokenizer) -> tuple[str, Engine | None]:
        """Return the name and engine of the first that can be loaded and proved."""
        from .engines import ENGINES, UnusableEngine, load
        from .proof import guard, prove

        for name in ENGINES if self.engine == "auto" else {self.engine} - {OWN}:
            try:
                engine = guard(load(name, tokenizer), tokenizer)
                share = prove(name, engine, texts, tokenizer)
                if self.engine == "auto" and share < MIN_SHARE:
                    raise UnusableEngine(f"{name} can encode only {share:.0%} of the texts")
                return name, engine
            except UnusableEngine as error:
                # Each process proves with its own rows: another may have accepted this engine.
                if self.engine == name or (error.wrong_ids and not self.started_run):
                    raise PluginError(f"{error}. {CURE}") from error
                self.reasons[name] = str(error)
        return OWN, None

    @hookimpl(wrapper=True)
    def add_columns(self) -> Generator[None, Tokens, Tokens]:
        """Read how many texts each engine encoded, in all processes."""
        tokens = yield
        # The first tokens are the training data.
        self.counts = self.counts or tokens.facts["engines"]
        return tokens

    @hookimpl
    def summary(self) -> str:
        """Report the texts of each engine, and why others were not chosen.

        Begins with "warning:" if no engine fits.
        """
        from .engines import ENGINES

        total, own = sum(self.counts.values()), self.counts.get(OWN, 0)
        fast = [f"{name} encoded {count:,}" for name, count in self.counts.items() if name != OWN]
        if self.engine == "auto" and not fast and len(self.reasons) == len(ENGINES):
            return (
                "warning: no engine fits, so the model's own tokenizer encodes "
                f"({'; '.join(self.reasons.values())}). Remove [plugins.fast_tokenizer]"
            )
        lines = []
        if fast:
            lines = [f"{', '.join(fast)} of {total:,} texts"]
            if own:
                lines[0] += (
                    f", the model's own tokenizer {own:,} (texts that it normalizes, or with "
                    "characters that engines encode differently)"
                )
        elif own:
            lines = [f"the model's own tokenizer encoded {own:,} texts"]
        return "; ".join([*lines, *self.reasons.values()])
