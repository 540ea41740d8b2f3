"""From tokens to batches: which examples make which step."""
