"""Values of the core as wire structs, in one language. Pure: no store, no lock.

Rule: charges are rendered from integers, never through a float.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

import msgspec

from dure import wire
from dure.core.errors import DureError, ErrorCode
from dure.core.events import Event
from dure.core.explain import PlacementNote
from dure.core.fairshare import decayed_micro
from dure.core.forecast import Forecast
from dure.core.messages import ETA, EVENTS, REASONS, duration, job_error_text, say, state_text
from dure.core.model import (
    ACTIVE,
    CHARGED,
    MICRO_PER_TFLOP_S,
    TERMINAL,
    Attempt,
    Job,
    JobState,
    Lab,
    LedgerEntry,
    LedgerKind,
    Limits,
    Reservation,
    Tier,
)
from dure.core.plan import Reason
from dure.core.policy import Policy
from dure.ports import Token


def tflop_s(micro: int) -> str:
    """1e-6 TFLOP-s as an exact decimal number of TFLOP-s."""
    return _decimal(micro, MICRO_PER_TFLOP_S)


def seconds(ms: int) -> str:
    """Milliseconds as an exact decimal number of seconds."""
    return _decimal(ms, 1000)


def _decimal(value: int, scale: int) -> str:
    whole, part = divmod(abs(value), scale)
    digits = len(str(scale)) - 1
    text = f"{whole}.{part:0{digits}d}".rstrip("0").rstrip(".")
    return f"-{text}" if value < 0 else text


def usage(lab: Lab, now_ms: int, half_life_ms: float) -> str:
    """Decayed use of a lab in TFLOP-s."""
    return tflop_s(round(decayed_micro(lab, now_ms, half_life_ms)))


# -- cursors -------------------------------------------------------------------------


def cursor(kind: str, *place: int) -> str:
    """Build an opaque cursor: where the next page of a `kind` of list begins."""
    raw = msgspec.json.encode([kind, *place])
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def place_of(given: str, kind: str, length: int) -> list[int] | None:
    """Read a cursor; None if it is of another kind, INVALID_REQUEST if it is broken."""
    try:
        raw = base64.b64decode(given + "=" * (-len(given) % 4), altchars=b"-_", validate=True)
        name, *place = msgspec.json.decode(raw, type=tuple[str | int, ...])
    except (ValueError, msgspec.DecodeError) as error:
        raise _broken() from error
    if name != kind:
        return None
    numbers = [n for n in place if isinstance(n, int) and abs(n) < 1 << 63]
    if len(numbers) != length or len(place) != length:
        raise _broken()
    return numbers


def need_place(given: str, kind: str, length: int) -> list[int]:
    """Read a cursor that can only be of one kind."""
    place = place_of(given, kind, length)
    if place is None:
        raise _broken()
    return place


def _broken() -> DureError:
    return DureError(
        ErrorCode.INVALID_REQUEST, field="?cursor", problem="not a cursor of this list"
    )


# -- reasons -------------------------------------------------------------------------


def reason_out(reason: Reason, lang: str) -> wire.ReasonOut:
    """Render a reason; its sentence speaks of times, its parameters stay numbers."""
    spoken: dict[str, object] = dict(reason.params)
    until_ms = reason.params.get("until_ms")
    if isinstance(until_ms, int):
        spoken["until"] = moment(until_ms)
    waited_s = reason.params.get("waited_s")
    if isinstance(waited_s, int | float):
        spoken["waited"] = duration(waited_s, lang)
    text = say(REASONS[reason.code], lang, spoken)
    return wire.ReasonOut(code=reason.code.value, text=text, params=dict(reason.params))


def moment(at_ms: int) -> str:
    """A time of day for a sentence; the server knows no reader's time zone, so UTC."""
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, ValueError):
        return str(at_ms)


