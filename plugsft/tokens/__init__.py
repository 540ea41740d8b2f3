"""Tokens on disk, and the tokenizer that makes them."""
