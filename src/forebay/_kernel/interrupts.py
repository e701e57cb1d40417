"""Signals wait while a public call runs, and are delivered at named points.

A handler of Python's `signal` runs between any two instructions of the main thread, and what it raises (KeyboardInterrupt, a time limit)
may strike just after a lock was taken and before the block that releases it is entered: on Python 3.14 even between ``with lock`` and its
body. Locks cannot be made safe against that one by one. So the outermost public call replaces each handler by one that only notes the
signal (`guarded`). The handlers run where nothing is half done: at each `point`, in the turns of all waits and loops, where what they raise
is an ordinary exception, or at the end of the call. After a handler has raised, no other one runs until the call has ended.

Only the main thread runs handlers, so in every other thread all of this does nothing. A signal that comes again a second after it was noted
is delivered at once: a call that hangs can be stopped."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` makes enumerations of all numbers, which takes thrice as long
import _thread
import contextlib
import ctypes
import functools
import math
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator
from itertools import compress, islice, pairwise
from threading import get_ident
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any, BinaryIO, ParamSpec, TypeVar

from forebay._kernel import greenlets

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)
T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

PATIENCE = 1.0
"""Seconds after which a signal that comes again is delivered at once."""
TURN = 0.1
"""The longest time, in seconds, between two points."""
PORTION = 64
"""Items that a loop handles between two points: at a millisecond each, they take less than `TURN`."""
LATER = 0.001
"""Seconds between two looks whether the finalizer or the fork has ended in which a signal came: Python ignores what these raise."""
_SIGNALS = tuple(range(1, 32))
SPECIAL = frozenset((
    "__aenter__", "__aexit__", "__anext__", "__bool__", "__call__", "__contains__", "__del__", "__delitem__", "__enter__", "__eq__",
    "__exit__", "__getitem__", "__getstate__", "__init__", "__iter__", "__len__", "__next__", "__reduce__", "__repr__", "__reversed__",
    "__setitem__", "__setstate__"))  # fmt: skip
ENDINGS = frozenset(("__exit__", "close"))

_sigaction = ctypes.PyDLL(None).sigaction
_sigaction.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
_action = ctypes.create_string_buffer(256)  # a struct sigaction; its first word is the address of the handler
_action_at = ctypes.addressof(_action)
_VARARGS, _GENERATOR, _COROUTINE = 0x4, 0x20, 0x80  # flags of code, as `inspect` names them
_END = object()
_ADDRESS = slice(ctypes.sizeof(ctypes.c_void_p))

_main = threading.main_thread().ident
_inside = False
"""Whether a guarded call runs in the main thread, and no function of the program's own inside it."""
_raised = False
"""Whether a handler has raised in this call."""
_depth = 0
"""How many blocks of guarded calls are interrupted by functions of the program's own, such as handlers."""
_shields = 0
"""How many blocks are entered in which no handler may run."""
_saved: dict[int, tuple[Any, bytes]] = {}
"""By signal, the handler that a `_Note` replaces, and the action of the system if it has other flags than `signal.signal` sets."""
_noted: dict[int, float] = {}
"""The signals to be delivered, in order of arrival, and when they came."""
_plain = b""
"""The action that `signal.signal` sets: a function of Python's own, and flags."""
_ignored = set[CodeType]()
"""Functions of which Python ignores what they raise."""