def eta_out(made: Forecast | None, lang: str, now_ms: int) -> wire.EtaOut | None:
    """Render a forecast; a band whose late end is unknown says only the early one."""
    if made is None:
        return None
    spoken: dict[str, object] = {
        name: duration(max(0, at_ms - now_ms) / 1000, lang)
        for name in ("p20", "p50", "p80")
        if (at_ms := getattr(made, f"{name}_ms")) is not None
    }
    text = say(ETA["band" if "p80" in spoken else "open"], lang, spoken)
    if made.after is not None:
        text = say(ETA["after"], lang, {"when": text, "after": made.after})
    return wire.EtaOut(
        p20_ms=made.p20_ms,
        p50_ms=made.p50_ms,
        p80_ms=made.p80_ms,
        made_ms=made.made_ms,
        text=text,
        after=made.after,
    )


def note_out(note: PlacementNote) -> wire.PlacementNoteOut:
    """Render a placement as it concerns one job."""
    return msgspec.convert(note, wire.PlacementNoteOut, from_attributes=True)


# -- jobs ----------------------------------------------------------------------------


def state_words(job: Job, lang: str, now_ms: int) -> str:
    """Render the console's word for a job's state."""
    waits = job.state is JobState.GLOBAL_QUEUE_WAIT and job.eligible_ms > now_ms
    return state_text(job.state, lang, retrying=waits, error=job.error)


def job_out(
    job: Job,
    attempt: Attempt | None,
    lang: str,
    now_ms: int,
    policy: Policy,
    *,
    charge: wire.ChargeOut | None = None,
    output_dir: str | None = None,
    rank: int | None = None,
) -> wire.JobOut:
    """Render one job. Its environment is never shown to anybody."""
    request = job.request
    placed = attempt is not None and job.state in ACTIVE | TERMINAL
    return wire.JobOut(
        id=job.id,
        name=request.name,
        lab=job.lab,
        user=job.user,
        state=job.state,
        state_text=state_words(job, lang, now_ms),
        command=list(request.command),
        num_gpus=request.num_gpus,
        tiers=list(request.tiers),
        min_vram_gb=request.min_vram_gb,
        node=request.node,
        time_limit_s=request.time_limit_s,
        oom_escalate=request.oom_escalate,
        labels=request.labels,
        submitted_ms=job.submitted_ms,
        queue_entered_ms=job.entered_ms or None,
        eligible_ms=job.eligible_ms or None,
        not_before_ms=request.not_before_ms or None,
        started_ms=job.started_ms or None,
        ended_ms=job.ended_ms or None,
        exit_code=job.exit_code,
        held=job.held,
        epoch=job.epoch,
        starts=job.starts,
        retries=job.retries,
        version=job.version,
        placement=placement_out(attempt) if placed and attempt is not None else None,
        reservation=reservation_out(job.reservation),
        cancel=_cancel_out(job, policy),
        error=_error_out(job, lang),
        charge=charge,
        output_dir=output_dir,
        rank=rank,
    )


def placement_out(attempt: Attempt) -> wire.PlacementOut:
    """Render where an attempt runs."""
    where = attempt.placement
    return wire.PlacementOut(
        node=where.node, tier=where.tier, gpus=list(attempt.gpus), simulated=attempt.simulated
    )


def reservation_out(held: Reservation | None) -> wire.ReservationOut | None:
    """Render GPUs held for a waiting job."""
    if held is None:
        return None
    where = held.placement
    return wire.ReservationOut(
        node=where.node, tier=where.tier, count=held.count, since_ms=held.since_ms
    )


def _cancel_out(job: Job, policy: Policy) -> wire.CancelOut | None:
    if job.state is not JobState.CANCELLING or not job.cancel_ms:
        return None
    return wire.CancelOut(
        asked_ms=job.cancel_ms,
        checkpoint_until_ms=job.cancel_ms + round(policy.checkpoint_s * 1000),
        kill_at_ms=job.cancel_ms + round(policy.cancel_kill_s * 1000),
    )


def _error_out(job: Job, lang: str) -> wire.ErrorOut | None:
    if not job.error:
        return None
    text = job_error_text(job.error, job.error_params, lang)
    return wire.ErrorOut(code=job.error, text=text, params=dict(job.error_params))


