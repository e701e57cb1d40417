"""The names of `typing` that modules on the way to a hit use. Importing `typing` takes two milliseconds, and a protocol 0.1 ms.

Type checkers see the standard library's own. Annotations are not evaluated, so at run time most names stand for nothing; a protocol is a
class without fields.
"""

from __future__ import annotations

TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any as Any
    from typing import BinaryIO as BinaryIO
    from typing import ClassVar as ClassVar
    from typing import Concatenate as Concatenate
    from typing import Generic as Generic
    from typing import Literal as Literal
    from typing import NoReturn as NoReturn
    from typing import ParamSpec as ParamSpec
    from typing import Protocol as Protocol
    from typing import Self as Self
    from typing import TypeAlias as TypeAlias
    from typing import TypeGuard as TypeGuard
    from typing import TypeVar as TypeVar
    from typing import cast as cast
    from typing import overload as overload
else:

    class Protocol:
        """The base of classes that only describe what others must have; also `Generic`."""

        __slots__ = ()

        def __class_getitem__(cls, parameters):
            return cls

    Generic = Protocol

    class TypeVar:
        """A type variable; also `ParamSpec`."""

        def __init__(self, name, **options):
            self.__name__ = name

    def cast(kind, value):
        """See `typing.cast`."""
        return value

    def overload(function):
        """See `typing.overload`."""
        return function

    ParamSpec = TypeVar
    Any = BinaryIO = ClassVar = Concatenate = Literal = NoReturn = Self = TypeAlias = TypeGuard = None
