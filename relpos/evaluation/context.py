"""Effective context: how long a text may get before more of it stops helping, and when it begins to hurt.

Rule. Take the `last` protocol, where all lengths are scored on the same tokens. Walk through the measured lengths from
short to long and compare each with the best (lowest loss) of the shorter ones. The difference of the two mean losses is
paired token by token, and its 95% interval comes from the clusters. A length *helps* if the interval lies below zero,
*hurts* if it lies above, and neither if the difference is under 0.0001 nats (0.01% of perplexity): where a bias has
faded out, lengths differ by the rounding of float32, and that can be significant. The effective context is the longest
length that helps, looking only at lengths before the first one that hurts; if none helps, it is the shortest length
measured. Comparisons are not corrected for their number.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from relpos.evaluation.statistics import clustered_mean

RULE = (
    "On the tokens of the `last` protocol, each length is compared with the best shorter one: it helps if the 95% "
    "interval of the paired difference in mean loss lies below zero, hurts if it lies above; differences under 0.0001 "
    "nats count as none. Effective context: the longest length that helps before the first that hurts; the shortest "
    "length measured if none helps. Not corrected for multiple comparisons."
)
LEAST = 1e-4  # nats


def effective_context(protocol: dict[str, Any] | None) -> dict[str, Any]:
    """From the `last` entry of a result file to the verdict."""
    if protocol is None:
        return {"rule": RULE, "length": None, "reason": "the protocol `last` was not run"}
    rows = sorted((r for r in protocol["results"] if r["status"] == "ok"), key=lambda r: r["length"])
    if len(rows) < 2:
        return {"rule": RULE, "length": None, "reason": "fewer than two lengths were measured"}
    counts = np.asarray(protocol["clusters"]["tokens"], float)
    best, effective, hurts = rows[0], rows[0]["length"], None
    steps = []
    for row in rows[1:]:
        difference = clustered_mean(np.asarray(row["cluster_loss"]) - np.asarray(best["cluster_loss"]), counts)
        verdict = "unclear"
        if difference.low is not None and difference.high is not None and abs(difference.value) >= LEAST:
            verdict = "helps" if difference.high < 0 else "hurts" if difference.low > 0 else "unclear"
        steps.append(
            {
                "length": row["length"],
                "against": best["length"],
                "difference": difference.value,
                "ci95": [difference.low, difference.high],
                "verdict": verdict,
            }
        )
        if verdict == "hurts" and hurts is None:
            hurts = row["length"]
        if verdict == "helps" and hurts is None:
            effective = row["length"]
        if row["loss"] < best["loss"]:
            best = row
    return {
        "rule": RULE,
        "length": effective,
        "first_that_hurts": hurts,
        "longest_measured": rows[-1]["length"],
        "steps": steps,
    }
