"""Readers of sources that most recipes do not need, imported when one is named.

`datasets` reads local tables and the hub, by its own notation of splits. Rows at addresses
of object stores are copied by `plugsft fetch`.
"""
