"""`plugsft check` and `plugsft inspect`: mistakes found before training."""