class Delivered(BaseException):
    """Carries what a handler raised at a point to the end of the call, which raises that. A time limit may raise an OSError, which the code
    in between would take for a fault of the disk."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error: BaseException = error.error if isinstance(error, Delivered) else error


def _follow() -> None:
    global get_ident, _main
    get_ident, _main = greenlets.identity()


greenlets.when_patched(_follow)

# -- handlers ----------------------------------------------------------------------------------------------------------


class _Note:
    """The handler of a signal during a guarded call, instead of one of the program's. A codec may take it for the program's own, and keep
    it for a handler that calls it later: then it is that one."""

    __slots__ = ("handler",)

    def __init__(self, handler: Any) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number not in _saved or _saved[number][0] is not self.handler:
            self.handler(number, frame)
        elif now - _noted.setdefault(number, now) >= PATIENCE:
            _noted.pop(number, None)
            depth = _deeper()
            try:
                self.handler(number, frame)
            except BaseException as error:  # noqa: BLE001 (raised at the end of the call)
                raise Delivered(error) from None
            finally:
                _back_to(depth)


def _begin() -> None:
    """Replace all handlers. Caller: calls `_end` in any event."""
    global _inside, _main
    _inside = True
    for number in compress(_SIGNALS, map(callable, map(_signal.getsignal, _SIGNALS))):
        handler = _signal.getsignal(number)
        if isinstance(handler, _Note):
            if number in _saved:
                continue
            handler = handler.handler  # the program has put it back in place of its own
        _sigaction(number, None, _action_at)
        action = _action.raw
        if action != _plain and action[_ADDRESS] != _plain_action(number, handler, action)[_ADDRESS]:
            continue  # C code has put a function of its own in front of Python's
        action = b"" if action == _plain else action
        _saved[number] = handler, action
        try:
            _signal.signal(number, _Note(handler))
        except unless_of_handler(ValueError):  # in a subinterpreter no thread runs handlers
            _main = None
            return
        if action:
            _sigaction(number, action, None)


def _plain_action(number: int, handler: Any, action: bytes) -> bytes:
    global _plain
    if not _plain:
        _signal.signal(number, handler)
        _sigaction(number, None, _action_at)
        _plain = _action.raw
        _sigaction(number, action, None)
    return _plain


def _put_back() -> None:
    """Restore the handlers, except where the program has set others meanwhile. Can be interrupted, and repeated."""
    for number in tuple(_saved):  # not the pairs: to make these, Python may run a finalizer, which puts back what it finds
        saved = _saved.get(number)
        if saved is not None and isinstance(_signal.getsignal(number), _Note):
            handler, action = saved
            _signal.signal(number, handler)
            if action:
                _sigaction(number, action, None)
        _saved.pop(number, None)


def _end(*, later: bool = False) -> None:
    """Restore the handlers, and run those of the signals that were noted, or have these sent again ``later``."""
    global _inside, _raised, _shields
    _inside = False  # first: if handlers raise between the next lines, the end of the next call does what is left
    try:
        try:
            _put_back()
        finally:
            if _saved:
                _put_back()
            _raised, _shields = False, 0
    finally:
        if _noted and later:
            _send_again()
        elif _noted:
            _run_handlers()


def _run_handlers() -> None:
    while _noted:
        number = next(iter(_noted))
        _noted.pop(number, None)
        handler = _signal.getsignal(number)
        try:
            if callable(handler):
                handler(number, sys._getframe())
            elif handler == signal.SIG_DFL:
                _signal.raise_signal(number)
        except BaseException:
            if _noted:
                _run_handlers()
            raise


def _send_again() -> None:
    """Send what was noted to the main thread again, once it is out of the finalizer or the hook that runs now: if the program has by then
    another handler, such as that of the next time limit, it is too late."""
    waiting = {number: _signal.getsignal(number) for number in _noted}
    _noted.clear()

    def send() -> None:
        while _is_ignored(sys._current_frames().get(_main or 0)):
            greenlets.sleep(LATER)
        for number, handler in waiting.items():
            if _signal.getsignal(number) is handler:
                _signal.pthread_kill(_main or 0, number)

    with contextlib.suppress(RuntimeError):  # the interpreter ends, or the system has no thread left: nobody would hear it
        _thread.start_new_thread(send, ())


def _is_ignored(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code not in _ignored and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def ignored(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, which Python calls itself, as it does hooks: it ignores what these raise."""
    _ignored.add(function.__code__)
    return function


def is_of_handler(trace: TracebackType | None) -> bool:
    """Whether a handler raised the exception with this traceback: one that is in place, or has just put another in its place."""
    codes = {_code_of(handler) for handler in map(_signal.getsignal, _SIGNALS) if callable(handler)}
    while trace is not None and trace.tb_frame.f_code not in codes and not _has_interrupted(trace.tb_frame):
        trace = trace.tb_next
    return trace is not None


