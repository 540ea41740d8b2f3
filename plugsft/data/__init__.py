"""From rows to tokens on disk: one road for all sources.

An entry of the recipe is opened by its name (sources.py): whatever reads it, its rows are ranges
of splits, and each range can be cut and sent to another process. Rows are cut into slices of about
4 MB, the same on every machine. A slice becomes one shard (slices.py): its rows are read, rendered
as text with trained spans (render.py), encoded, and cut to examples (examples.py); what cannot be
used is counted with its reason, and messages name it (row_names.py). When all shards are there, the
index makes them one data set (prepare.py), which is named by a key of everything that its tokens
depend on, and opened by tokens/store.py.

Slices, and no stream: a killed process loses a slice, several processes or machines share them,
and the tokens are the same bytes however many took part. In the place of a row that cannot be read
comes the reason: nothing vanishes, and no file is opened twice.
"""
