"""What stands before a run: its inputs and output folder are checked, its ranks are started.

Commands and `plugsft.api.train` both begin here. Mistakes are reported before torch is imported, so
`train` imports what it needs step by step, and `resume` nothing. Ranks are always started by
accelerate's launcher (`run_accelerate`), with the options of a `Layout`.
"""
