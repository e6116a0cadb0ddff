"""Read digits by kernel ridge regression: exact, and hungry for memory.

The Gram matrix of n images takes 8·n² bytes, and solving with it as much again. Each
`--shifts` enlarges the training set by moved copies of every digit, so memory grows with
the square: the usual way in which a job that fitted yesterday does not fit today.

    dure run -- python examples/kernel_ridge.py --shifts 5
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from sklearn.datasets import load_digits

MOVES = [(0, 0), (0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (-1, -1), (1, -1), (-1, 1)]


def load(shifts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training images (n·shifts, 64) with labels, and 297 test images with labels."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order] / 16.0, labels[order]
    square = images[:1500].reshape(-1, 8, 8)
    moved = [np.roll(square, move, axis=(1, 2)).reshape(-1, 64) for move in MOVES[:shifts]]
    return np.concatenate(moved), np.tile(labels[:1500], shifts), images[1500:], labels[1500:]


def gram(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Gaussian kernel of every pair, (len(left), len(right)), built in place."""
    distance = left @ right.T
    distance *= -2
    distance += (left**2).sum(1)[:, None]
    distance += (right**2).sum(1)[None, :]
    distance *= -0.05
    return np.exp(distance, out=distance)


def main() -> int:
    """Fit, score, write the score into JOB_OUTPUT_DIR."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shifts", type=int, default=3, choices=range(1, len(MOVES) + 1))
    args = parser.parse_args()
    images, labels, test_images, test_labels = load(args.shifts)
    need_mib = 2 * 8 * len(images) ** 2 / 2**20
    print(f"{len(images)} images, about {need_mib:,.0f} MiB for the kernel", flush=True)
    kernel = gram(images, images)
    kernel[np.diag_indices_from(kernel)] += 1.0
    targets = np.eye(10)[labels]
    weights = np.linalg.solve(kernel, targets)
    scores = gram(test_images, images) @ weights
    right = float((scores.argmax(axis=1) == test_labels).mean())
    print(f"accuracy {right:.4f}", flush=True)
    Path(os.environ.get("JOB_OUTPUT_DIR", "."), "accuracy.txt").write_text(f"{right:.4f}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
