"""Short runs of a recipe in fresh processes."""
