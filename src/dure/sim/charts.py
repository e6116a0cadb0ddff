"""The charts of a report: who waited how long, and who used what when."""

from __future__ import annotations

from html import escape

from dure.sim.comparison import Comparison, Row
from dure.sim.series import (
    BINS,
    OTHERS,
    OverTime,
    horizon_s,
    in_use,
    largest_labs,
    over_time,
    share_started,
)
from dure.sim.style import LABS_SHOWN, OTHERS_CLASS, POLICIES_DISTINCT
from dure.sim.svg import Frame, Tick, chart, level, line, stack, ticks
from dure.sim.texts import word

_MINUTE_H = 1 / 60
_STEPS_H = (1 / 60, 1 / 6, 1.0, 6.0, 24.0, 168.0, 720.0)
_CURVE_POINTS = 160


class Charts:
    """All charts of one comparison, on common axes."""

    def __init__(self, comparison: Comparison, lang: str) -> None:
        self.rows = comparison.rows
        self.lang = lang
        self.until_s = horizon_s(row.first for row in self.rows)
        self.labs = largest_labs(self.rows[0].first, LABS_SHOWN)
        self._all_labs = {r.job.lab for row in self.rows for r in row.first.ran}

    def _w(self, key: str, **params: object) -> str:
        return word(key, self.lang, **params)

    def html(self) -> str:
        """The section: both comparisons, then two charts for each policy."""
        lines = self._policy_legend()
        both = self._figure("cdf", self._cdf()) + self._figure("utilisation", self._in_use())
        parts = [f"<h2>{escape(self._w('against'))}</h2>{lines}<div class='pair'>{both}</div>"]
        parts.append(f"<h2>{escape(self._w('labs_over_time'))}</h2>")
        parts.append(f"<p>{escape(self._w('labs_note'))}</p>{self._lab_legend()}")
        found = [(row, over_time(row.first, self.labs, self.until_s)) for row in self.rows]
        top = max(self._highest(series) for _, series in found)
        parts += [self._of_policy(row, series, top) for row, series in found]
        return "".join(parts)

    def _figure(self, key: str, drawing: str) -> str:
        note = f"<span>{escape(self._w(key + '_note'))}</span>"
        caption = f"<figcaption>{escape(self._w(key))}{note}</figcaption>"
        return f"<figure>{caption}{drawing}</figure>"

    # -- policies against each other --

    def _cdf(self) -> str:
        longest = max(24.0, *(row.values["max_wait_h"] for row in self.rows))
        frame = Frame(x_min=_MINUTE_H, x_max=longest * 1.05, x_log=True, y_max=1.0)
        ratio = frame.x_max / frame.x_min
        hours = [frame.x_min * ratio ** (i / _CURVE_POINTS) for i in range(_CURVE_POINTS + 1)]
        marks = [
            line(frame, hours, share_started(row.first, hours), _look(n), row.case.name)
            for n, row in enumerate(self.rows)
        ]
        x_ticks = [(h, self._time(h)) for h in _STEPS_H if h <= frame.x_max]
        return chart(frame, self._w("cdf"), x_ticks, _percents(), *marks)

    def _time(self, hours: float) -> str:
        if hours < 1:
            minutes = round(hours * 60)
            return self._w("at_most_minute") if minutes == 1 else self._w("minutes", n=minutes)
        named = {24.0: "day", 168.0: "week", 720.0: "month"}
        return self._w(named[hours]) if hours in named else self._w("hours", n=round(hours))

    def _in_use(self) -> str:
        frame = Frame(x_max=self.until_s / 86_400, y_max=1.0)
        marks = [
            line(frame, self._middles(), in_use(row.first, self.until_s), _look(n), row.case.name)
            for n, row in enumerate(self.rows)
        ]
        return chart(frame, self._w("utilisation"), self._days(), _percents(), *marks)

    def _middles(self) -> list[float]:
        """The middle of each piece of time, in days."""
        piece_d = self.until_s / 86_400 / BINS
        return [(i + 0.5) * piece_d for i in range(BINS)]

    def _days(self) -> list[Tick]:
        until_d = self.until_s / 86_400
        values = ticks(until_d, 6)
        named = [(v, f"{v:g}") for v in values]
        return [*named[:-1], (values[-1], self._w("days", n=f"{values[-1]:g}"))]

    # -- labs under each policy --

    def _highest(self, series: OverTime) -> float:
        return max(map(sum, zip(*series.waiting.values(), strict=True)), default=0.0)

    def _of_policy(self, row: Row, series: OverTime, queue_top: float) -> str:
        gpus = max(float(r.first.gpus) for r in self.rows)
        used = self._stacked("usage", series.running, gpus, row.first.gpus)
        queued = self._stacked("queue", series.waiting, queue_top, None)
        return f"<h3>{escape(row.case.name)}</h3><div class='pair'>{used}{queued}</div>"

    def _stacked(
        self, key: str, series: dict[str, list[float]], top: float, there_are: int | None
    ) -> str:
        frame = Frame(x_max=self.until_s / 86_400, y_max=1.06 * top or 1.0)
        layers = [
            (_area(n, lab), self._lab(lab), heights)
            for n, (lab, heights) in enumerate(series.items())
        ]
        marks = [stack(frame, self._middles(), layers)]
        if there_are is not None:
            marks.append(level(frame, there_are, f"{there_are} {self._w('gpus')}"))
        y_ticks = [(v, f"{v:,g}") for v in ticks(top, 4)]
        drawing = chart(frame, self._w(key), self._days(), y_ticks, *marks)
        return f"<figure><figcaption>{escape(self._w(key))}</figcaption>{drawing}</figure>"

    def _lab(self, lab: str) -> str:
        hidden = len(self._all_labs) - len(self.labs) + 1
        return self._w("others", count=hidden) if lab == OTHERS else lab

    # -- legends --

    def _policy_legend(self) -> str:
        items = []
        for n, row in enumerate(self.rows):
            mark = f'<path class="line p{_look(n)}" d="M0 6H26"/>'
            items.append(_legend(mark, row.case.name))
        return f'<ul class="legend">{"".join(items)}</ul>'

    def _lab_legend(self) -> str:
        items = []
        for n, lab in enumerate(self.labs):
            mark = f'<rect class="a{_area(n, lab)}" x="6" width="14" height="12" rx="2"/>'
            items.append(_legend(mark, self._lab(lab)))
        return f'<ul class="legend">{"".join(items)}</ul>'


def _legend(mark: str, text: str) -> str:
    return f'<li><svg viewBox="0 0 26 12" aria-hidden="true">{mark}</svg>{escape(text)}</li>'


def _look(number: int) -> int:
    """Class of a policy's line; beyond those there are the looks repeat."""
    return number % POLICIES_DISTINCT


def _area(number: int, lab: str) -> int:
    return OTHERS_CLASS if lab == OTHERS or number >= OTHERS_CLASS else number


def _percents() -> list[Tick]:
    return [(n / 4, f"{25 * n} %") for n in range(5)]
