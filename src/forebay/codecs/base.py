"""What all codecs share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, Self

from forebay import errors
from forebay._model import Buffer, Item

ALIGNMENT = 64


class Codec(Protocol[Item]):
    """How values are stored. ``name`` is stored with them: another name is another codec."""

    name: str

    def encode(self, value: Item) -> Sequence[Buffer]:
        """The pieces of the payload, in order, padding included. They may be views of ``value``: write them before it changes.
        Raises `ConfigError` for a value that this codec cannot store, and whatever the value's own code raises."""

    def decode(self, data: memoryview, private: Callable[[], memoryview]) -> Item:
        """The value of a payload. What lies over ``data`` is read-only where ``data`` is.

        ``private``: gives the same payload writable, with stores that stay with this value; called at most once, where needed.
        Raises `Damaged` for bytes that `encode` did not make."""


class Named:
    """A codec without a state of its own: one object of each class is enough."""

    name: str
    _only: ClassVar[Any] = None

    def __new__(cls) -> Self:
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def __repr__(self) -> str:
        return f"<forebay codec {self.name}>"


def damaged(what: str) -> errors.Damaged:
    return errors.Damaged(f"a stored value is damaged: {what}", key="")
