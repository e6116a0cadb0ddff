"""The comparison as one HTML file: no script, nothing from the network, charts drawn here.

Every text that came from outside (labs, policies, files, the command) is escaped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from html import escape

import msgspec

from dure import __version__
from dure.sim.charts import Charts
from dure.sim.comparison import Comparison, Row
from dure.sim.style import sheet
from dure.sim.texts import COLUMNS, Column, figure, word
from dure.sim.trace import Cluster, Trace

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


class Heading(msgspec.Struct, frozen=True):
    """How and when a report was made."""

    command: str
    made: str


def report(comparison: Comparison, heading: Heading, lang: str) -> str:
    """The whole page."""
    title = escape(word("title", lang))
    page = _Page(comparison, lang)
    body = "".join(
        (
            f"<h1>{title}</h1>",
            f'<code class="command">{escape(heading.command)}</code>',
            page.facts(heading.made),
            page.figures(),
            page.by_gpus(),
            Charts(comparison, lang).html(),
            page.meanings(),
            f"<footer>Dure {escape(__version__)}</footer>",
        )
    )
    return (
        f'<!doctype html>\n<html lang="{lang}"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title} – Dure</title><style>{sheet()}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


class _Page:
    """Tables and texts of one report."""

    def __init__(self, comparison: Comparison, lang: str) -> None:
        self.comparison = comparison
        self.rows = comparison.rows
        self.lang = lang

    def _w(self, key: str, **params: object) -> str:
        return escape(word(key, self.lang, **params))

    def facts(self, made: str) -> str:
        """Date, load, machines, and what a reader must know."""
        pairs = [(self._w("made"), escape(made)), (self._w("load"), self._load())]
        pairs += [(self._w("cluster"), text) for text in self._clusters()]
        cells = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in pairs)
        notes = "".join(
            f"<li{_class(key)}>{self._w(key, **params)}</li>"
            for key, params in self.comparison.facts()
        )
        return f'<dl class="facts">{cells}</dl><ul class="notes">{notes}</ul>'

    def _load(self) -> str:
        return self._w("summary", **about(self.comparison.trace))

    def _clusters(self) -> Iterable[str]:
        """Each set of machines once, with the policies that ran on it where they differ."""
        found: dict[tuple[tuple[str, int, int], ...], list[str]] = {}
        for row in self.rows:
            found.setdefault(_groups(row.case.cluster), []).append(row.case.name)
        for groups, names in found.items():
            nodes = sum(count for _, _, count in groups)
            gpus = sum(per_node * count for _, per_node, count in groups)
            parts = (self._w("nodes_of", count=c, gpus=g, tier=t) for t, g, c in groups)
            who = f" – {escape(', '.join(names))}" if len(found) > 1 else ""
            yield f"{self._w('pool', gpus=gpus, nodes=nodes)}: {', '.join(parts)}{who}"

    def figures(self) -> str:
        """All columns of all policies."""
        names = "".join(f'<th scope="col">{escape(r.case.name)}</th>' for r in self.rows)
        lines = []
        for column in COLUMNS:
            name = escape(column.name[self.lang == "ko"])
            cells = "".join(f"<td>{_cell(column, r)}</td>" for r in self.rows)
            lines.append(f'<tr><th scope="row">{name}</th>{cells}</tr>')
        head = f"<thead><tr><th></th>{names}</tr></thead>"
        body = f"<tbody>{''.join(lines)}</tbody>"
        return f"<h2>{self._w('all_columns')}</h2>{_table(head + body, 'figures')}"

    def by_gpus(self) -> str:
        """Waits of each GPU count, policies below each other."""
        keys = ("gpus", "policy", "jobs", "mean", "median", "p95", "max")
        head = "".join(
            f'<th scope="col"{_class("name" if k == "policy" else "")}>{self._w(k)}</th>'
            for k in keys
        )
        counts = sorted({gpus for row in self.rows for gpus in row.by_gpus})
        body = "".join(self._lines(gpus) for gpus in counts)
        table = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
        return f"<h2>{self._w('by_gpus')}</h2>{_table(table)}"

    def _lines(self, gpus: int) -> str:
        lines: list[str] = []
        for row in self.rows:
            waits = row.by_gpus.get(gpus)
            if waits is None:
                continue
            hours = (waits.mean_h, waits.median_h, waits.p95_h, waits.max_h)
            cells = "".join(f"<td>{h:,.2f}</td>" for h in hours)
            first = f'<th scope="row">{"" if lines else gpus}</th>'
            name = f'<td class="name">{escape(row.case.name)}</td>'
            same = _class("same" if lines else "")
            lines.append(f"<tr{same}>{first}{name}<td>{waits.jobs:,}</td>{cells}</tr>")
        return "".join(lines)

    def meanings(self) -> str:
        """What each figure means."""
        side = self.lang == "ko"
        pairs = "".join(
            f"<dt>{escape(c.name[side])}</dt><dd>{escape(c.means[side])}</dd>" for c in COLUMNS
        )
        return f'<h2>{self._w("reading")}</h2><dl class="meaning">{pairs}</dl>'


def about(trace: Trace) -> dict[str, object]:
    """Size of a load."""
    jobs = trace.jobs
    return {
        "jobs": len(jobs),
        "labs": len({j.lab for j in jobs}),
        "users": len({j.user for j in jobs}),
        "days": (jobs[-1].submit_s - jobs[0].submit_s) / 86_400,
        "gpu_days": sum(j.num_gpus * j.run_s for j in jobs) / 86_400,
    }


def _groups(cluster: Cluster) -> tuple[tuple[str, int, int], ...]:
    """(tier, GPUs of it in a node, how many such nodes), largest groups first."""
    counted: Counter[tuple[str, int]] = Counter()
    for node in cluster.nodes:
        per_tier = Counter(str(g.tier) for g in node.gpus if not g.retired)
        counted.update(per_tier.items())
    found = [(tier, gpus, count) for (tier, gpus), count in counted.items()]
    return tuple(sorted(found, key=lambda g: (-g[1] * g[2], g)))


def _cell(column: Column, row: Row) -> str:
    text = escape(figure(column, row.values[column.key]))
    if row.sd is None:
        return text
    spread = escape(figure(column, row.sd[column.key]))
    return f'{text} <span class="spread">± {spread}</span>'


def _class(name: str) -> str:
    """A class attribute; only the names below have a look of their own."""
    known = {"violation": "warn", "same": "same", "name": "name", "figures": "figures"}
    return f' class="{known[name]}"' if name in known else ""


def _table(inner: str, name: str = "") -> str:
    return f'<div class="scroll"><table{_class(name)}>{inner}</table></div>'
