"""Arrays and tensors, each as a head that describes it and its memory. NumPy and PyTorch are imported only where a value needs them."""

from __future__ import annotations

import ast
import functools
import math
from typing import Any

from forebay import errors
from forebay._kernel.interrupts import unless_of_handler
from forebay.codecs.base import damaged

# Smaller tensors are copied: the page faults of a private mapping take longer than a copy (150 KB read: 60 us, copied and read: 20).
MAPPED_FROM = 512 * 1024


class CannotEncode(Exception):
    """A part of a value cannot be stored, such as an array that no head can describe. The text names it. ``path``: its position in the
    value, innermost first."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.path: list[str] = []


def head_of(array: Any) -> bytes:
    """The description of an array. Raises `CannotEncode`."""
    return _head(array.dtype, array.shape, _order_of(array))


def split_array(array: Any) -> tuple[bytes, memoryview]:
    """Head and memory of an array, which is copied if it is not contiguous. Raises `CannotEncode`."""
    head = head_of(array)
    return head, memoryview(array.ravel(_order_of(array)).view("u1")) if array.nbytes else memoryview(b"")


def _order_of(array: Any) -> str:
    return "F" if array.flags.fnc else "C"


@functools.lru_cache(1024)
def _head(dtype: Any, shape: tuple[int, ...], order: str) -> bytes:
    try:
        descr = dtype.str if dtype.names is None else dtype.descr
        is_described = numpy().lib.format.descr_to_dtype(descr) == dtype
    except (ValueError, TypeError) as error:
        raise CannotEncode(f"an array of dtype {dtype}") from error
    # Fields may be out of order, and the dtypes of other packages describe themselves as plain bytes.
    if dtype.hasobject or not is_described:
        raise CannotEncode(f"an array of dtype {dtype}")
    return repr((descr, shape, order)).encode()


@functools.lru_cache(1024)
def parse_head(head: bytes) -> tuple[Any, tuple[int, ...], Any, str, int]:
    """The class ndarray; shape, dtype and order for it; the size of the array in bytes. Cached: parsing a head takes 20 times the rest."""
    np = numpy()
    try:
        descr, shape, order = ast.literal_eval(head.decode().rstrip())
        dtype = np.lib.format.descr_to_dtype(descr)
        # NumPy would read pointers to objects from a buffer.
        if dtype.hasobject or order not in ("C", "F") or any(type(n) is not int for n in shape):
            raise ValueError("not what encode writes")
        # An array of this shape over a single element: it raises if NumPy refuses the shape.
        np.ndarray(shape, dtype, bytes(dtype.itemsize), 0, (0,) * len(shape))
    except unless_of_handler(ValueError, TypeError, SyntaxError, KeyError, IndexError, MemoryError, RecursionError) as error:
        raise damaged(f"no array begins with {head[:80]!r}") from error
    return np.ndarray, tuple(shape), dtype, order, math.prod(shape) * dtype.itemsize


@functools.cache
def numpy() -> Any:
    """The package. Raises `MissingExtra`."""
    try:
        import numpy
    except ModuleNotFoundError as error:
        raise errors.MissingExtra("arrays need NumPy, which is not installed: pip install numpy", extra="numpy") from error
    return numpy


# -- tensors -----------------------------------------------------------------------------------------------------------


@functools.cache
def torch() -> Any:
    """The package."""
    import torch

    return torch


TensorHead = tuple[str, tuple[int, ...], tuple[int, ...], bool, bool]
"""The description of a tensor: dtype, shape, strides, whether it requires a gradient, whether it is a parameter."""


def split_tensor(tensor: Any) -> tuple[TensorHead, memoryview] | None:
    """Head and memory of a tensor; None if only its own pickle can describe it."""
    if not is_plain(tensor):
        return None
    lib = torch()
    plain = tensor.detach().resolve_conj().resolve_neg()
    if not (plain.is_contiguous() or _dense(plain)):
        plain = plain.contiguous()
    flat = plain.as_strided((plain.numel(),), (1,))
    memory = memoryview(flat.view(lib.uint8).numpy()) if flat.numel() else memoryview(b"")
    dtype = str(plain.dtype).removeprefix("torch.")
    return (dtype, tuple(plain.shape), plain.stride(), tensor.requires_grad, type(tensor) is lib.nn.Parameter), memory


def is_plain(tensor: Any) -> bool:
    """Whether a `TensorHead` can describe a tensor."""
    return not (tensor.device.type != "cpu" or tensor.layout != torch().strided or tensor.is_quantized or tensor.__dict__)


def _dense(tensor: Any) -> bool:
    """Whether its elements are contiguous in some order of the dimensions, so that its strides can be kept."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def tensor_of(memory: Any, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], requires_grad: bool, parameter: bool) -> Any:
    """A tensor over writable memory."""
    lib = torch()
    kind = getattr(lib, dtype)
    tensor = lib.frombuffer(memory, dtype=kind) if len(memory) else lib.empty(0, dtype=kind)
    tensor.as_strided_(shape, strides)
    return lib.nn.Parameter(tensor, requires_grad) if parameter else tensor.requires_grad_() if requires_grad else tensor
