"""Measured or predicted before a run: `bench` and `tune` train short trials, `plan` forecasts.

Each trial is a fresh process on the same examples, so that none inherits modules, caches or memory;
trials take turns, so that a machine that slows down favours none. A difference within the spread of
the rounds is called noise. A forecast needs neither weights nor a GPU: the model's own code runs on
tensors without data, and what a step allocates is added up.
"""
