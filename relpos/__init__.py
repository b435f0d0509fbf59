"""Relative positional encodings for PyTorch: one file per encoding, one attention that runs them all."""

from relpos import encodings, terms
from relpos.attention import attention, bias_matrix
from relpos.errors import UserError

__version__ = "0.1.0"

__all__ = ["UserError", "__version__", "attention", "bias_matrix", "encodings", "terms"]
