"""PyTorch: tensors over cached bytes, datasets over URLs and tar shards, and a dataset whose items are decoded once for all workers of the
node."""

from __future__ import annotations

from forebay import errors

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise errors.MissingExtra.of("forebay.adapters.torch", "torch") from error

from forebay.adapters.torch.datasets import CachedDataset, UrlDataset
from forebay.adapters.torch.lookahead import Lookahead
from forebay.adapters.torch.shards import Shards
from forebay.adapters.torch.tensors import tensor

__all__ = ["CachedDataset", "Lookahead", "Shards", "UrlDataset", "tensor"]
