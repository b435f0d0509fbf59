"""When the kernels of a compiled training step, norm.py and gelu.py, may stand in for modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from relpos.attention.fused import installed, interpreted, transformed


def takes(*tensors: Tensor) -> bool:
    """Whether kernels of ours can read them and anybody wants gradients, which is what the kernels gain on."""
    known = all(x.dtype in (torch.float32, torch.bfloat16, torch.float16) for x in tensors)
    here = all(x.is_cuda for x in tensors) and installed() or interpreted()
    return here and known and torch.is_grad_enabled() and not transformed()


def plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module does what its class says and no more: no adapter, no quantised form, no hook."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return type(module) is kind and not hooks and "forward" not in module.__dict__


__all__ = ["plain", "takes"]