def _has_interrupted(frame: FrameType) -> bool:
    """Whether this is a call by Python of a handler, whose arguments are the number of the signal and the frame that it interrupts."""
    code, interrupted = frame.f_code, frame.f_back
    count = code.co_argcount
    arguments = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
    if code.co_flags & _VARARGS:
        arguments += frame.f_locals.get(code.co_varnames[count + code.co_kwonlyargcount]) or ()
    return interrupted is not None and any(type(one) is int and other is interrupted for one, other in pairwise(arguments))


def unless_of_handler(*kinds: type[E]) -> tuple[type[E], ...]:
    """For an ``except`` around code that a handler may interrupt at any line: these classes, or none if a handler raised the exception. A
    time limit may be an OSError, a KeyError, anything."""
    trace = sys.exc_info()[2]
    is_from_inside = trace is not None and trace.tb_next is not None  # else this very frame raised it, as usual
    return () if is_from_inside and get_ident() == _main and is_of_handler(trace) else kinds


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    return getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)


# -- inside a call -----------------------------------------------------------------------------------------------------


def point() -> None:
    """Deliver the signals that were noted. Caller: holds nothing that an exception would leave behind."""
    if _noted and _inside and not _raised and not _shields and get_ident() == _main:
        with outside():
            pass


def point_without(lock: Any) -> None:
    """A point of a thread that holds this `threading.RLock`, which is free while handlers run: what they wait for may need it."""
    if not _noted:
        point()
        return
    held = lock._release_save()
    try:
        point()
    finally:
        lock._acquire_restore(held)


def turns(seconds: float | None = None) -> Iterator[float]:
    """Split a wait of so many seconds (None: without an end) into waits of at most `TURN`, with a point after each."""
    until = math.inf if seconds is None else time.monotonic() + seconds
    left = math.inf if seconds is None else max(seconds, 0.0)
    while True:
        yield min(left, TURN)
        point()
        left = until - time.monotonic()
        if left <= 0:
            return


def sleep(seconds: float) -> None:
    """`time.sleep`, in `turns`."""
    for turn in turns(seconds):
        greenlets.sleep(turn)


def portions(items: Iterable[T]) -> Iterator[list[T]]:
    """The items in lists of at most `PORTION`, with a point before each list."""
    remaining = iter(items)
    while some := list(islice(remaining, PORTION)):
        point()
        yield some


def paced(items: Iterable[T]) -> Iterator[T]:
    """The items, with a point before each `PORTION` of them, which are taken at once."""
    for some in portions(items):
        yield from some


def digest(file: BinaryIO, digest: Any) -> str:
    """What `hashlib.file_digest` returns in hex, with points. ``digest``: an object of `hashlib`."""
    buffer = bytearray(1 << 20)
    while size := file.readinto(buffer):  # type: ignore[attr-defined]  # of any file that is open in binary mode
        digest.update(memoryview(buffer)[:size])
        point()
    return digest.hexdigest()  # type: ignore[no-any-return]


class outside:
    """Around a function of the program's own that makes a value: the program's handlers are in place."""

    __slots__ = ("_before", "_depth")

    def __enter__(self) -> None:
        self._before = (_raised, _shields) if _inside and get_ident() == _main else None
        if self._before is not None:
            self._depth = _deeper()
            try:
                _end()
            except BaseException as error:  # noqa: BLE001 (raised at the end of the call)
                _back_to(self._depth)
                _resume(True, self._before[1])
                raise Delivered(error) from None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._before is not None:
            raised, shields = self._before
            _back_to(self._depth)
            is_delivered = isinstance(error, Exception) and is_of_handler(trace)
            _resume(raised or is_delivered or (kind is not None and not issubclass(kind, Exception)), shields)
            if is_delivered and error is not None:  # else it would be taken for an error of the program's function
                raise Delivered(error) from None


def _deeper() -> int:
    global _depth
    _depth += 1
    return _depth - 1


def _back_to(depth: int) -> None:
    global _depth
    _depth = depth


def depth() -> int:
    """How many functions of the program's own, such as handlers, the main thread runs inside of guarded calls."""
    return _depth


def is_interrupted(thread: int, since: int) -> bool:
    """Whether a thread, which had this `depth` when it took something, runs a function of the program's own since then: it lets go only
    after that, which may wait for the thread that asks. Callable from any thread."""
    return thread == _main and _depth > since


