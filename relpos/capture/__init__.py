"""What a picture of a model's positions needs, taken from a model, an encoding or a file.

- `record.py`: the capture itself, its maps and its file (docs/capture.md);
- `spec.py`: an encoding at its initial parameters; `model.py`: a trained model and a text;
- `families.py`: models of transformers that are not ours.
"""

from relpos.capture.model import from_model
from relpos.capture.record import CELLS, KINDS, MAX_LENGTH, VERSION, Capture, Layer, load
from relpos.capture.spec import from_spec

__all__ = ["CELLS", "KINDS", "MAX_LENGTH", "VERSION", "Capture", "Layer", "from_model", "from_spec", "load"]
