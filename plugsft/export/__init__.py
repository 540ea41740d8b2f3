"""A trained model after its run: found, asked, copied, merged, uploaded, with its card.

`folder` finds the model of an output without importing torch; `chat` and `export` load it. A model
is always loaded through `quantized`, so that adapters meet the base that they were trained on.
"""
