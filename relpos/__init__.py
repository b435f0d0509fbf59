"""Relative positional encodings for PyTorch: one file per encoding, one attention that runs them all."""

from relpos import encodings, terms
from relpos.attention import attention, bias_matrix, explain
from relpos.errors import UserError
from relpos.models import RelPosConfig, RelPosForCausalLM, RelPosForMaskedLM

__version__ = "0.1.0"

__all__ = [
    "RelPosConfig",
    "RelPosForCausalLM",
    "RelPosForMaskedLM",
    "UserError",
    "__version__",
    "attention",
    "bias_matrix",
    "encodings",
    "explain",
    "explore",
    "figure",
    "terms",
]


def figure(*sources, **options):
    """Draw encodings, captures or models: `relpos.figures.figure`, loaded (with matplotlib) when first called."""
    from relpos.figures import figure as draw

    return draw(*sources, **options)


def explore(*sources, **options):
    """Look at encodings, captures or models in a notebook: `relpos.explorer.explore`, loaded when first called."""
    from relpos.explorer import explore as show

    return show(*sources, **options)
