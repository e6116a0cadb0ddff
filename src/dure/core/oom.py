"""Whose memory ran out, judged on evidence of a failed attempt.

Order of evidence: kernel counter, scheduler state, recorded exceptions, last exception of
stderr. Words in the log of a job that succeeded are never looked at.
"""

from __future__ import annotations

import re

from dure.core.model import Evidence, OomKind

GPU_WORDS: dict[str, str] = {
    "torch": r"\btorch(\.cuda)?\.OutOfMemoryError\b",
    "torch message": r"\b(CUDA|HIP|XPU) out of memory\. "
    r"(Tried to allocate|Allocation was preemptively rejected)",
    "torch on Apple": r"\bMPS backend out of memory\b",
    "torch, libraries": r"\bCUDA ran out of memory outside PyTorch's allocator",
    "runtime": r"\bCUDA (runtime )?error( \(2\))?:? out of memory\b",
    "driver": r"\bCUDA_ERROR_OUT_OF_MEMORY\b|\bcudaErrorMemoryAllocation\b",
    "malloc": r"\bcudaMalloc\S*( of [\d.]+ \w+)? failed: out of memory\b",
    "cublas": r"\bCU(BLAS|SOLVER)_STATUS_ALLOC_FAILED\b|\bCUFFT_ALLOC_FAILED\b",
    "cudnn 8": r"\bCUDNN_STATUS_ALLOC_FAILED\b",
    "cudnn 9": r"\bCUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED\b",
    "nccl": r"\bCuda failure (2 )?'out of memory'",
    "xla": r"\bRESOURCE_EXHAUSTED: (Out of memory (while trying to allocate|allocating)"
    r"|Failed to allocate request for|Allocating \d+ bytes exceeds)",
    "tensorflow": r"\bOOM when allocating (temporary )?tensor (with|of) shape.*\bGPU\b",
    "cupy": r"\bOutOfMemoryError: Out of memory allocating [\d,]+ bytes",
    "rmm": r"\bout_of_memory: CUDA error\b",
}
"""What says that a GPU's memory ran out, by who says it."""
HOST_WORDS: dict[str, str] = {
    "torch on the CPU": r"\bDefaultCPUAllocator: can't allocate memory\b",
    "torch, C10": r"\bC10 Out of Memory\. Trying to allocate\b",
    "xla": r"\bRESOURCE_EXHAUSTED: Out of host memory\b",
    "tensorflow": r"\bOOM when allocating (temporary )?tensor (with|of) shape.*\bCPU\b",
    "python": r"(^|\n|\.)(_Array)?MemoryError\b",
    "loader": r"\bDataLoader worker \(pid.*\) is killed by signal: (Killed|Bus error)",
    "shared memory": r"\binsufficient shared memory \(shm\)",
    "slurm": r"\bDetected \d+ oom[_-]kill event",
    "c++": r"\bstd::bad_alloc\b(?!: out_of_memory: CUDA)",
    "fork": r"\bOSError: \[Errno 12\] Cannot allocate memory\b",
}
"""What says that the machine's memory ran out: a larger GPU would not help."""
CHATTER = r"The caller indicates that this is not a failure|will (be )?retry"
"""Lines of allocators that have not given up."""

_GPU = re.compile("|".join(f"(?:{words})" for words in GPU_WORDS.values()))
_HOST = re.compile("|".join(f"(?:{words})" for words in HOST_WORDS.values()))
_CHATTER = re.compile(CHATTER)
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):", re.MULTILINE)
_LAUNCHER = re.compile(
    r"^(torch\.distributed\.elastic\S*|\S*ChildFailedError|(subprocess\.)?CalledProcessError"
    r"|ray\.exceptions\.\S+|\S*deepspeed\.launcher\S*)",
    re.MULTILINE,
)
_RAISED = re.compile(r"^\S.*", re.MULTILINE)
_CHAINED = re.compile(
    r"^(During handling of the above exception, another exception occurred"
    r"|The above exception was the direct cause of the following exception):\s*\Z",
    re.MULTILINE,
)
_RANK = re.compile(r"^\[rank(\d+)\]: ?", re.MULTILINE)
_HEAD = re.compile(r"\[(main|other|rank \d+)\]\n")


def oom_kind(evidence: Evidence) -> OomKind | None:
    """The memory that ran out, or None. Only to be asked about failed attempts."""
    if evidence.exit_code == 0 and evidence.signal is None:
        return None
    if evidence.oom_kill > 0 or evidence.scheduler_state == "OUT_OF_MEMORY":
        return OomKind.HOST
    kind = _first([*recorded(evidence.exception), *by_rank(evidence.stderr_tail, evidence)])
    if kind is OomKind.HOST and evidence.vram_limited:
        # On a declared slot the VRAM is the process's memory limit: exhausting it is
        # exhausting GPU memory.
        return OomKind.GPU
    return kind


def _first(texts: list[str]) -> OomKind | None:
    for text in texts:
        kind = _text_kind(text)
        if kind is not None:
            return kind
    return None


# -- recorded exceptions -------------------------------------------------------------


def recorded(exceptions: str) -> list[str]:
    """Recorded exceptions that may have ended the job, from blocks headed `[main]` and so on.

    Of a launcher's ranks each counts: one that ran out fails the others. Of the rest only
    the last: a trial that ran out and was caught by its parent did not end the job.
    """
    blocks = _blocks(exceptions)
    ranks = [text for head, text in blocks if head.startswith("rank")]
    return [*ranks, *[text for head, text in blocks if not head.startswith("rank")][-1:]]


def _blocks(exceptions: str) -> list[tuple[str, str]]:
    """(who, text) of each block but those of launchers; text without heads is one block."""
    found = []
    for block in exceptions.split("\n\n"):
        head = _HEAD.match(block)
        text = block[head.end() :] if head else block
        if text.strip() and not _LAUNCHER.match(text.strip().splitlines()[-1]):
            found.append((head[1] if head else "main", text))
    return found


# -- stderr --------------------------------------------------------------------------


def by_rank(stderr_tail: str, evidence: Evidence) -> list[str]:
    """Last exception of each rank of a launcher, or of the whole; none if records say all.

    Where an exception of the job itself was recorded, its words in the log add nothing.
    """
    if _blocks(evidence.exception):
        return []
    ranks = sorted(set(_RANK.findall(stderr_tail)), key=int)
    if not ranks:
        return [last_exception(stderr_tail)]
    lines = stderr_tail.splitlines()
    return [
        last_exception("\n".join(_RANK.sub("", x) for x in lines if _of(x, rank))) for rank in ranks
    ]


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
    """What a text says ran out; a GPU where both are named, for its loaders die with it."""
    said = "\n".join(line for line in text.splitlines() if not _CHATTER.search(line))
    if _GPU.search(said):
        return OomKind.GPU
    return OomKind.HOST if _HOST.search(said) else None
