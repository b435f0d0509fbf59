"""Training any encoding: presets and the run, on the Hugging Face Trainer."""

from relpos.training.presets import PRESETS, Preset
from relpos.training.run import Settings, Trained, compare, train, train_in_memory
from relpos.training.trainer import RelPosTrainer, decayed

__all__ = [
    "PRESETS",
    "Preset",
    "RelPosTrainer",
    "Settings",
    "Trained",
    "compare",
    "decayed",
    "train",
    "train_in_memory",
]