def _resume(raised: bool, shields: int) -> None:
    """Go on with a guarded call."""
    global _raised, _shields
    try:
        _begin()
    except BaseException as error:  # noqa: BLE001 (raised at the end of the call)
        _begin()
        _raised, _shields = True, shields
        raise Delivered(error) from None
    _raised, _shields = raised, shields


class shielded:
    """Around a cleanup that must be done, a finalizer, or a fork: no handler runs. If no guarded call runs, signals that come are sent
    again later, since Python ignores what a finalizer raises."""

    __slots__ = ("_is_inside", "_is_main")

    def __enter__(self) -> None:
        global _shields
        self._is_main, self._is_inside = get_ident() == _main, _inside
        if self._is_main and not self._is_inside:
            try:
                _begin()
            except BaseException:
                _end()
                raise
        if self._is_main:
            _shields += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        global _shields
        if self._is_main and self._is_inside:
            _shields -= 1
        elif self._is_main:
            _end(later=True)


def after_fork_child() -> None:
    """In a child, which has one thread: that runs the handlers from now on. What was noted is the parent's."""
    global _main, _depth
    _noted.clear()
    if get_ident() != _main:
        _main, _depth = get_ident(), 0
        _end()


# -- public calls ------------------------------------------------------------------------------------------------------


def guarded(function: Callable[P, R], *, always: bool = False) -> Callable[P, R]:
    """Have signals wait while ``function`` runs, unless a guarded call runs already. Of a function that returns a generator or a coroutine,
    each step is guarded. What a call returns is dropped if a handler raises at the end of the call: see `undone_by`. ``always``: it runs
    even if a handler raises at the beginning, since it ends something; not while the interpreter ends, when other threads stand still with
    what they hold, and the kernel ends all."""
    is_finalizing = sys.is_finalizing
    flags = function.__code__.co_flags if isinstance(function, FunctionType) else 0
    if flags & _GENERATOR:

        @functools.wraps(function)
        def steps(*args: P.args, **kwargs: P.kwargs) -> Any:
            return Steps(function(*args, **kwargs))  # type: ignore[arg-type]

        return _marked(steps)  # type: ignore[no-any-return]
    if flags & _COROUTINE:

        @functools.wraps(function)
        async def awaited(*args: P.args, **kwargs: P.kwargs) -> Any:
            return await _Awaitable(function(*args, **kwargs), Steps)

        return _marked(awaited)  # type: ignore[no-any-return]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if always and is_finalizing():
            return None  # type: ignore[return-value]  # no name is looked up: the module may be gone
        if _inside or get_ident() != _main:
            return function(*args, **kwargs)
        try:
            try:
                try:
                    _begin()
                except BaseException:
                    if always:
                        _begin()
                        function(*args, **kwargs)
                    raise
                return function(*args, **kwargs)
            finally:
                _end()
        except Delivered as delivered:
            error = delivered.error
        try:
            raise error
        finally:
            del error  # it refers to this frame, and so to what the call had

    return _marked(call)  # type: ignore[no-any-return]


def _marked(function: Any) -> Any:
    """A test looks for what is not guarded."""
    function.__forebay_guarded__ = True
    return function


