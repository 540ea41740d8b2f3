"""What stands before a run: its inputs and output folder are checked, its ranks are started.

Commands and `plugsft.api.train` both begin here. Wrong options and paths, and an output that holds
results, are refused before torch is imported, so `train` imports step by step; what a library reads
is checked once, behind that door. Ranks are always started by accelerate's launcher
(`run_accelerate`), with the options of a `Layout`.
"""
