"""`plugsft tune`: the fastest micro-batch that fits."""