def undone_by(undo: Callable[[Any], object]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """`guarded`, for a function whose result does not end when it is dropped: ``undo`` ends it."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        undo_guarded = guarded(undo, always=True)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            done: list[R] = []
            try:
                guarded(lambda: done.append(function(*args, **kwargs)))()
                return done[0]
            except BaseException:
                if done:
                    undo_guarded(done[0])
                raise

        return _marked(call)  # type: ignore[no-any-return]

    return decorate


def finalizer(function: Callable[P, R]) -> Callable[P, R]:
    """Have signals wait while a finalizer runs, wherever it does."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with shielded():
            return function(*args, **kwargs)

    return ignored(call)


def guarded_methods(*but: str) -> Callable[[C], C]:
    """Guard the public methods and properties that a class defines, its special methods and its finalizer, except those in ``but``."""

    def decorate(cls: C) -> C:
        for name, member in tuple(vars(cls).items()):
            is_public = name in SPECIAL or not name.startswith("_")
            if name in but or not is_public or hasattr(member, "__forebay_guarded__"):
                continue
            if isinstance(member, FunctionType) and member.__code__.co_filename == contextlib.__file__:
                continue  # makes a context manager of a generator, which is guarded itself
            if isinstance(member, FunctionType):
                setattr(cls, name, finalizer(member) if name == "__del__" else guarded(member, always=name in ENDINGS))
            elif isinstance(member, (classmethod, staticmethod)):
                setattr(cls, name, type(member)(guarded(member.__func__)))
            elif isinstance(member, property):
                getter, setter = member.fget and guarded(member.fget), member.fset and guarded(member.fset)
                setattr(cls, name, property(getter, setter, member.fdel, member.__doc__))
        return cls

    return decorate


def of_program(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, of the program's own, whose calls run `outside`."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with outside():
            return function(*args, **kwargs)

    return call


async def steps_of_program(awaitable: Awaitable[T]) -> T:
    """The result of what the program's own function returned, each step of which runs `outside`."""
    return await _Awaitable(awaitable, _StepsOutside)  # type: ignore[no-any-return]


def items_of_program(iterable: Iterable[T]) -> Iterator[T]:
    """The items of an iterable of the program's own, which may be slow: its code runs `outside`. Those of a list are `paced`."""
    if isinstance(iterable, (list, tuple, dict)):
        yield from paced(iterable)
        return
    with outside():
        items = iter(iterable)
    while True:
        with outside():
            item = next(items, _END)
        if item is _END:
            return
        yield item  # type: ignore[misc]


class Steps(Generator[Any, Any, Any]):
    """A generator or a coroutine of which each step is guarded."""

    def __init__(self, steps: Generator[Any, Any, Any] | Coroutine[Any, Any, Any]) -> None:
        self._steps = steps
        self._rest: _Rest | None = _Rest(steps)
        self._came = list[Any]()  # what the last step gave: if a handler raises at its end, the next step gives it

    def __next__(self) -> Any:
        if not self._came:
            self._advance()
        return self._came.pop()

    @guarded
    def _advance(self) -> None:
        self._came.append(self._step(self._steps.send, None))

    @guarded
    def send(self, value: Any) -> Any:
        self._came.clear()
        return self._step(self._steps.send, value)

    @guarded
    def throw(self, *error: Any) -> Any:
        self._came.clear()
        return self._step(self._steps.throw, *error)

    @functools.partial(guarded, always=True)
    def close(self) -> None:
        self._came.clear()
        self._step(self._steps.close)

    def _step(self, call: Callable[..., Any], *given: Any) -> Any:
        try:
            return call(*given)
        finally:
            if getattr(self._steps, "gi_frame", None) is None and getattr(self._steps, "cr_frame", None) is None:  # it has ended
                self._rest = None


class _Rest:
    """What is left of a generator or a coroutine: ends it when it is dropped. It has its own finalizer, which runs inside of the last
    guarded step, since Python ignores what a finalizer raises."""

    _steps: Generator[Any, Any, Any] | Coroutine[Any, Any, Any] | None = None  # where a signal comes first

    def __init__(self, steps: Generator[Any, Any, Any] | Coroutine[Any, Any, Any]) -> None:
        self._steps = steps

    @finalizer
    def __del__(self) -> None:
        if self._steps is not None:
            self._steps.close()


class _StepsOutside(Generator[Any, Any, Any]):
    """A coroutine of the program's own, of which each step runs `outside`."""

    def __init__(self, steps: Any) -> None:
        with outside():
            self._steps = steps.__await__()

    def __next__(self) -> Any:
        with outside():
            return next(self._steps)

    def send(self, value: Any) -> Any:
        with outside():
            return self._steps.send(value)

    def throw(self, *error: Any) -> Any:
        with outside():
            return self._steps.throw(*error)

    def close(self) -> None:
        with outside():
            self._steps.close()


class _Awaitable:
    def __init__(self, coroutine: Any, steps: Callable[[Any], Generator[Any, Any, Any]]) -> None:
        self._coroutine, self._steps = coroutine, steps

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._steps(self._coroutine)
