"""What is said of a recipe and its data before a run: `check`, `inspect` and `prepare`.

`check` makes the checks that a run makes at its stages (start/checks.py lists them), and adds only
what needs all of them: how many steps there will be, and how much room. `check` and `inspect` judge
the same sample of rows by the same findings, so that both say the same of a row. Rows that were
prepared ahead are looked at as a run would: a second way to read them would find other mistakes.
"""
