"""A job request from what people write."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from dure.client.quantities import gigabytes, moment_ms, seconds, signal_before
from dure.core.model import RetryOn
from dure.wire import JobIn, PreStopSignalIn, RetryIn


def request_of(
    command: Sequence[str],
    *,
    gpus: int = 1,
    min_vram: str | float = 0,
    tiers: Sequence[str] = (),
    node: str | None = None,
    time: str | float | timedelta | None = None,
    name: str = "",
    lab: str | None = None,
    env: Mapping[str, str] | None = None,
    retry: int | None = None,
    retry_on: str = "loss",
    oom_escalate: bool = True,
    idempotent: bool = False,
    signal: str | None = None,
    not_before: str | float | datetime | None = None,
    workdir: str | None = None,
    labels: Mapping[str, str] | None = None,
    hold: bool = False,
) -> JobIn:
    """Build a request; ValueError names what is wrong before anything is sent.

    `time` is text (`"4h"`) or seconds, `min_vram` text (`"24GB"`) or GB, `workdir` the
    current directory unless given, `signal` such as `"USR1@5m"`.
    """
    before = signal_before(signal) if signal else None
    asked = JobIn(
        command=list(command),
        name=name,
        lab=lab,
        env=dict(env or {}),
        num_gpus=gpus,
        tiers=list(tiers),
        min_vram_gb=gigabytes(min_vram),
        node=node,
        time_limit_s=None if time is None else seconds(time),
        not_before_ms=0 if not_before is None else moment_ms(not_before),
        retry=RetryIn(max=retry, on=RetryOn(retry_on)),
        oom_escalate=oom_escalate,
        idempotent=idempotent,
        pre_stop_signal=PreStopSignalIn(signal=before[0], before_s=before[1]) if before else None,
        workdir=os.getcwd() if workdir is None else workdir,  # noqa: PTH109 - start-up time
        labels=dict(labels or {}),
        hold=hold,
    )
    try:
        return msgspec.convert(msgspec.to_builtins(asked), JobIn)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
