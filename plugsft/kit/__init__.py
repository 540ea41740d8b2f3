"""The heavier tools for plugin authors: `tokens` imports numpy and Arrow, `model` imports torch."""
