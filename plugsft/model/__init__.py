"""The model: its files, its configuration, its loss, and its learning rates.

One process loads a model by transformers alone. Where ranks divide it, it is built without weights,
plugins edit it, and only then each rank reads its own numbers from the files (weight_files.py): so
adapters are divided with their layers, and no rank holds the whole model. The same reader compares
the trained model with its files.

transformers' own loading onto ranks was tried, and left: it divides the model before plugins edit
it, so each adapter becomes a unit of its own, and a step of LoRA took four times as long.
"""
