"""plugsft from Python: `plugsft.train` and its like, as `plugsft/__init__.py` exports them."""