def charge_out(lines: Iterable[LedgerEntry]) -> wire.ChargeOut:
    """Add up a job's ledger lines, in integers."""
    run = reserved = written_off_ms = 0
    for line in lines:
        if line.kind is LedgerKind.RESERVED:
            reserved += line.cost_micro
        elif line.kind in CHARGED:
            run += line.cost_micro
        else:
            written_off_ms += line.gpu_ms
    return wire.ChargeOut(
        total_tflop_s=tflop_s(run + reserved),
        run_tflop_s=tflop_s(run),
        reserved_tflop_s=tflop_s(reserved),
        written_off_gpu_s=seconds(written_off_ms),
    )


def attempt_out(attempt: Attempt) -> wire.AttemptOut:
    """Render one dispatch."""
    evidence = attempt.evidence
    return wire.AttemptOut(
        epoch=attempt.epoch,
        start_no=attempt.start_no,
        placement=placement_out(attempt),
        dispatched_ms=attempt.dispatched_ms,
        started_ms=attempt.started_ms,
        ended_ms=attempt.ended_ms,
        freed_ms=attempt.freed_ms,
        outcome=attempt.outcome.value if attempt.outcome else None,
        exit_code=evidence.exit_code if evidence else None,
        signal=evidence.signal if evidence else None,
        detail=attempt.detail,
        stderr_tail=evidence.stderr_tail if evidence else "",
        term_ms=evidence.term_ms if evidence else 0,
        kill_ms=evidence.kill_ms if evidence else 0,
        full=evidence.full if evidence else (),
    )


def event_out(event: Event, lang: str) -> wire.EventOut:
    """Render one event with its sentence."""
    name = event.name.value
    return wire.EventOut(
        id=event.id,
        name=name,
        at_ms=event.at_ms,
        text=say(EVENTS.get(name, (name, name)), lang, event.params),
        job=event.job,
        epoch=event.epoch,
        lab=event.lab_id,
        node=event.node_id,
        actor=event.actor,
        params=dict(event.params),
    )


# -- account, people, tiers ----------------------------------------------------------


def ledger_line(line: LedgerEntry) -> wire.LedgerLine:
    """Render one line of the account."""
    return wire.LedgerLine(
        job=line.job,
        epoch=line.epoch,
        kind=line.kind.value,
        segment=line.segment,
        user=line.user,
        node=line.placement.node,
        tier=line.placement.tier,
        gpus=line.gpus,
        from_ms=line.from_ms,
        to_ms=line.to_ms,
        cost_tflop_s=tflop_s(line.cost_micro),
        booked_ms=line.booked_ms,
    )


def charged(lines: Sequence[LedgerEntry], kinds: Iterable[LedgerKind]) -> str:
    """Add up what lines of some kinds cost."""
    wanted = frozenset(kinds)
    return tflop_s(sum(line.cost_micro for line in lines if line.kind in wanted))


def limits_out(limits: Limits) -> wire.LimitsIn:
    """Render narrowing limits."""
    return msgspec.convert(limits, wire.LimitsIn, from_attributes=True)


def tier_out(tier: Tier) -> wire.TierOut:
    """Render a tier."""
    return wire.TierOut(
        name=tier.name,
        vram_gb=tier.vram_gb,
        tflops=tier.mtflops / 1000,
        sort_order=tier.sort_order,
        max_gpus=tier.max_gpus,
        active=tier.active,
    )


def token_out(token: Token, secret: str | None = None) -> wire.TokenOut:
    """Render a token; what is stored of its secret stays there."""
    return wire.TokenOut(
        id=token.digest[:16],
        user=token.user,
        label=token.label,
        created_ms=token.created_ms,
        expires_ms=token.expires_ms,
        last_used_ms=token.last_used_ms,
        secret=secret,
    )


def best_first(tiers: Iterable[Tier]) -> list[Tier]:
    """Order tiers best first, as the pool page and policy 4 do."""
    return sorted(tiers, key=lambda t: (-t.sort_order, t.name))
