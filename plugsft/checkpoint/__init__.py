"""Checkpoints: the state of a training as JSON and safetensors, whole or absent, read by any ranks.

Each rank writes the numbers that it holds of each tensor, with their place in the whole tensor
(files.py), so that other ranks, under another strategy, find theirs. One process, DDP, FSDP2 and
ZeRO-3 differ only in where a rank's numbers lie (ranks/weights.py). All other values are a tree in
state.json (tree.py), which must be the same on all ranks. So whatever is like its weight, or equal
on all ranks, comes back exactly on any number of ranks. State of another kind is named in a warning
at the first checkpoint, and refused at a resume.

torch.distributed.checkpoint was tried, and left: it may write files that it cannot read, misses
lost files and changed bits, and keeps a pickle.
"""
