"""The recipe: one typed table for each subject, so that a misspelt key or a wrong type is an error.

pydantic checks the tables and holds their defaults and docs; `explain` turns its errors into place,
value and cure. The door reads a recipe before torch is imported, so nothing here needs torch. A run
writes the whole recipe, with defaults and absolute paths, into its output (`parse.resolved`): that
file trains the same again. YAML keeps to the rules of version 1.2: those of PyYAML would read `no`
as false and 12:30 as a number.
"""
