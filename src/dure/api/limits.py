"""How much one caller may ask: token buckets, and a number of open streams.

Rule: time comes from the engine's clock, so tests move it by hand.
"""

from __future__ import annotations

import math
import threading
from enum import StrEnum

import msgspec

from dure.core.errors import DureError, ErrorCode
from dure.settings import LimitsSettings

MOST_KEYS = 10_000
"""Buckets kept at once; a full bucket is the same as none, so it may be forgotten."""


class Rate(StrEnum):
    """Kinds of request that are counted apart."""

    READ = "read"
    SUBMIT = "submit"


class _Bucket(msgspec.Struct):
    tokens: float
    at_ms: int


class Allowance(msgspec.Struct, frozen=True):
    """What a caller has left of one kind."""

    rate: Rate
    size: int
    left: int
    full_in_s: int
    window_s: int

    def headers(self) -> dict[str, str]:
        """Say it as the IETF draft's RateLimit fields."""
        return {
            "ratelimit-policy": f'"{self.rate.value}";q={self.size};w={self.window_s}',
            "ratelimit": f'"{self.rate.value}";r={self.left};t={self.full_in_s}',
        }


class Limiter:
    """Buckets of all callers. Safe to use from several threads."""

    def __init__(self, settings: LimitsSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._buckets: dict[tuple[str, Rate], _Bucket] = {}
        self._streams: dict[str, int] = {}

    def _terms(self, rate: Rate) -> tuple[float, int]:
        """Refill a second, and size."""
        limits = self._settings
        if rate is Rate.SUBMIT:
            return limits.submit_per_min / 60, max(1, math.ceil(limits.submit_per_min))
        return limits.read_per_s, limits.read_burst

    def take(self, key: str, rate: Rate, now_ms: int) -> Allowance:
        """Count one request; raise RATE_LIMITED when there is nothing left."""
        per_s, size = self._terms(rate)
        with self._lock:
            if len(self._buckets) >= MOST_KEYS:
                self._forget(now_ms)
            bucket = self._buckets.setdefault((key, rate), _Bucket(float(size), now_ms))
            passed_s = max(0, now_ms - bucket.at_ms) / 1000
            bucket.tokens = min(float(size), bucket.tokens + passed_s * per_s)
            bucket.at_ms = max(bucket.at_ms, now_ms)
            if bucket.tokens < 1:
                wait_s = math.ceil((1 - bucket.tokens) / per_s)
                raise DureError(ErrorCode.RATE_LIMITED, retry_after_s=max(1, wait_s))
            bucket.tokens -= 1
            left = int(bucket.tokens)
        return Allowance(
            rate, size, left, math.ceil((size - left) / per_s), math.ceil(size / per_s)
        )

    def _forget(self, now_ms: int) -> None:
        """Drop buckets that are full by now; if all are in use, the longest unused half."""
        self._buckets = {
            (key, rate): b
            for (key, rate), b in self._buckets.items()
            if b.tokens + (now_ms - b.at_ms) / 1000 * self._terms(rate)[0] < self._terms(rate)[1]
        }
        if len(self._buckets) >= MOST_KEYS:
            newest = sorted(self._buckets.items(), key=lambda item: -item[1].at_ms)
            self._buckets = dict(newest[: MOST_KEYS // 2])

    def open_stream(self, key: str) -> None:
        """Count a stream; raise RATE_LIMITED when the caller has too many open."""
        with self._lock:
            if self._streams.get(key, 0) >= self._settings.streams:
                raise DureError(ErrorCode.RATE_LIMITED, retry_after_s=5)
            self._streams[key] = self._streams.get(key, 0) + 1

    def close_stream(self, key: str) -> None:
        """Give a stream back."""
        with self._lock:
            left = self._streams.get(key, 0) - 1
            if left > 0:
                self._streams[key] = left
            else:
                self._streams.pop(key, None)
