"""The protocol of a codec, and what the built-in ones share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, Self

from forebay import errors
from forebay._model import Buffer, Item

ALIGNMENT = 64


class Codec(Protocol[Item]):
    """How values are stored. ``name`` is stored with them: a codec with another name cannot read them."""

    name: str

    def encode(self, value: Item) -> Sequence[Buffer]:
        """The pieces of the payload, in order, padding included. They may be views of ``value``: write them before it changes.
        Raises `ConfigError` for a value that this codec cannot store, and what the value's own code raises."""

    def decode(self, data: memoryview, private: Callable[[], memoryview]) -> Item:
        """The value of a payload. Its views of ``data`` are read-only if ``data`` is.

        ``private``: returns a writable copy-on-write view of the same payload; called at most once, if needed.
        Raises `Damaged` for bytes that `encode` did not write."""


class Named:
    """A codec without state: each class has one instance."""

    name: str
    _instance: ClassVar[Any] = None

    def __new__(cls) -> Self:
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def __repr__(self) -> str:
        return f"<forebay codec {self.name}>"


def damaged(what: str) -> errors.Damaged:
    return errors.Damaged(f"a stored value is damaged: {what}", key="")
