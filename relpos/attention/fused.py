"""Fused kernels. Not written yet: `obstacle` says so."""

from __future__ import annotations


def obstacle(q, k, terms, layout, *, rescores=False):
    return "the fused kernels are not there yet"


def attend(q, k, v, terms, layout, scale):
    raise RuntimeError("unreachable")
