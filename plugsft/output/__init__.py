"""The output folder of a run: what it holds, who may write there, and how people read it.

One RunRecord reads run.json and metrics.jsonl and knows each field's name, unit and text; `show`,
`diff`, the report and the model card only lay its texts out, so none has an idea of its own of what
a field is called. A table of run.json that no reader knows is flattened and shown as it is: a new
field needs no change here. Losses come from metrics.jsonl alone, also as of a checkpoint's step.

A run replaces only what a run wrote: folders by their manifests, run.json as it can be read, and
the other files by their first characters. A valid run.json as the only sign was tried: a user's own
notes or recipe beside it would have been lost.
"""
