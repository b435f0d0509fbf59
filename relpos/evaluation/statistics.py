"""How sure a mean loss is: 95% intervals that know that neighbouring tokens are not independent.

Tokens of one document share topic, style and difficulty, so an interval that counts them as independent draws is far
too narrow. The unit here is a cluster: a document, or a stretch of the text where no documents are known. With loss sum
`s_c` and token count `n_c` per cluster, the token-weighted mean is `m = sum s_c / sum n_c`, and by linearisation of the
ratio (Cochran, Sampling Techniques, 3rd ed., 1977, section 6.3) its variance is
`C/(C-1) * sum (s_c - m n_c)^2 / (sum n_c)^2`. The interval is `m +- t * se` with Student's t for C-1 degrees of
freedom; perplexity takes the exponential of both ends. No random numbers are drawn: the same losses, the same interval.

Differences of two lengths or two models on the same tokens are paired: `s_c` is then the difference of the sums, and
what the two have in common cancels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

METHOD = (
    "token-weighted mean loss; 95% interval from the spread between clusters (ratio estimator, Student's t with "
    "clusters - 1 degrees of freedom), exponentiated for perplexity"
)
MAX_CLUSTERS = 256  # more documents than this are grouped with their neighbours: files stay small
STRETCHES = 32  # clusters of a text without document borders


@dataclass(frozen=True)
class Mean:
    value: float
    stderr: float | None  # None with fewer than two clusters
    low: float | None
    high: float | None


@cache
def student_t(degrees: int, level: float = 0.95) -> float:
    """The two-sided quantile of Student's t: the t with P(|X| < t) = level, to about 1e-6."""
    # With x = tan(a) sqrt(degrees) the density becomes cos(a)^(degrees - 1): a bounded integral for any number of them.
    angle = np.linspace(0.0, math.pi / 2, 200_001)
    density = np.cos(angle) ** (degrees - 1)
    total = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.tan(float(np.interp(level, total / total[-1], angle))) * math.sqrt(degrees)


def clustered_mean(sums: np.ndarray, counts: np.ndarray) -> Mean:
    """Mean of a total over tokens, `sum(sums) / sum(counts)`, with its 95% interval. Empty clusters do not count."""
    sums, counts = np.asarray(sums, float), np.asarray(counts, float)
    sums, counts = sums[counts > 0], counts[counts > 0]
    mean = float(sums.sum() / counts.sum())
    C = len(sums)
    if C < 2 or not math.isfinite(mean):
        return Mean(mean, None, None, None)
    residual = sums - mean * counts
    stderr = math.sqrt(C / (C - 1) * float((residual**2).sum())) / float(counts.sum())
    half = student_t(C - 1) * stderr
    return Mean(mean, stderr, mean - half, mean + half)


def cluster_borders(documents: np.ndarray, first: int, stop: int) -> tuple[np.ndarray, str]:
    """Where the clusters of the tokens [first, stop) begin, and in words what they are.

    `documents` holds the start of every document. With fewer than 8 documents the text is cut into equal stretches.
    """
    inside = documents[(documents > first) & (documents < stop)]
    starts = np.concatenate([[first], inside]).astype(np.int64)
    if len(starts) < 8:
        n = max(1, min(STRETCHES, stop - first))
        starts = first + (np.arange(n, dtype=np.int64) * (stop - first)) // n
        return starts, f"{n} equal stretches of the text (fewer than 8 documents are known)"
    if len(starts) <= MAX_CLUSTERS:
        return starts, f"{len(starts)} documents"
    group = np.linspace(0, len(starts), MAX_CLUSTERS, endpoint=False).astype(np.int64)
    return starts[group], f"{MAX_CLUSTERS} groups of neighbouring documents, {len(starts)} documents in all"
