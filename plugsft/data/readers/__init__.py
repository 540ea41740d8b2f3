"""Readers of sources that most recipes do not need, imported when one is named.

`datasets` reads local tables and the hub, by its own notation of splits. Addresses are read by
ranges of bytes (remote.py), since `datasets` would copy them whole.
"""
