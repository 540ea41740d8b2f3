"""The laws of plugsft as checks for a plugin's own tests.

    from plugsft import testing

    def test_it_changes_nothing_that_is_learned():
        testing.keeps_gradients("my_plugin", {"my_option": 3})

Each check trains a tiny model on tiny data, in new processes and a temporary folder. A check that
fails raises AssertionError and says what to change. `tables` are merged into the tiny recipe, for
plugins that need other plugins, data or settings. With `ranks=2`, two processes train together on
the CPU.
"""

from .laws import (
    costs_at_most,
    keeps_gradients,
    ranks_agree,
    resumes,
    summary,
    survives_a_worker,
)

__all__ = [
    "costs_at_most",
    "keeps_gradients",
    "ranks_agree",
    "resumes",
    "summary",
    "survives_a_worker",
]
