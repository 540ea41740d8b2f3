"""Needs a package that nobody has; so it must never be imported unless it is asked for."""

import plugsft_no_such_package

from plugsft import plugin


@plugin()
class EchoChamber:
    """Repeat everything."""

    package: str = plugsft_no_such_package.__name__
