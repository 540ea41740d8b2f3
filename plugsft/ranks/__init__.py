"""The processes of a run: launched, sharded, and agreeing with each other."""
