"""No positional encoding: the causal mask alone tells the order (NoPE, https://arxiv.org/abs/2305.19466).

Without a causal mask attention cannot see order at all: a bidirectional model with `none` treats its text as a bag.
"""

from relpos.encodings.base import Encoding


class NoPE(Encoding):
    title = "none (NoPE)"
    formula = "0"
    paper = "https://arxiv.org/abs/2305.19466"
    additive = False
