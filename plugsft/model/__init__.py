"""The model: its files, its configuration, its loss, and proofs about it."""
