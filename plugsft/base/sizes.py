"""Sizes as users write them: 20GiB, or 20GB, which is less."""

import re

from .errors import PlugsftError

SIZES = "GiB is 2^30 bytes, GB 10^9."
"""The help of each option that reads a size."""
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
UNITS |= {f"{unit}I": 1 << 10 * power for power, unit in enumerate("KMGT", start=1)}


def parse_size(text: str, option: str = "size") -> int:
    """Return the bytes of "20GiB", "1.5 TB" or "1000000"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    if match is None or match[2] not in UNITS:
        raise PlugsftError(f"{option}: given '{text}'; write it as 20GiB, 500MB, or in bytes")
    return round(float(match[1]) * UNITS[match[2]])
