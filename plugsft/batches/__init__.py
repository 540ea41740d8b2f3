"""Which examples make which step, and what of them is trained.

The global batch of a step is a pure function of the examples' lengths, the seed, the epoch and the
step. Ranks, micro-batches and packing only lay it out. So a resumed run needs no state of a loader,
and any rank can say what any other computes. A step's loss is a sum over targets, divided once by
the number of targets of the whole global batch; the plan knows that number before a rank loads its
part.
"""
