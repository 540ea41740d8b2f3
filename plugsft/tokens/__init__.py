"""Tokens on disk, and the tokenizer that makes them.

Shards are Arrow files in a folder that `datasets` opens, too. The index repeats what planning
needs of each example, so that a run begins in a time that does not grow with the data, and maps a
shard when a step first needs it. Each file has one checksum, which is compared when the file is
opened: a flipped bit ends the run before it is trained on. Checksums of each example, compared at
each read, were there and are gone.
"""
