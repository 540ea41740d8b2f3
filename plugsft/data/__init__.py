"""From rows to tokens on disk."""
