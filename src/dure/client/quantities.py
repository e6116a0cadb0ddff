"""What people write (`24GB`, `4h`, `22:00`, `USR1@5m`) as the numbers of the API.

Rule: a length of time without a unit is refused, because Slurm users mean minutes and
everybody else seconds.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta

_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_PARTS = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
_CLOCK = re.compile(r"(?:(\d+)-)?(\d{1,3}):([0-5]\d):([0-5]\d)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([gmt]?)(?:i?b)?", re.IGNORECASE)
_HOUR = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)")
_SIGNAL = re.compile(r"(?:SIG)?(USR1|USR2|INT|HUP|TERM)@(.+)")


def seconds(text: str | float | timedelta) -> int:
    """Seconds of `4h`, `1h30m`, `2d`, `04:00:00`, `1-00:00:00`; a number is seconds already."""
    if isinstance(text, timedelta):
        return round(text.total_seconds())
    if isinstance(text, int | float):
        return round(text)
    asked = text.strip().lower()
    if clock := _CLOCK.fullmatch(asked):
        days, hours, minutes, rest = (int(part or 0) for part in clock.groups())
        return days * 86_400 + hours * 3600 + minutes * 60 + rest
    found = _PARTS.findall(asked)
    if not found or _PARTS.sub("", asked).strip():
        raise ValueError(f"{text!r} is no length of time; write 90m, 4h, 1h30m, 2d or 04:00:00")
    return round(sum(float(number) * _UNIT_S[unit] for number, unit in found))


def gigabytes(text: str | float) -> float:
    """GB of `24GB`, `24G`, `24GiB` or `24` (GPU makers' GB, as in the tier table)."""
    if isinstance(text, int | float):
        return float(text)
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no amount of memory; write 24GB or 24")
    factor = {"m": 1 / 1024, "t": 1024.0}.get(found[2].lower(), 1.0)
    return float(found[1]) * factor


def moment_ms(text: str | float | datetime, now: datetime | None = None) -> int:
    """Milliseconds since the epoch of `22:00` (the next one), an ISO time, `+2h`, or a datetime.

    Times without a zone are local; a number is milliseconds already.
    """
    if isinstance(text, int | float):
        return round(text)
    here = now or datetime.now().astimezone()
    if isinstance(text, datetime):
        return round(text.timestamp() * 1000)
    asked = text.strip()
    if asked.startswith("+"):
        return round((here.timestamp() + seconds(asked[1:])) * 1000)
    if hour := _HOUR.fullmatch(asked):
        then = here.replace(hour=int(hour[1]), minute=int(hour[2]), second=0, microsecond=0)
        if then <= here:
            then += timedelta(days=1)
        return round(then.timestamp() * 1000)
    try:
        return round(datetime.fromisoformat(asked).timestamp() * 1000)
    except ValueError:
        raise ValueError(
            f"{text!r} is no point in time; write 22:00, 2026-12-01T08:00 or +2h"
        ) from None


def signal_before(text: str) -> tuple[str, int]:
    """Signal name and seconds before the time limit, of `USR1@5m`."""
    found = _SIGNAL.fullmatch(text.strip().upper())
    if found is None:
        raise ValueError(f"{text!r} is no signal and time; write USR1@5m")
    return found[1], seconds(found[2].lower())
