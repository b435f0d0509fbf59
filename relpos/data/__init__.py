"""Text -> token shards -> batches: `prepare` writes a folder, `TokenData` opens it, `Windows` serves it."""

from relpos.data.loader import Windows, collate, masked
from relpos.data.prepare import prepare
from relpos.data.shards import TokenData

__all__ = ["TokenData", "Windows", "collate", "masked", "prepare"]
