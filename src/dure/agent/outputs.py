"""Outputs of earlier attempts on shared storage: the next attempt starts from them.

Layout: `<shared>/<node>/<job>/<epoch>/`. Each node's agent owns its own folder; what another
node's attempt has left is linked into it, so that the local backend finds it where it looks.
"""

from __future__ import annotations

import logging
from pathlib import Path

from dure.ports import LaunchOrder

log = logging.getLogger("dure.agent")


class SharedRuns:
    """The shared folder as one node sees it."""

    def __init__(self, shared: Path, node: str) -> None:
        self._shared = shared
        self.own = shared / node

    def link_earlier(self, order: LaunchOrder) -> None:
        """Link the newest earlier attempt's run, if another node had it."""
        job = str(order.key.job)
        for epoch in range(min(order.copy_from_epoch, order.key.epoch - 1), 0, -1):
            here = self.own / job / str(epoch)
            if (here / "out").is_dir():
                return
            for other in sorted(self._shared.glob(f"*/{job}/{epoch}")):
                if other != here and not other.is_symlink() and (other / "out").is_dir():
                    self._link(here, other)
                    return

    @staticmethod
    def _link(here: Path, other: Path) -> None:
        try:
            here.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            here.symlink_to(other, target_is_directory=True)
        except OSError as error:
            log.warning("output of %s cannot be linked: %s", other, error.strerror)
