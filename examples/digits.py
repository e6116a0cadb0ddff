"""Train a small neural network on handwritten digits, with checkpoints.

Runs on any CPU (NumPy; the data set comes with scikit-learn). It does what a well-behaved
Dure job does: it saves a checkpoint in JOB_OUTPUT_DIR, saves once more on SIGTERM, and
goes on from the checkpoint when it is started again.

    dure run -- python examples/digits.py --epochs 40
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from sklearn.datasets import load_digits

Arrays = list[np.ndarray]
stopping = False


def on_sigterm(_signum: int, _frame: object) -> None:
    """Remember that we were asked to stop; the loop saves and leaves."""
    global stopping  # noqa: PLW0603 - the one thing a signal handler may do
    stopping = True


def load() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images (n, 64) in 0..1 and labels (n,), split into 1,500 for training and the rest."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = (images[order] / 16.0).astype(np.float32), labels[order]
    return images[:1500], labels[:1500], images[1500:], labels[1500:]


def fresh(hidden: int) -> Arrays:
    """Weights of a two-layer network: (64, hidden), (hidden,), (hidden, 10), (10,)."""
    rng = np.random.default_rng(1)
    return [
        rng.normal(0, 0.2, (64, hidden)).astype(np.float32),
        np.zeros(hidden, np.float32),
        rng.normal(0, 0.2, (hidden, 10)).astype(np.float32),
        np.zeros(10, np.float32),
    ]


def gradients(weights: Arrays, images: np.ndarray, labels: np.ndarray) -> tuple[float, Arrays]:
    """Cross-entropy loss and its gradients on one batch."""
    w1, b1, w2, b2 = weights
    hidden = np.maximum(images @ w1 + b1, 0)
    logits = hidden @ w2 + b2
    logits -= logits.max(axis=1, keepdims=True)
    exp = np.exp(logits)
    probability = exp / exp.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = float(-np.log(probability[rows, labels] + 1e-9).mean())
    error = probability
    error[rows, labels] -= 1
    error /= len(labels)
    back = (error @ w2.T) * (hidden > 0)
    return loss, [images.T @ back, back.sum(0), hidden.T @ error, error.sum(0)]


def accuracy(weights: Arrays, images: np.ndarray, labels: np.ndarray) -> float:
    """Share of digits read correctly."""
    w1, b1, w2, b2 = weights
    scores = np.maximum(images @ w1 + b1, 0) @ w2 + b2
    return float((scores.argmax(axis=1) == labels).mean())


def worker(pipe: Connection, images: np.ndarray, labels: np.ndarray, batch: int) -> None:
    """One data-parallel worker: gradients of its own shard for the weights it is sent."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the parent decides when to stop
    rng = np.random.default_rng(os.getpid())
    while (weights := pipe.recv()) is not None:
        pick = rng.integers(0, len(images), batch)
        pipe.send(gradients(weights, images[pick], labels[pick]))


class Workers:
    """N processes, one a GPU, that share each step's work; 1 works in this process."""

    def __init__(self, count: int, images: np.ndarray, labels: np.ndarray, batch: int) -> None:
        self.images, self.labels, self.batch = images, labels, batch
        self.pipes: list[Connection] = []
        for shard in range(count if count > 1 else 0):
            mine, theirs = mp.Pipe()
            rows = slice(shard, None, count)
            args = (theirs, images[rows], labels[rows], batch // count)
            mp.Process(target=worker, args=args, daemon=True).start()
            self.pipes.append(mine)
        self.rng = np.random.default_rng(2)

    def step(self, weights: Arrays) -> tuple[float, Arrays]:
        """Mean loss and gradient over all workers."""
        if not self.pipes:
            pick = self.rng.integers(0, len(self.images), self.batch)
            return gradients(weights, self.images[pick], self.labels[pick])
        for pipe in self.pipes:
            pipe.send(weights)
        answers = [pipe.recv() for pipe in self.pipes]
        mean = [np.mean([a[1][i] for a in answers], axis=0) for i in range(4)]
        return float(np.mean([a[0] for a in answers])), mean

    def close(self) -> None:
        """Let the workers end."""
        for pipe in self.pipes:
            pipe.send(None)


def save(path: Path, epoch: int, weights: Arrays) -> None:
    """Write a checkpoint atomically: a half-written one never counts."""
    half = path.with_suffix(".half.npz")
    np.savez(half, epoch=epoch, **{f"w{i}": w for i, w in enumerate(weights)})
    half.replace(path)


def main() -> int:
    """Train, save, report; exit 0 also when stopped after saving."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1, help="one per GPU")
    parser.add_argument("--pause-s", type=float, default=0.0, help="rest after each epoch")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, on_sigterm)

    out = Path(os.environ.get("JOB_OUTPUT_DIR", "."))
    checkpoint = out / "digits.npz"
    images, labels, test_images, test_labels = load()
    first, weights = 0, fresh(args.hidden)
    if checkpoint.exists():
        saved = np.load(checkpoint)
        first, weights = int(saved["epoch"]), [saved[f"w{i}"] for i in range(4)]
    attempt = os.environ.get("JOB_ATTEMPT", "1")
    print(f"attempt {attempt}: from epoch {first}, {args.workers} worker(s)", flush=True)

    workers = Workers(args.workers, images, labels, batch=64)
    for epoch in range(first, args.epochs):
        loss = 0.0
        for _ in range(24):
            loss, slopes = workers.step(weights)
            weights = [w - 0.5 * g for w, g in zip(weights, slopes, strict=True)]
        right = accuracy(weights, test_images, test_labels)
        print(f"epoch {epoch + 1}/{args.epochs} loss {loss:.3f} accuracy {right:.3f}", flush=True)
        save(checkpoint, epoch + 1, weights)
        if stopping:
            print("asked to stop: checkpoint saved", flush=True)
            return 0
        time.sleep(args.pause_s)
    workers.close()
    (out / "accuracy.txt").write_text(f"{right:.4f}\n" if args.epochs > first else "done\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
