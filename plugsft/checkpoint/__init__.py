"""Checkpoints: the state of a training as JSON and safetensors, whole or absent, read by any ranks.

Each rank writes the numbers that it holds of each tensor, with their place in the whole tensor
(files.py), so that other ranks, under another strategy, find theirs. One process, DDP, FSDP2 and
ZeRO-3 differ only in where a rank's numbers lie (ranks/weights.py). All other values are JSON in
state.json (tree.py), which must be the same on all ranks. So whatever is like its weight, or equal
on all ranks, comes back exactly on any number of ranks. State of another kind, and what an
optimizer keeps outside of the states of weights, is refused: the state is described once after step
1, when little is lost.

Any tree of Python's values, the counters in an optimizer's groups, and optimizers inside of it were
once found and stored by the core. Their plugin knows them better: it keeps them in `state_dict`.
torch.distributed.checkpoint was tried, and left: it may write files that it cannot read, misses
lost files and changed bits, and keeps a pickle.
"""
