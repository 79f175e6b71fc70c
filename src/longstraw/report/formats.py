"""Numbers, sizes and durations as short texts, and text made safe for a page."""

from __future__ import annotations

import html
import math
import re

ABSENT = "–"
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


def escape(text: str) -> str:
    """Text for HTML content or a quoted attribute; control characters and lone surrogates become a visible sign."""
    return html.escape(_CONTROL.sub("\ufffd", text))


def number_text(value: float) -> str:
    """Three significant digits, whole numbers in full, a dash for what is not finite."""
    if not math.isfinite(value):
        return ABSENT
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 0.001:
        return f"{value:.3g}"
    return f"{value:.1e}"


def score_text(value: float) -> str:
    """Two decimals for rewards and scores, so that a before and an after line up."""
    if math.isfinite(value) and (abs(value) >= 100 or 0 < abs(value) < 0.005):
        return number_text(value)
    return f"{value:.2f}" if math.isfinite(value) else ABSENT


def count_text(value: float) -> str:
    """A large count with a decimal prefix: 1.2M."""
    if not math.isfinite(value):
        return ABSENT
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "K")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'K' else size):.3g}{unit}"
    return f"{value:,.0f}"


def bytes_text(value: float) -> str:
    """A size with a binary prefix: 1.5 GiB."""
    if not math.isfinite(value):
        return ABSENT
    for exponent, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(value) >= 1024**exponent:
            scaled = value / 1024**exponent
            return f"{scaled:.0f} {unit}" if scaled >= 100 else f"{scaled:.3g} {unit}"
    return f"{value:.0f} B"


def seconds_text(value: float) -> str:
    """A duration in its two largest units: 1 h 05 min, 3 min 20 s, 4.2 s."""
    if not math.isfinite(value):
        return ABSENT
    if value < 59.95:
        return f"{value:.1f} s" if value >= 0.1 else f"{value * 1000:.0f} ms"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"
