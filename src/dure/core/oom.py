"""Whose memory ran out, judged on evidence of a failed attempt.

Order of evidence: kernel counter, scheduler state, recorded exception, last exception of
stderr. Words in the log of a job that succeeded are never looked at.
"""

from __future__ import annotations

import re

from dure.core.model import Evidence, OomKind

_GPU = re.compile(
    r"torch(\.cuda)?\.OutOfMemoryError"
    r"|(CUDA|HIP|XPU) out of memory\. (Tried to allocate|Allocation was preemptively rejected)"
    r"|CUDA ran out of memory outside PyTorch's allocator"
    r"|CUDA (runtime )?error( \(2\))?:? out of memory"
    r"|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|cudaMalloc.* failed: out of memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUSOLVER_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED"
    r"|CUDNN_STATUS_ALLOC_FAILED|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
    r"|Cuda failure (2 )?'out of memory'"
    r"|RESOURCE_EXHAUSTED: (Out of memory (while trying to allocate|allocating)"
    r"|Failed to allocate request for|Allocating \d+ bytes exceeds)"
    r"|OOM when allocating (temporary )?tensor (with|of) shape.*GPU"
    r"|OutOfMemoryError: Out of memory allocating [\d,]+ bytes|out_of_memory: CUDA error"
)
_HOST = re.compile(
    r"DefaultCPUAllocator: can't allocate memory|C10 Out of Memory\. Trying to allocate"
    r"|RESOURCE_EXHAUSTED: Out of host memory|Detected \d+ oom[_-]kill event"
    r"|DataLoader worker \(pid.*\) is killed by signal: Killed|std::bad_alloc"
    r"|(^|\n|\.)(_Array)?MemoryError\b"
)
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):", re.MULTILINE)
_LAUNCHER = re.compile(r"ChildFailedError|torch\.distributed\.elastic")


def oom_kind(evidence: Evidence) -> OomKind | None:
    """The memory that ran out, or None. Only to be asked about failed attempts."""
    if evidence.exit_code == 0 and evidence.signal is None:
        return None
    if evidence.oom_kill > 0 or evidence.scheduler_state == "OUT_OF_MEMORY":
        return OomKind.HOST
    kind = _text_kind(evidence.exception) or _text_kind(last_exception(evidence.stderr_tail))
    if kind is OomKind.HOST and evidence.vram_limited:
        # On a declared slot the VRAM is the process's memory limit: exhausting it is
        # exhausting GPU memory.
        return OomKind.GPU
    return kind


def last_exception(stderr_tail: str) -> str:
    """Last exception chain of stderr; a launcher's own traceback after it is skipped."""
    starts = [m.start() for m in _TRACEBACK.finditer(stderr_tail)]
    if not starts:
        return stderr_tail[-2000:]
    pieces = [stderr_tail[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
    own = [p for p in pieces if not _LAUNCHER.search(p)]
    return own[-1] if own else ""


def _text_kind(text: str) -> OomKind | None:
    if _GPU.search(text):
        return OomKind.GPU
    return OomKind.HOST if _HOST.search(text) else None
