"""How far a model extrapolates: perplexity by length, passkey retrieval, the lm-evaluation-harness.

Each writes one JSON per model that states its protocol; `docs/evaluation.md` explains them.
"""

from relpos.evaluation.perplexity import evaluate, evaluate_folders
from relpos.evaluation.protocols import Settings
from relpos.evaluation.text import Text, make_text, open_text

__all__ = ["Settings", "Text", "evaluate", "evaluate_folders", "make_text", "open_text"]
