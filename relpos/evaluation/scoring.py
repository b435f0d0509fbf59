"""Any causal language model of transformers as a function: token ids in, the loss of chosen tokens out.

The logits of 16,384 tokens over GPT-2's vocabulary are 3.3 GB in float32, so they never exist at once: the model's body
gives hidden states `[B,T,D]`, and the output layer and the log-softmax run over a few hundred rows at a time. On a
short probe we check that this gives the logits of the model's own forward pass (some models scale or cap them) and
that no token sees the ones behind it.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from relpos.errors import UserError, nearest

CELLS = 1 << 24  # logits held at once: 64 MiB in float32; on a GPU four times as many, or launches would take longest
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


class TooLong(UserError):
    """The model has no position this far: a property of the model (a dash in the table), not a failure."""


def pick_device(device: str = "auto", local_rank: int = 0) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise UserError(f"there is no device {device!r}: use auto, cpu or cuda") from None
    if chosen.type not in ("cpu", "cuda", "mps", "xpu"):
        raise UserError(f"nothing can be computed on {device!r}: use auto, cpu or cuda")
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError("PyTorch sees no GPU here: use --device cpu")
        if chosen.index is None:
            chosen = torch.device("cuda", local_rank % torch.cuda.device_count())
    return chosen


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise UserError(f"there is no dtype {dtype!r}.{nearest(dtype, ['auto', *DTYPES])}")
    return DTYPES[dtype]


def load_model(path: str | Path, *, device: torch.device, dtype: torch.dtype, impl: str | None = None) -> Any:
    """A causal model from a folder of `save_pretrained` or a run of `relpos train` (or the name of one on the Hub).
    Code inside the folder is never run."""
    import transformers

    folder = Path(path)
    with contextlib.suppress(ImportError):
        import relpos.models  # noqa: F401  registers our Auto classes
    if folder.exists():
        if not folder.is_dir():
            raise UserError(f"{path} is a file; a model is a folder with config.json and its weights")
        if not (folder / "config.json").is_file():
            inside = sorted(p.name for p in folder.iterdir())[:8]
            models = sorted(str(p.parent) for p in folder.glob("*/config.json"))
            hint = f"; name what is in it: {' '.join(models[:8])}" if models else ""
            holds = ", ".join(inside) if inside else "nothing"
            raise UserError(f"{path} is no model: it has no config.json (it holds {holds}){hint}")
    elif not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) or folder.parent.is_dir():  # else a name on the hub
        beside = sorted(str(p.parent) for p in folder.parent.glob("*/config.json"))
        raise UserError(f"there is no folder {str(path)!r} with a model in it.{nearest(str(path), beside)}".rstrip("."))
    try:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype, trust_remote_code=False)
    except UserError:
        raise
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, SafetensorError and more here
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"transformers cannot load {path} as a causal language model: {first}") from error
    set_impl(model, impl)
    return model.to(device).eval()


def set_impl(model: Any, impl: str | None) -> None:
    if impl is None:
        return
    if not hasattr(model, "set_impl"):
        raise UserError(
            f"--impl chooses a kernel of relpos' own models; {type(model).__name__} is not one: leave it out"
        )
    model.set_impl(impl)


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer beside the model, or None."""
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
        # A folder with a model and no tokenizer files can give an empty tokenizer of the model's kind.
        return tokenizer if tokenizer("The pass key is 7.")["input_ids"] and len(tokenizer) >= 32 else None
    except Exception:  # no tokenizer files: a dozen different exceptions, one meaning
        return None


def position_limit(model: Any) -> int | None:
    """How many tokens a table of learned absolute positions holds; None where no such table is.

    Found by looking: an embedding that is not the token embedding, with one row per position of the config. Asking it
    for a row it lacks would abort a whole CUDA context, so this is checked before. `max_position_embeddings` alone is
    no limit: a rotary model runs beyond it, and how well is what we want to see.
    """
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    if hasattr(model, "set_impl"):  # one of ours: the field exists only where a table really ends
        return getattr(config, "max_position_embeddings", None)
    size = next((n for a in ("n_positions", "max_position_embeddings") if (n := getattr(config, a, None))), None)
    if not isinstance(size, int):
        return None
    tokens = model.get_input_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module is not tokens and re.search(r"pos|wpe", name):
            spare = module.num_embeddings - size  # OPT keeps two rows for padding
            if 0 <= spare <= 2:
                return size
    return None


def parameter_count(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())


def weights_fingerprint(model: Any) -> str:
    """SHA-256 over the names, shapes and bytes of all weights as loaded (so it depends on the dtype)."""
    sha = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        sha.update(f"{name} {list(value.shape)} {value.dtype}".encode())
        flat = value.detach().reshape(-1).contiguous()
        if flat.numel():
            sha.update(flat.view(torch.uint8).cpu().numpy())
    return f"sha256:{sha.hexdigest()}"


