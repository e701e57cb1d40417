"""PyTorch: tensors over cached bytes, datasets over URLs and tar shards, a dataset whose items are decoded once for all workers of the
node, and distributed checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay import errors

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise errors.MissingExtra.of("forebay.adapters.torch", "torch") from error

from forebay.adapters.torch.datasets import CachedDataset, Lookahead, UrlDataset
from forebay.adapters.torch.shards import Shards
from forebay.adapters.torch.tensors import tensor

if TYPE_CHECKING:
    from forebay.adapters.torch.checkpoints import CheckpointReader as CheckpointReader

__all__ = ["CachedDataset", "CheckpointReader", "Lookahead", "Shards", "UrlDataset", "tensor"]


def __getattr__(name: str) -> Any:
    if name != "CheckpointReader":
        raise AttributeError(f"module 'forebay.adapters.torch' has no attribute {name!r}")
    from forebay.adapters.torch.checkpoints import CheckpointReader  # its imports take a second, and most programs use no checkpoints

    globals()[name] = CheckpointReader
    return CheckpointReader
