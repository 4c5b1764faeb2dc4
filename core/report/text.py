"""Text of unknown origin on its way into HTML, and numbers on their way to a reader."""

from __future__ import annotations

import html
import json
import math
from typing import Any

_CONTROLS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n\r"}
_CONTROLS |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
# Marks that turn the direction of what follows them: shown, not obeyed.
_CONTROLS |= dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F], 0xFFFD)


def esc(value: object) -> str:
    """Return any text as HTML text or attribute: no markup, control characters visible, no lone surrogates."""
    text = str(value).encode("utf-8", "replace").decode("utf-8")
    return html.escape(text.translate(_CONTROLS), quote=True)


def embed(value: Any) -> str:
    """Return JSON that may stand inside <script>: ASCII, and no `<`, so nothing in it can end the element."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def number(value: float | None, digits: int = 4) -> str:
    """Format a number for reading: `digits` significant digits, thousands separated, no bare inf or nan."""
    if value is None:
        return "—"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value and not 1e-3 <= abs(value) < 1e15:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{_trim(mantissa)}e{int(exponent)}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return _trim(f"{value:.{digits}g}")


def count(value: float) -> str:
    """Format a large whole number in short: 12.3M, 4.85B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:,.0f}"


def plural(count: int, noun: str) -> str:
    """Return `1 check`, `2 checks`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _trim(digits: str) -> str:
    return digits.rstrip("0").rstrip(".") if "." in digits else digits
