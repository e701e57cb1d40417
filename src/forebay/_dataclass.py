"""`dataclass`, `field` and `replace` of the standard library for the classes that every process creates when it starts.

Importing `dataclasses` and `inspect` takes 5 ms, and each frozen class 0.5 ms more, as its methods are compiled one by one. Here a class
is created with nothing compiled: ``__init__`` is compiled when there are more than a few instances, and what is rarely needed (``repr``,
an order, the fields for `dataclasses.replace`) is taken then from a *twin*, a class with the same fields that the standard library makes.
To type checkers it is the standard library's own.
"""

from __future__ import annotations

TYPE_CHECKING = False

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
    from dataclasses import field as field
    from dataclasses import replace as replace
    from typing import Any

    def field_values(instance: object) -> dict[str, Any]: ...
else:
    from operator import attrgetter

    class field:
        """The options of a field."""

        __slots__ = ("options",)

        def __init__(self, **options):
            self.options = options

    def dataclass(cls=None, /, *, frozen=False, slots=False, eq=True, order=False):
        """See `dataclasses.dataclass`, of which these are all options that Forebay uses on its way to a hit."""
        if cls is None:
            return lambda cls: dataclass(cls, frozen=frozen, slots=slots, eq=eq, order=order)
        names = tuple(name for name, kind in cls.__annotations__.items() if not kind.startswith("ClassVar"))
        defaults = {name: cls.__dict__[name] for name in names if name in cls.__dict__}
        methods = {
            "__match_args__": names,
            "__init__": _first_init,
            "__repr__": _of_twin("__repr__"),
            "__replace__": _of_twin("__replace__"),
            "__dataclass_fields__": _OfTwin("__dataclass_fields__"),
            "__dataclass_params__": _OfTwin("__dataclass_params__"),
            "__signature__": _OfTwin("__signature__"),
        }
        if eq:
            methods["__eq__"], methods["__hash__"] = _eq(_values(names, defaults)), None
        if eq and frozen:
            methods["__hash__"] = _hash(_values(names, defaults, "hash"))
        if order:
            methods |= {name: _of_twin(name) for name in ("__lt__", "__le__", "__gt__", "__ge__")}
        if frozen:
            methods |= {"__setattr__": _refuse_set, "__delattr__": _refuse_delete}
            if slots:
                methods |= {"__getstate__": _getstate, "__setstate__": _setstate}
        methods = {name: method for name, method in methods.items() if name not in cls.__dict__}
        if slots:
            unbound = {"__dict__", "__weakref__", *names}
            namespace = {name: value for name, value in cls.__dict__.items() if name not in unbound} | {"__slots__": names} | methods
            qualname = cls.__qualname__
            cls = type(cls)(cls.__name__, cls.__bases__, namespace)
            cls.__qualname__ = qualname
        else:
            for name, value in methods.items():
                setattr(cls, name, value)
            for name, value in defaults.items():
                if isinstance(value, field):
                    delattr(cls, name)
        cls.__forebay_made__ = 0
        cls.__forebay_fields__ = names, defaults, {"frozen": frozen, "slots": slots, "eq": eq, "order": order}
        return cls

    def field_values(instance, /):
        """Names and values of the fields, in their order; a value that is such an instance itself stays one."""
        return {name: getattr(instance, name) for name in instance.__forebay_fields__[0]}

    def replace(instance, /, **changes):
        """See `dataclasses.replace`."""
        return type(instance)(**field_values(instance) | changes)

    def _decorated(cls):
        """The class itself, of the class of an instance: a subclass is not one of ours."""
        return next(base for base in cls.__mro__ if "__forebay_fields__" in base.__dict__)

    def _first_init(self, *args, **kwargs):
        """Set the fields of one of the first instances, as the compiled ``__init__`` will; it also raises for arguments that do not fit."""
        cls = _decorated(type(self))
        names, defaults, _ = cls.__forebay_fields__
        cls.__forebay_made__ += 1
        values = dict(zip(names, args, strict=False)) | kwargs
        required = {name for name in names if not _has_default(defaults.get(name, _REQUIRED))}
        fits = len(args) + len(kwargs) == len(values) and {*names} >= values.keys() >= required
        if not fits or cls.__forebay_made__ > _FEW:
            cls.__init__ = _compiled_init(cls)
            cls.__init__(self, *args, **kwargs)
            return
        for name in names:
            object.__setattr__(self, name, values[name] if name in values else _default(defaults[name]))
        if hasattr(self, "__post_init__"):
            self.__post_init__()

    def _has_default(value):
        return not isinstance(value, field) or not value.options.keys().isdisjoint(("default", "default_factory"))

    def _default(value):
        if not isinstance(value, field):
            return value
        return value.options["default_factory"]() if "default_factory" in value.options else value.options["default"]

    def _compiled_init(cls):
        names, defaults, options = cls.__forebay_fields__
        scope = {"_set": object.__setattr__, "_absent": _ABSENT}
        parameters, lines = ["self"], []
        for name in names:
            default, value = defaults.get(name, _REQUIRED), name
            if not _has_default(default):
                parameters.append(name)
            else:
                parameters.append(f"{name}=_default_{name}")
                factory = default.options.get("default_factory") if isinstance(default, field) else None
                scope[f"_default_{name}"] = _default(default) if factory is None else _ABSENT
                if factory is not None:
                    scope[f"_new_{name}"], value = factory, f"_new_{name}() if {name} is _absent else {name}"
            if not options["frozen"]:
                lines.append(f"self.{name} = {value}")
            elif options["slots"]:
                scope[f"_set_{name}"] = cls.__dict__[name].__set__
                lines.append(f"_set_{name}(self, {value})")
            else:
                lines.append(f"_set(self, {name!r}, {value})")
        if hasattr(cls, "__post_init__"):
            lines.append("self.__post_init__()")
        exec(f"def __init__({', '.join(parameters)}):\n " + "\n ".join(lines or ["pass"]), scope)
        init = scope["__init__"]
        init.__qualname__ = f"{cls.__qualname__}.__init__"
        return init

    def _values(names, defaults, *excluding):
        """A function that returns those values of an instance which count when it is compared, and hashed."""
        options = {name: value.options for name, value in defaults.items() if isinstance(value, field)}
        counted = [n for n in names if all(options.get(n, {}).get(option, True) for option in ("compare", *excluding))]
        return attrgetter(*counted) if counted else lambda self: ()

    def _eq(values):
        def __eq__(self, other):
            return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

        return __eq__

    def _hash(values):
        def __hash__(self):
            return hash(values(self))

        return __hash__

    def _refuse_set(self, name, value):
        cls = _decorated(type(self))
        if type(self) is cls or name in cls.__forebay_fields__[0]:
            from dataclasses import FrozenInstanceError

            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        object.__setattr__(self, name, value)

    def _refuse_delete(self, name):
        cls = _decorated(type(self))
        if type(self) is cls or name in cls.__forebay_fields__[0]:
            from dataclasses import FrozenInstanceError

            raise FrozenInstanceError(f"cannot delete field {name!r}")
        object.__delattr__(self, name)

    def _getstate(self):
        return list(field_values(self).values())

    def _setstate(self, state):
        for name, value in zip(self.__forebay_fields__[0], state, strict=True):
            object.__setattr__(self, name, value)

    # `tasks` encodes an instance by its fields only where the class leaves its state to dataclasses.
    _getstate.__module__ = "dataclasses"

    class _OfTwin:
        """An attribute of the class that is taken from its twin when it is first asked for."""

        __slots__ = ("name",)

        def __init__(self, name):
            self.name = name

        def __get__(self, instance, cls):
            return getattr(_twin(_decorated(cls)), self.name)

    def _of_twin(name):
        def method(self, *args, **kwargs):
            return getattr(_twin(_decorated(type(self))), name)(self, *args, **kwargs)

        method.__name__ = name
        return method

    def _twin(cls):
        """The class that the standard library makes of the same fields."""
        twin = cls.__dict__.get("__forebay_twin__")
        if twin is None:
            import dataclasses
            import inspect

            names, defaults, options = cls.__forebay_fields__
            fields = {n: dataclasses.field(**value.options) if isinstance(value, field) else value for n, value in defaults.items()}
            annotations = {name: cls.__annotations__[name] for name in names}
            twin = type(cls.__name__, (), {"__module__": cls.__module__, "__annotations__": annotations, "__doc__": cls.__doc__, **fields})
            twin = dataclasses.dataclass(twin, **options)
            twin.__signature__ = inspect.signature(twin)
            cls.__forebay_twin__ = twin
        return twin

    _ABSENT, _REQUIRED = object(), field()
    _FEW = 4  # to compile takes as long as 50 instances without
