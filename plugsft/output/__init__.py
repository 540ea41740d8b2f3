"""The output folder of a run: record, checkpoints, final model, report."""
