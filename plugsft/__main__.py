"""`python -m plugsft`, and so `accelerate launch -m plugsft`."""

from .cli import main

main()
