"""Whose memory ran out: judged on the evidence of a failed attempt, never on mere words."""

from __future__ import annotations

import pytest

from dure.core.model import Evidence, OomKind, Outcome
from dure.core.oom import oom_kind
from dure.core.retry import judge

GPU, HOST = OomKind.GPU, OomKind.HOST
TB = 'Traceback (most recent call last):\n  File "fit.py", line 12, in <module>\n    main()\n'
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has 3 MiB\n"
CHILD = (
    "Traceback (most recent call last):\n"
    '  File "/opt/torch/distributed/run.py", line 880, in main\n'
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
    "====\nfit.py FAILED\nRoot Cause: exitcode : 1 (pid: 41)\n"
)


def ranked(rank: int, text: str) -> str:
    return "".join(f"[rank{rank}]: {line}\n" for line in text.splitlines())


CASES: dict[str, tuple[str, OomKind | None]] = {
    "torch": (TB + OOM, GPU),
    "torch before 2.5": (
        TB + "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        GPU,
    ),
    "torch 1": (TB + "RuntimeError: CUDA out of memory. Tried to allocate 98 MiB (GPU 1)", GPU),
    "torch fraction": (
        TB + "RuntimeError: CUDA out of memory. Allocation was preemptively rejected because …",
        GPU,
    ),
    "hip": (TB + "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1 GiB", GPU),
    "driver": (TB + "torch.AcceleratorError: CUDA error: out of memory\nKernel errors …", GPU),
    "cudnn jit": (TB + "RuntimeError: CUDA ran out of memory outside PyTorch's allocator", GPU),
    "cublas": (TB + "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x", GPU),
    "cudnn 8": (TB + "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", GPU),
    "cudnn 9": (
        TB + "RuntimeError: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        GPU,
    ),
    "jax": (
        TB + "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to "
        "allocate 1073741824 bytes.",
        GPU,
    ),
    "tensorflow": (
        TB + "ResourceExhaustedError: OOM when allocating tensor with shape[8,8] and type float "
        "on /job:x/device:GPU:0 by allocator GPU_0_bfc",
        GPU,
    ),
    "cupy": (
        TB + "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 4,096 bytes",
        GPU,
    ),
    "nccl, no traceback": ("h:9:9 [0] NCCL WARN Cuda failure 2 'out of memory'\n", GPU),
    "llama.cpp": ("ggml: cudaMalloc of 900.00 MiB failed: out of memory\n", GPU),
    "raised from it": (
        TB
        + OOM
        + "\nThe above exception was the direct cause of the following exception:\n\n"
        + TB
        + "TrainingFailed: epoch 3\n",
        GPU,
    ),
    "while handling it": (
        TB
        + OOM
        + "\nDuring handling of the above exception, another exception occurred:\n\n"
        + TB
        + "OSError: cannot write the last checkpoint\n",
        GPU,
    ),
    "torchrun": (ranked(0, TB + OOM) + CHILD, GPU),
    "torchrun, old launcher log between": (
        TB
        + OOM
        + "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: 1)\n"
        + CHILD,
        GPU,
    ),
    "one rank runs out, the others lose their peer": (
        ranked(0, TB + OOM) + ranked(1, TB + "torch.distributed.DistBackendError: NCCL") + CHILD,
        GPU,
    ),
    "ranks interleaved": (
        "".join(
            x + y
            for x, y in zip(
                ranked(0, TB + "RuntimeError: Connection closed by peer").splitlines(True),
                ranked(1, TB + OOM).splitlines(True),
                strict=True,
            )
        )
        + CHILD,
        GPU,
    ),
    "jax host": (
        TB + "JaxRuntimeError: RESOURCE_EXHAUSTED: Out of host memory while trying to allocate 9",
        HOST,
    ),
    "MemoryError": (TB + "MemoryError\n", HOST),
    "numpy": (TB + "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 9 GiB", HOST),
    "numpy in a rank": (ranked(3, TB + "MemoryError: Unable to allocate 9 GiB") + CHILD, HOST),
    "torch on the CPU": (
        TB + "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried",
        HOST,
    ),
    "loader killed": (
        TB + "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. ",
        HOST,
    ),
    "c++": ("terminate called after throwing an instance of 'std::bad_alloc'\n", HOST),
    "slurm": ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0\n", HOST),
    "loader, shared memory": (
        TB + "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is "
        "possible that dataloader's workers are out of shared memory.",
        HOST,
    ),
    "loaders": (
        TB + "RuntimeError: DataLoader worker (pid(s) 7, 8) is killed by signal: Killed.",
        HOST,
    ),
    "fork": (TB + "OSError: [Errno 12] Cannot allocate memory\n", HOST),
    "tensorflow on the CPU": (
        TB + "ResourceExhaustedError: OOM when allocating tensor with shape[9] and type float on "
        "/job:x/device:CPU:0 by allocator cpu",
        HOST,
    ),
    "apple": (TB + "RuntimeError: MPS backend out of memory (MPS allocated: 9 GB)", GPU),
    "rmm is no C++ heap": (
        "terminate called: what(): std::bad_alloc: out_of_memory: CUDA error at: pool.hpp\n",
        GPU,
    ),
    "a launcher by subprocess": (
        TB + OOM + TB + "subprocess.CalledProcessError: Command 'train' returned 1\n",
        GPU,
    ),
    "allocator that goes on": (
        "W RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes. The caller "
        "indicates that this is not a failure\n" + "exit\n",
        None,
    ),
    "caught, smaller batch, then another error": (
        TB + OOM + "batch 8 does not fit, trying 4\n" + TB + "KeyError: 'labels'\n",
        None,
    ),
    "torchrun, another error": (ranked(0, TB + "KeyError: 'x'") + CHILD, None),
    "the launcher alone": (CHILD, None),
    "words in a log": (
        "INFO retries on CUDA out of memory errors\n" + TB + "ValueError: bad\n",
        None,
    ),
    "help text": ('hint: "on CUDA out of memory lower --batch"\nusage: fit.py [-h]\n', None),
    "BFC warning": (
        (
            "W bfc_allocator.cc:310] Allocator (GPU_0_bfc) ran out of memory trying to allocate "
            "2.10GiB. The caller indicates that this is not a failure\n"
        ),
        None,
    ),
    "grpc quota": (TB + "grpc.RpcError: RESOURCE_EXHAUSTED: quota exceeded\n", None),
    "triton": (TB + "OutOfResources: out of resource: shared memory, Required: 99\n", None),
    "cublas not initialised": (TB + "RuntimeError: CUBLAS_STATUS_NOT_INITIALIZED\n", None),
    "a class named like it": (TB + "my.NotAMemoryErrorAtAll: x\n", None),
    "nothing": ("", None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_last_exception_of_stderr_names_the_memory(name: str) -> None:
    text, kind = CASES[name]
    assert oom_kind(Evidence(exit_code=1, stderr_tail=text)) is kind


@pytest.mark.parametrize("name", CASES)
def test_a_job_that_succeeded_never_ran_out_of_memory(name: str) -> None:
    evidence = Evidence(exit_code=0, stderr_tail=CASES[name][0], oom_kill=0)
    assert oom_kind(evidence) is None
    assert judge(evidence, cancelled=False) is Outcome.COMPLETED


def test_s43_a_killed_child_with_exit_0_is_a_success_and_the_counter_is_only_evidence() -> None:
    """The command's exit decides; a job that must not go on after a lost child says so."""
    assert judge(Evidence(exit_code=0, oom_kill=1), cancelled=False) is Outcome.COMPLETED


def test_the_kernels_counter_and_the_schedulers_state_come_before_any_words() -> None:
    words = TB + OOM
    assert oom_kind(Evidence(signal=9, oom_kill=1, stderr_tail=words)) is HOST
    assert oom_kind(Evidence(exit_code=1, scheduler_state="OUT_OF_MEMORY")) is HOST


RECORDS: dict[str, tuple[str, OomKind | None]] = {
    "the command itself": ("[main]\ntorch.OutOfMemoryError: CUDA out of memory", GPU),
    "first cause": (
        "[main]\ntorch.OutOfMemoryError: x\nRuntimeError: cannot save the checkpoint",
        GPU,
    ),
    "host": ("[main]\nMemoryError: ", HOST),
    "numpy": ("[other]\nMemoryError: numpy._core._exceptions._ArrayMemoryError: 9 GiB", HOST),
    "another error": ("[main]\nKeyError: 'x'", None),
    "a trial was caught, then another error": (
        "[other]\ntorch.OutOfMemoryError: x\n\n[main]\nKeyError: 'x'",
        None,
    ),
    "one rank, then its launcher": (
        (
            "[rank 1]\ntorch.OutOfMemoryError: x\n\n[rank 0]\nDistBackendError: NCCL\n\n[main]\n"
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: fit.py FAILED"
        ),
        GPU,
    ),
    "ranks without": (
        (
            "[rank 0]\nKeyError: 'x'\n\n[main]\n"
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: fit.py FAILED"
        ),
        None,
    ),
}


@pytest.mark.parametrize("name", RECORDS)
def test_recorded_exceptions_say_who_ended_the_job(name: str) -> None:
    text, kind = RECORDS[name]
    # The log would say the contrary; nobody asks it.
    words = TB + ("KeyError: 'y'" if kind else OOM)
    assert oom_kind(Evidence(exit_code=1, exception=text, stderr_tail=words)) is kind


def test_a_launcher_alone_leaves_it_to_stderr() -> None:
    record = "[main]\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError: x"
    assert oom_kind(Evidence(exit_code=1, exception=record, stderr_tail=TB + OOM)) is GPU


def test_the_exception_record_comes_before_stderr() -> None:
    seen = Evidence(exit_code=1, exception="torch.OutOfMemoryError: x", stderr_tail=TB + "KeyError")
    assert oom_kind(seen) is GPU


def test_sigkill_without_evidence_is_not_an_oom() -> None:
    assert oom_kind(Evidence(signal=9)) is None
    assert judge(Evidence(signal=9), cancelled=False) is Outcome.ERROR


def test_memory_of_a_declared_slot_is_gpu_memory() -> None:
    """Where VRAM is declared it is enforced as the limit of the process's memory."""
    seen = Evidence(exit_code=1, stderr_tail=TB + "MemoryError", vram_limited=True)
    assert oom_kind(seen) is GPU


@pytest.mark.parametrize(
    ("evidence", "cancelled", "outcome"),
    [
        (Evidence(exit_code=1, stderr_tail=TB + OOM), True, Outcome.CANCELLED),
        (Evidence(exit_code=0), True, Outcome.CANCELLED),
        (Evidence(exit_code=0, timed_out=True), False, Outcome.TIMED_OUT),
        (Evidence(exit_code=1, stderr_tail=TB + OOM), False, Outcome.GPU_OOM),
        (Evidence(signal=9, oom_kill=2), False, Outcome.HOST_OOM),
        (Evidence(exit_code=3), False, Outcome.ERROR),
        (Evidence(), False, Outcome.ERROR),
    ],
)
def test_one_place_names_the_outcome(evidence, cancelled, outcome) -> None:
    assert judge(evidence, cancelled=cancelled) is outcome
