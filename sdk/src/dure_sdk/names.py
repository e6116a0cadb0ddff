"""Names that say what is measured: renaming rules, the rank, the node, MLflow's character set.

Rule: prefixes, not a list of keys, so that a key which MLflow adds tomorrow is covered.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any, Callable, Optional

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "system/"
"""MLflow's own prefix; its pages group by it."""
RULES = (("system_memory_", "node_memory_"), ("cpu_", "node_cpu_"), ("disk_", "rootfs_"))
"""psutil measures the node, whatever the name says."""
NODE_SCOPES = ("node_", "rootfs_")
"""Series whose name carries the node."""
NODE_MAX = 150
"""Keys may have 250 characters; the longest series and rank need fewer than 100."""

Rename = Callable[[str], Optional[str]]


def scoped(key: str) -> str:
    """MLflow's key with its true scope."""
    for old, new in RULES:
        if key.startswith(old):
            return new + key[len(old) :]
    return key


def safe_node(name: str | None) -> str | None:
    """A node name that MLflow takes: one bad name makes it refuse a whole batch."""
    text = re.sub(r"[^A-Za-z0-9_.-]+", "-", (name or "").strip())
    text = re.sub(r"\.{2,}", ".", text).strip(".-")
    if len(text) > NODE_MAX:
        # Long names differ at their end as often as at their start.
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        text = f"{text[: NODE_MAX - 9].rstrip('.-')}-{digest}"
    return text or None


def renamer(rank: int, node: str | None, *, node_series: bool = True) -> Rename:
    """A function from MLflow's key to the final one below `system/`; None = left out."""

    def rename(key: str) -> str | None:
        series = scoped(key)
        if not series.startswith(NODE_SCOPES):
            return f"{series}/rank{rank}"
        if not node_series:
            return None  # the node's agent writes them once for all ranks
        return f"{series}/{node}/rank{rank}" if node else f"{series}/rank{rank}"

    return rename


class Renamed:
    """A collector of MLflow's kind whose keys come out renamed; all else is the inner one's."""

    def __init__(self, inner: Any, rename: Rename) -> None:
        self.inner = inner
        self._rename = rename

    @property
    def name(self) -> str:
        """The inner collector's, for messages."""
        return str(getattr(self.inner, "name", None) or type(self.inner).__name__)

    @property
    def _metrics(self) -> dict[str, Any]:
        return self._renamed(self.inner._metrics)

    def collect_metrics(self) -> None:
        self.inner.collect_metrics()

    def aggregate_metrics(self) -> dict[str, Any]:
        return self._renamed(self.inner.aggregate_metrics())

    def clear_metrics(self) -> None:
        self.inner.clear_metrics()

    def _renamed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        pairs = ((self._rename(key), value) for key, value in values.items())
        return {name: value for name, value in pairs if name is not None}
