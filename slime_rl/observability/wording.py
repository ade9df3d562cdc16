"""Numbers as people read them: the console and the report use the same words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

_BARS = "▁▂▃▄▅▆▇█"


def duration(seconds: float) -> str:
    """'0.42 s', '12.3 s', '4 min 05 s', '2 h 07 min'."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def number(value: float) -> str:
    """Three or four significant digits; thousands grouped; a power of ten only where a plain number would be long."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-3:
        return f"{value:.2e}"
    if size >= 1000 or value == int(value):
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.1f}" if size >= 100 else f"{value:.3g}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def size(num_bytes: float) -> str:
    """'512 B', '1.4 MiB', '3.2 GiB'."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Finite values as bars from the lowest to the highest; longer series are averaged into `width` bins."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ""
    if len(known) > width:
        edges = [i * len(known) // width for i in range(width + 1)]
        known = [sum(known[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(known), max(known)
    if high == low:
        return _BARS[3] * len(known)
    return "".join(_BARS[round((value - low) / (high - low) * (len(_BARS) - 1))] for value in known)


def one_line(text: str, limit: int) -> str:
    """Text on one line, its middle left out when it is longer than `limit`."""
    flat = " ".join(text.split())
    if len(flat) <= limit:
        return flat
    head = (limit - 3) * 2 // 3
    return f"{flat[:head]} … {flat[len(flat) - (limit - 3 - head) :]}"
