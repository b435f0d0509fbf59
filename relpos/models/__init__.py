"""Models with any positional encoding, as Hugging Face models: importing this registers them with the Auto classes."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from relpos.models.base import RelPosPreTrainedModel
from relpos.models.cache import RelPosCacheLayer
from relpos.models.config import SIZES, RelPosConfig, RelPosEncoderConfig
from relpos.models.encoder import RelPosEncoder, RelPosForMaskedLM
from relpos.models.gpt import RelPosForCausalLM, RelPosModel

AutoConfig.register(RelPosConfig.model_type, RelPosConfig, exist_ok=True)
AutoConfig.register(RelPosEncoderConfig.model_type, RelPosEncoderConfig, exist_ok=True)
AutoModel.register(RelPosConfig, RelPosModel, exist_ok=True)
AutoModel.register(RelPosEncoderConfig, RelPosEncoder, exist_ok=True)
AutoModelForCausalLM.register(RelPosConfig, RelPosForCausalLM, exist_ok=True)
AutoModelForMaskedLM.register(RelPosEncoderConfig, RelPosForMaskedLM, exist_ok=True)

__all__ = [
    "SIZES",
    "RelPosCacheLayer",
    "RelPosConfig",
    "RelPosEncoder",
    "RelPosEncoderConfig",
    "RelPosForCausalLM",
    "RelPosForMaskedLM",
    "RelPosModel",
    "RelPosPreTrainedModel",
]
