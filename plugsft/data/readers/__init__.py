"""Readers of sources that most recipes do not need, imported when one is named."""
