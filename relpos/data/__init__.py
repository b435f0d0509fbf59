"""Text -> token shards -> batches: `prepare` writes a folder, `TokenData` opens it, `Windows` serves it."""

from relpos.data.loader import MaskedRows, Windows, collate, masked
from relpos.data.prepare import prepare
from relpos.data.shards import TokenData

__all__ = ["MaskedRows", "TokenData", "Windows", "collate", "masked", "prepare"]