def _finishers(config: Any) -> list[tuple[str, Callable[[Tensor], Tensor]]]:
    """What models are known to do with the logits after the output layer; the probe decides which applies."""
    cap, times, over = (getattr(config, n, None) for n in ("final_logit_softcapping", "logit_scale", "logits_scaling"))
    found: list[tuple[str, Callable[[Tensor], Tensor]]] = [("hidden states in chunks", lambda x: x)]
    if isinstance(cap, (int, float)) and cap:
        found.append((f"hidden states in chunks, soft cap {cap}", lambda x: torch.tanh(x / cap) * cap))
    if isinstance(times, (int, float)) and times:
        found.append((f"hidden states in chunks, logits times {times}", lambda x: x * times))
    if isinstance(over, (int, float)) and over:
        found.append((f"hidden states in chunks, logits over {over}", lambda x: x / over))
    return found


class Scorer:
    """`losses(ids, first)`: the loss of every token from `first` on. Built once per model; runs the two probes."""

    def __init__(self, model: Any):
        self.model = model
        self.device = next(model.parameters()).device
        self.vocabulary = model.get_input_embeddings().num_embeddings
        self.limit = position_limit(model)
        self.body: Any = getattr(model, "base_model", None)
        self.head = model.get_output_embeddings()
        self.finish: Callable[[Tensor], Tensor] = lambda x: x
        self.how = "whole logits"
        self._probe()

    @torch.no_grad()
    def _probe(self) -> None:
        length = 12 if self.limit is None else min(12, self.limit)
        ids = torch.arange(1, length + 1, device=self.device)[None] * 7 % self.vocabulary
        other = ids.clone()
        other[0, -1] = (ids[0, -1] + 1) % self.vocabulary
        try:
            logits = self.model(ids, use_cache=False).logits.float()
            changed = self.model(other, use_cache=False).logits.float()
        except TypeError as error:
            raise UserError(f"{type(self.model).__name__} does not run on token ids alone: {error}") from error
        except (RuntimeError, ValueError, IndexError) as error:
            raise UserError(f"{type(self.model).__name__} fails on {length} tokens: {error}") from error
        scale = logits.abs().max().clamp(min=1e-6)
        coarse = 1e-3 if self.model.dtype in (torch.float32, torch.float64) else 5e-2
        # Rows before the changed token see the same numbers in the same shapes: they hardly differ, if at all.
        if length > 1 and bool((logits[:, :-1] - changed[:, :-1]).abs().max() > 1e-2 * coarse * scale):
            raise UserError(
                f"{type(self.model).__name__} is not causal: changing a token changes the logits before it. "
                "Perplexity is defined for left-to-right models"
            )
        if self.body is None or self.body is self.model or self.head is None:
            return
        try:
            raw = self.head(self._hidden(ids)).float()
        except (TypeError, RuntimeError, ValueError, AttributeError):
            return  # an unusual body; the model's own forward pass works, as just seen
        for how, finish in _finishers(self.model.config):
            if raw.shape == logits.shape and bool((finish(raw) - logits).abs().max() <= coarse * scale):
                self.how, self.finish = how, finish
                return

    def _hidden(self, ids: Tensor) -> Tensor:
        out = self.body(ids, use_cache=False)
        return out.last_hidden_state if hasattr(out, "last_hidden_state") else out[0]

    def check(self, length: int) -> None:
        if self.limit is not None and length > self.limit:
            raise TooLong(f"the model's table of learned positions ends at {self.limit} tokens")

    def _logit_rows(self, ids: Tensor, first: int) -> Iterator[tuple[slice, Tensor]]:
        """Float32 logits [B, r, vocabulary] of the rows `first`.. of each window, some rows at a time."""
        B, T = ids.shape
        cells = CELLS if self.device.type == "cpu" else 4 * CELLS
        step = max(1, cells // (B * self.vocabulary))
        if self.how == "whole logits":
            logits = self.model(ids, use_cache=False).logits
            for start in range(first, T, step):
                rows = slice(start, min(start + step, T))
                yield rows, logits[:, rows].float()
            return
        hidden = self._hidden(ids)
        for start in range(first, T, step):
            rows = slice(start, min(start + step, T))
            yield rows, self.finish(self.head(hidden[:, rows]).float())

    @torch.no_grad()
    def losses(self, ids: np.ndarray, targets: np.ndarray, first: int = 0) -> np.ndarray:
        """ids, targets [B,T] -> negative log likelihood of `targets[:, first:]`, float32 [B, T - first].

        Row t of the logits predicts `targets[:, t]`, the token behind `ids[:, t]`."""
        self.check(ids.shape[1])
        rows_in = torch.from_numpy(ids.astype(np.int64)).to(self.device)
        wanted = torch.from_numpy(targets.astype(np.int64)).to(self.device)
        out = torch.empty(ids.shape[0], ids.shape[1] - first, device=self.device)
        for rows, logits in self._logit_rows(rows_in, first):
            right = logits.gather(-1, wanted[:, rows, None])[..., 0]
            out[:, rows.start - first : rows.stop - first] = torch.logsumexp(logits, -1) - right
        return out.cpu().numpy()  # once: each transfer waits for the GPU

    @torch.no_grad()
    def logits(self, ids: np.ndarray, first: int) -> np.ndarray:
        """Float32 logits of the rows `first`.., [B, T - first, vocabulary]: for a handful of rows."""
        self.check(ids.shape[1])
        rows_in = torch.from_numpy(ids.astype(np.int64)).to(self.device)
        return np.concatenate([part.cpu().numpy() for _, part in self._logit_rows(rows_in, first)], 1)


def release() -> None:
    """Give memory of a model that has gone back, so that the next one finds room."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
