"""Plugins: found by name, created from their tables, put in order, and called through pluggy.

A plugin's table in the recipe is the call of its class, so pydantic checks options as it checks the
recipe. pluggy calls the stages, where one answers and others wrap. It would call notices backwards
and end at the first error, without the plugin's name; so `Active.notify` calls these, in the order
that plugins declare. What pluggy passes over in silence is refused: a misspelt hook and a wrong
argument as a class is loaded (`create`), a lost result as a hook is called (`contracts`).
"""
