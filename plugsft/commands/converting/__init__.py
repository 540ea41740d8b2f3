"""Turns a configuration of axolotl, LLaMA-Factory or TRL into a recipe: a file for each tool.

Most keys need no thought, so they stand in the tables of keys.toml: those that are copied, those
whose usual values need no line, and those that are not converted, with the reason. A tool's
function reads the others in the order in which they depend on each other: rows, packing, batch,
length, schedule. A key that no table has and no function reads is named as unknown; so nothing is
lost in silence.
"""
