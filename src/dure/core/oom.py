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
_LAUNCHER = re.compile(r"^(torch\.distributed\.elastic\S*|ChildFailedError)", re.MULTILINE)
_RAISED = re.compile(r"^\S.*", re.MULTILINE)
_CHAINED = re.compile(
    r"^(During handling of the above exception, another exception occurred"
    r"|The above exception was the direct cause of the following exception):\s*\Z",
    re.MULTILINE,
)
_RANK = re.compile(r"^\[rank(\d+)\]: ?", re.MULTILINE)


def oom_kind(evidence: Evidence) -> OomKind | None:
    """The memory that ran out, or None. Only to be asked about failed attempts."""
    if evidence.exit_code == 0 and evidence.signal is None:
        return None
    if evidence.oom_kill > 0 or evidence.scheduler_state == "OUT_OF_MEMORY":
        return OomKind.HOST
    kind = _text_kind(evidence.exception)
    for text in by_rank(evidence.stderr_tail):
        kind = kind or _text_kind(last_exception(text))
    if kind is OomKind.HOST and evidence.vram_limited:
        # On a declared slot the VRAM is the process's memory limit: exhausting it is
        # exhausting GPU memory.
        return OomKind.GPU
    return kind


def by_rank(stderr_tail: str) -> list[str]:
    """Stderr as each rank of a launcher wrote it; one rank that ran out fails the others."""
    ranks = sorted(set(_RANK.findall(stderr_tail)), key=int)
    if not ranks:
        return [stderr_tail]
    lines = stderr_tail.splitlines()
    return ["\n".join(_RANK.sub("", x) for x in lines if _of(x, rank)) for rank in ranks]


def _of(line: str, rank: str) -> bool:
    marked = _RANK.match(line)
    return marked is None or marked[1] == rank


def last_exception(stderr_tail: str) -> str:
    """Last exception chain of stderr; a launcher's own traceback after it is skipped.

    An exception that was raised from another one, or while handling it, is one chain with
    it: what ran out first is the cause of what failed last.
    """
    starts = [m.start() for m in _TRACEBACK.finditer(stderr_tail)]
    if not starts:
        return stderr_tail[-2000:]
    chains: list[str] = []
    for start, end in zip(starts, [*starts[1:], None], strict=True):
        piece = stderr_tail[start:end]
        if chains and _CHAINED.search(chains[-1]):
            chains[-1] += piece
        else:
            chains.append(piece)
    own = [c for c in chains if not _LAUNCHER.match(_raised(c))]
    return own[-1] if own else ""


def _raised(chain: str) -> str:
    """The line that names the last exception of a chain: after its frames, not indented."""
    last = chain[[m.end() for m in _TRACEBACK.finditer(chain)][-1] :]
    named = _RAISED.search(last)
    return named[0] if named else ""


def _text_kind(text: str) -> OomKind | None:
    if _GPU.search(text):
        return OomKind.GPU
    return OomKind.HOST if _HOST.search(text) else None
