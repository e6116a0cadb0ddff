"""Calls about the installation: queue, pool, labs, people, machines, maintenance."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dure import wire
from dure.client.calls import Calls, path_name
from dure.core.model import Phase

PAGE = 200
LEDGER_PAGE = 1000


class SiteCalls(Calls):
    """What an installation tells everybody, and what its administrators change."""

    def me(self) -> wire.MeOut:
        """Who the token belongs to."""
        return self._get(wire.MeOut, "/v1/me")

    def health(self) -> wire.HealthOut:
        """Whether the server is well; needs no login."""
        return self._get(wire.HealthOut, "/healthz")

    def queue(self, limit: int | None = 50) -> wire.QueueOut:
        """Return the line in the scheduler's order, the first `limit` jobs (all with None)."""
        size = PAGE if limit is None else min(PAGE, limit)
        first = self._get(wire.QueueOut, "/v1/queue", limit=size)
        items, cursor = list(first.items), first.next
        while cursor is not None and (limit is None or len(items) < limit):
            page = self._get(wire.QueueOut, "/v1/queue", limit=size, cursor=cursor)
            items += page.items
            cursor = page.next if page.items else None
        items = items if limit is None else items[:limit]
        return msgspec.structs.replace(first, items=items, next=cursor)

    def personal_queue(self) -> wire.PersonalQueueOut:
        """Your jobs that have no slot yet, in your order."""
        return self._get(wire.PersonalQueueOut, "/v1/me/queue")

    def reorder(self, job_ids: Sequence[int]) -> wire.PersonalQueueOut:
        """Put your personal queue in this order."""
        order = wire.OrderIn(jobs=list(job_ids))
        return self._write(wire.PersonalQueueOut, "PUT", "/v1/me/queue", order)

    def pool(self) -> wire.PoolOut:
        """Tiers and nodes with what their GPUs do now."""
        return self._get(wire.PoolOut, "/v1/pool")

    def labs(self) -> list[wire.LabOut]:
        """All labs, least used first."""
        return self._get(wire.LabList, "/v1/labs").items

    def usage(
        self, lab: str, *, since_ms: int | None = None, limit: int | None = 200
    ) -> wire.UsageOut:
        """One lab's account, with the newest `limit` lines that made it (all with None)."""
        path = f"/v1/labs/{path_name(lab)}/usage"
        size = LEDGER_PAGE if limit is None else min(LEDGER_PAGE, limit)
        first = self._get(wire.UsageOut, path, since_ms=since_ms, limit=size)
        lines, cursor = list(first.lines), first.next
        while cursor is not None and (limit is None or len(lines) < limit):
            page = self._get(wire.UsageOut, path, since_ms=since_ms, limit=size, cursor=cursor)
            lines += page.lines
            cursor = page.next if page.lines else None
        return msgspec.structs.replace(first, lines=lines[:limit], next=cursor)

    def phase(self) -> Phase:
        """Maintenance phase; needs no login."""
        return self._get(wire.MaintenanceOut, "/v1/maintenance/status").phase

    # -- administration --

    def calibration(self) -> wire.CalibrationOut:
        """How often starts fell inside their forecast band; administrators only."""
        return self._get(wire.CalibrationOut, "/v1/forecasts/calibration")

    def set_phase(self, phase: Phase) -> Phase:
        """Start (DRAINING) or end (NORMAL) a maintenance."""
        body = wire.MaintenanceIn(phase=phase)
        return self._write(wire.MaintenanceOut, "PUT", "/v1/maintenance", body).phase

    def tiers(self) -> list[wire.TierOut]:
        """All GPU models, best first."""
        return self._get(wire.TierList, "/v1/tiers").items

    def tier(self, name: str) -> wire.TierOut:
        """One GPU model."""
        return self._get(wire.TierOut, f"/v1/tiers/{path_name(name)}")

    def put_tier(self, name: str, tier: wire.TierIn) -> wire.TierOut:
        """Make or change a GPU model."""
        return self._put(wire.TierOut, "PUT", f"/v1/tiers/{path_name(name)}", tier)

    def remove_tier(self, name: str) -> None:
        """Remove a GPU model that no node has."""
        path = f"/v1/tiers/{path_name(name)}"
        self.send("DELETE", path, etag=self._etag(path))

    def nodes(self) -> list[wire.NodeOut]:
        """All machines."""
        return self._get(wire.NodeList, "/v1/nodes").items

    def patch_node(self, name: str, patch: wire.NodePatch) -> wire.NodeOut:
        """Drain a machine or put it back to service."""
        return self._put(wire.NodeOut, "PATCH", f"/v1/nodes/{path_name(name)}", patch)

    def lab(self, name: str) -> wire.LabOut:
        """One lab."""
        return self._get(wire.LabOut, f"/v1/labs/{path_name(name)}")

    def put_lab(self, name: str, lab: wire.LabIn) -> wire.LabOut:
        """Make or change a lab."""
        return self._put(wire.LabOut, "PUT", f"/v1/labs/{path_name(name)}", lab)

    def users(self) -> list[wire.UserOut]:
        """All people."""
        return self._get(wire.UserList, "/v1/users").items

    def user(self, name: str) -> wire.UserOut:
        """One person."""
        return self._get(wire.UserOut, f"/v1/users/{path_name(name)}")

    def put_user(self, name: str, user: wire.UserIn) -> wire.UserOut:
        """Make or change a person."""
        return self._put(wire.UserOut, "PUT", f"/v1/users/{path_name(name)}", user)

    def tokens(self) -> list[wire.TokenOut]:
        """Your tokens, without their secrets."""
        return self._get(wire.TokenList, "/v1/tokens").items

    def new_token(self, token: wire.TokenIn) -> wire.TokenOut:
        """Make a token; its `secret` is told this once."""
        return self._write(wire.TokenOut, "POST", "/v1/tokens", token)

    def remove_token(self, token_id: str) -> None:
        """Make a token invalid."""
        self.send("DELETE", f"/v1/tokens/{path_name(token_id)}")
