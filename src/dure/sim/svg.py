"""Small charts as inline SVG: lines and stacked areas on two axes, no script.

Colours are CSS classes (`p0`, `p1`, … lines; `a0`, `a1`, … areas), so that light and dark
are the page's business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import msgspec

Tick = tuple[float, str]


class Frame(msgspec.Struct, frozen=True):
    """A drawing area: its box in pixels and the values at its edges."""

    x_max: float
    y_max: float
    x_min: float = 0.0
    x_log: bool = False
    width: int = 400
    height: int = 210
    left: int = 44
    right: int = 12
    top: int = 10
    bottom: int = 26

    def x(self, value: float) -> float:
        """Pixels from the left."""
        if self.x_log:
            span = math.log(self.x_max / self.x_min)
            part = math.log(max(value, self.x_min) / self.x_min) / span
        else:
            part = (value - self.x_min) / (self.x_max - self.x_min)
        return self.left + part * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        high = self.height - self.top - self.bottom
        return self.top + (1 - value / self.y_max) * high


def chart(
    frame: Frame, label: str, x_ticks: Sequence[Tick], y_ticks: Sequence[Tick], *marks: str
) -> str:
    """A whole drawing; `label` is what a screen reader says."""
    box = f"0 0 {frame.width} {frame.height}"
    body = "".join((_axes(frame, x_ticks, y_ticks), *marks))
    return f'<svg viewBox="{box}" role="img" aria-label="{escape(label)}">{body}</svg>'


def _axes(frame: Frame, x_ticks: Sequence[Tick], y_ticks: Sequence[Tick]) -> str:
    right, bottom = frame.width - frame.right, frame.height - frame.bottom
    parts = []
    for value, text in y_ticks:
        y = frame.y(value)
        parts.append(f'<path class="grid" d="M{frame.left} {y:.1f}H{right}"/>')
        parts.append(
            f'<text class="y" x="{frame.left - 6}" y="{y + 3.5:.1f}">{escape(text)}</text>'
        )
    for value, text in x_ticks:
        x = frame.x(value)
        parts.append(f'<path class="tick" d="M{x:.1f} {bottom}v4"/>')
        parts.append(f'<text class="x" x="{x:.1f}" y="{bottom + 17}">{escape(text)}</text>')
    parts.append(f'<path class="axis" d="M{frame.left} {bottom}H{right}"/>')
    return "".join(parts)


def line(frame: Frame, xs: Sequence[float], ys: Sequence[float], number: int, title: str) -> str:
    """One line; its title shows where the pointer rests on it."""
    points = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in zip(xs, ys, strict=True))
    tip = f"<title>{escape(title)}</title>"
    return f'<polyline class="line p{number}" points="{points}">{tip}</polyline>'


def stack(
    frame: Frame, xs: Sequence[float], layers: Sequence[tuple[int, str, Sequence[float]]]
) -> str:
    """Areas piled up, the first one lowest: (class number, title, heights)."""
    below = [0.0] * len(xs)
    parts = []
    for number, title, heights in layers:
        above = [a + b for a, b in zip(below, heights, strict=True)]
        if any(heights):
            there = [f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in zip(xs, above, strict=True)]
            back = [f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in zip(xs, below, strict=True)]
            points = " ".join([*there, *reversed(back)])
            tip = f"<title>{escape(title)}</title>"
            parts.append(f'<polygon class="area a{number}" points="{points}">{tip}</polygon>')
        below = above
    return "".join(parts)


def level(frame: Frame, value: float, title: str) -> str:
    """A horizontal line to compare with, such as all GPUs there are."""
    y, right = frame.y(value), frame.width - frame.right
    tip = f"<title>{escape(title)}</title>"
    return f'<path class="level" d="M{frame.left} {y:.1f}H{right}">{tip}</path>'


def ticks(top: float, most: int) -> list[float]:
    """Round values from 0 to the last that is not above `top`, at most `most` steps."""
    if top <= 0:
        return [0.0]
    raw = top / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= raw * (1 - 1e-9))
    count = math.floor(top / step + 1e-9)
    return [i * step for i in range(count + 1)]
