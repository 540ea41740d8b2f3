"""The model: its files, its configuration and its loss."""
