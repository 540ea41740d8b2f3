"""Everything that measures or predicts."""
