"""Which call is which: identity of a function, its arguments at their parameters, tags by a rule."""

from __future__ import annotations

import functools
import logging
import math
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay import errors
from forebay.tasks.code import identity_of
from forebay.tasks.naming import Naming, Tag, code_of, prefix_of

HERE = __name__


def keys_of(function: Callable[..., Any]) -> str:
    """What the keys of its calls begin with."""
    return f"{identity_of(function)}#{code_of(function)[0].digest}:"


def plain(a: int, b: int = 2, *, c: int = 3) -> None:
    """Of three parameters."""


def varied(a: int, /, b: int = 2, *rest: int, c: int = 3, **others: int) -> None:
    """Of each kind one."""


def configured(cfg: Any, step: int, client: Any = None) -> None:
    """As the calls of a flow are."""


class Cfg:
    lr = 0.12345


class Model:
    def __init__(self, size: int) -> None:
        self.size = size

    def fit(self, step: int) -> None:
        """A method."""

    def __call__(self, x: int) -> None:
        """An object that can be called."""


def key(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    found = Naming(function, None).call(args, kwargs)
    assert found is not None
    return found.tag.key


# -- tags and keys -----------------------------------------------------------------------------------------------------


def test_a_tag_is_a_str_that_knows_its_key() -> None:
    tag = Tag("iter-3", "module.f:iter-3")
    assert tag == "iter-3"
    assert hash(tag) == hash("iter-3")
    assert (tag.key, tag.given) == ("module.f:iter-3", True)
    assert Tag("x").key == "x"
    for protocol in range(2, 6):
        arrived = pickle.loads(pickle.dumps(Tag("a", "k", given=False), protocol))
        assert (type(arrived), arrived, arrived.key, arrived.given) == (Tag, "a", "k", False)


def test_s35_keys_stay_apart() -> None:
    parts, tags = ["f", "f:a", "f@1", "f%3A", "f%", "f#ab", ""], ("", "a", ":a", "@1:a", "1:a")
    keys = {prefix_of(identity, version) + tag for identity in parts for version in (None, *parts) for tag in tags}
    keys |= {prefix_of(identity, None, code) + tag for identity in parts for code in ("ab", "cd") for tag in tags}
    assert len(keys) == len(parts) * (1 + len(parts) + 2) * 5


def test_keys_read_well() -> None:
    assert prefix_of("flow.build", None) == "flow.build:"
    assert prefix_of("flow.build", "2") == prefix_of("flow.build", "2", "0f") == "flow.build@2:"
    assert prefix_of("flow.build", None, "0f") == "flow.build#0f:"
    assert Naming(plain, "s{a}", version=3).tag_of((1,), {}).key == f"{HERE}.plain@3:s1"


# -- identity ----------------------------------------------------------------------------------------------------------


def test_a_function_method_or_instance_has_its_qualified_name() -> None:
    assert identity_of(plain) == f"{HERE}.plain"
    assert identity_of(Model.fit) == f"{HERE}.Model.fit"
    assert identity_of(Model) == f"{HERE}.Model"
    assert identity_of(Model(1)) == f"{HERE}.Model"
    assert identity_of(functools.partial(functools.partial(plain, 1), 2)) == f"{HERE}.plain"
    assert identity_of(math.sin) == "math.sin"
    assert identity_of(lambda: None).endswith(".<lambda>")


SCRIPT = """
import multiprocessing, subprocess, sys
from forebay.tasks.code import identity_of
class Here: pass
def work(x): return x
def names(_=None): return identity_of(work), identity_of(Here)
if __name__ == "__main__":
    found = [names()]
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            found += pool.map(names, [0])
    print(*{n for pair in found for n in pair})
"""


def output_of(*command: str, **options: Any) -> list[str]:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120, check=False, **options)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.split())


def test_s35_a_script_and_its_children_agree(tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(SCRIPT)
    assert output_of(str(tmp_path / "flow.py"), cwd="/") == ["flow.Here", "flow.work"]
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "flow.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"}
    assert output_of("-m", "package.flow", env=environment) == ["package.flow.Here", "package.flow.work"]


def test_what_is_typed_in_has_no_file() -> None:
    code = "from forebay.tasks.code import identity_of\ndef f(): pass\nprint(identity_of(f))"
    assert output_of("-c", code) == ["__main__.f"]


SENDER = """
import cloudpickle, sys
from forebay.tasks.naming import Naming
class Cfg:
    def __init__(self, rate): self.rate = rate
def f(cfg): return cfg
f.__qualname__ = "f.__wrapped__"  # as a decorated one has it when it is sent
naming = Naming(f, None)
sys.stdout.buffer.write(cloudpickle.dumps((naming, Cfg(3), naming.call((Cfg(3),), {}).digest)))
"""
RECEIVER = """
import pickle, sys
from forebay.tasks.code import identity_of
naming, cfg, digest = pickle.load(sys.stdin.buffer)
assert naming.call((cfg,), {}).digest == digest
print(naming.tag_of((cfg,), {}).key.partition("#")[0], identity_of(naming.function), identity_of(type(cfg)))
"""


def test_what_is_sent_by_value_keeps_its_name(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    (tmp_path / "flow.py").write_text(SENDER)
    (tmp_path / "worker.py").write_text(RECEIVER)
    sent = subprocess.run([sys.executable, str(tmp_path / "flow.py")], capture_output=True, timeout=60, check=True).stdout
    done = subprocess.run([sys.executable, str(tmp_path / "worker.py")], input=sent, capture_output=True, timeout=60, check=False)
    assert done.stdout.split() == [b"flow.f", b"flow.f", b"flow.Cfg"], done.stderr.decode()


def test_what_is_typed_in_counts_with_its_code() -> None:
    code = "from forebay.tasks.naming import Naming\ndef f(x): return x + {}\nprint(Naming(f, None).tag_of((1,), {{}}).key)"
    first, again, other = (output_of("-c", code.format(n)) for n in (1, 1, 2))
    assert first == again != other


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_the_same_call_however_it_is_written() -> None:
    assert len({key(plain, 1), key(plain, a=1), key(plain, 1, 2), key(plain, b=2, a=1), key(plain, 1, c=3)}) == 1
    assert len({key(varied, 1), key(varied, 1, 2), key(varied, 1, b=2, c=3)}) == 1
    assert len({key(varied, 1, 2, 3, x=1, y=2), key(varied, 1, 2, 3, y=2, x=1)}) == 1
    calls = [
        key(varied, 1),
        key(varied, 2),
        key(varied, 1, 3),
        key(varied, 1, 2, 3),
        key(varied, 1, 2, 3, 4),
        key(varied, 1, c=4),
        key(varied, 1, x=1),
    ]
    calls += [key(varied, 1, a=1), key(varied, 1, x=2), key(varied, 1, 2, (3,)), key(varied, 1, rest=(3,))]
    assert len(set(calls)) == len(calls)


def test_a_digest_is_of_names_too() -> None:
    def f(a: int, b: int) -> None: ...
    def g(b: int, a: int) -> None: ...

    assert Naming(f, "t").call((1, 2), {}) is not None
    digests = {Naming(function, "t").call((1, 2), {}).digest for function in (f, g)}  # type: ignore[union-attr]
    assert len(digests) == 2


def test_defaults_that_cannot_be_written() -> None:
    sentinel = object()

    def f(a: Any = sentinel, *, b: Any = Model) -> None: ...

    assert key(f) == key(f, sentinel) == key(f, b=Model)


def test_arguments_that_do_not_count() -> None:
    def f(self: Any, step: int, logger: Any = None, *rest: int, **others: int) -> None: ...

    naming = Naming(f, None, ignore=("self", "logger", "rest", "verbose"))
    first = naming.call((1, 2), {})
    assert first == naming.call((5, 2, "x", 7), {"verbose": 3}) == naming.call((), {"self": threading.Lock(), "step": 2, "verbose": 1})
    assert first != naming.call((1, 3), {})
    assert first != naming.call((1, 2), {"other": 1})
    assert Naming(plain, None, ignore="b").call((1, 5), {}) == Naming(plain, None, ignore=("b",)).call((1, 6), {})


def test_a_parameter_to_ignore_must_be_there() -> None:
    with pytest.raises(errors.ConfigError, match=r"plain has no parameter 'd' to ignore: it has a, b, c"):
        Naming(plain, None, ignore=("a", "d"))


def test_functions_without_a_signature() -> None:
    assert key(max, 1, 2) == key(max, 1, 2) != key(max, 2, 1)
    assert key(dict, a=1) == key(dict, a=1) != key(dict, a=2)


def test_a_call_that_does_not_fit_is_left_to_the_function(caplog: pytest.LogCaptureFixture) -> None:
    assert Naming(plain, None).call((), {}) is None
    assert Naming(plain, "x{a}").call((1, 2, 3), {}) is None
    with pytest.raises(TypeError, match="plain"):
        Naming(plain, None).tag_of((), {})
    assert caplog.records == []


def test_a_signature_that_is_not_the_function_s_own(caplog: pytest.LogCaptureFixture) -> None:
    @functools.wraps(plain)
    def with_client(b: int) -> None: ...

    naming = Naming(with_client, None)
    assert [naming.call((), {"b": 5}) for _ in range(2)] == [None, None]
    message = f"{HERE}.plain runs uncached where a call does not fit its signature: plain() missing 1 required positional argument: 'a'"
    assert [r.getMessage() for r in caplog.records] == [message]


def test_the_state_of_an_object_counts() -> None:
    assert key(Model.fit, Model(1), 2) == key(Model.fit, Model(1), 2)
    assert len({key(Model.fit, Model(1), 2), key(Model.fit, Model(2), 2), key(Model.fit, Model(1), 3)}) == 3
    assert key(Model(1), 2) == key(Model(1), 2) != key(Model(2), 2)


# -- tags --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "args", "kwargs", "tag"),
    [
        ("iter-{b}", (1,), {}, "iter-2"),
        ("{a}/{b:03d}/{c!r}", (1,), {"c": "x"}, "1/002/'x'"),
        ("{0}-{1}-{2}", (1, 5, 7), {}, "1-5-7"),
        ("{}-{}", (1,), {}, "1-2"),
        ("{rest}{others}", (1, 2, 3), {"x": 4}, "(3,){'x': 4}"),
        ("{rest[0]}", (1, 2, 3), {}, "3"),
        ("{x:.1f}", (1,), {"x": 4}, "4.0"),
        ("{a:{b}}", (1, 4), {}, "   1"),
        ("{{}}", (1,), {}, "{}"),
        ("one for all", (1,), {}, "one for all"),
        (lambda a, b=0, **kwargs: f"{a}:{b}", (1,), {}, "1:0"),
    ],
)
def test_tags_by_rule(rule: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tag: str) -> None:
    naming = Naming(varied, rule)
    found = naming.call(args, kwargs)
    assert found is not None
    assert found.tag == tag == naming.tag_of(args, kwargs)
    assert found.tag.given
    assert found.tag.key == f"{keys_of(varied)}{tag}"


def test_a_tag_from_within_an_argument() -> None:
    assert Naming(configured, "{cfg.lr:.3f}-{step}").tag_of((Cfg, 1), {}) == "0.123-1"


@pytest.mark.parametrize("rule", ["iter-{stop}", "{", "}", "{a", "{3}", "{a:{stop}}", "{a}{0", "{}{}{}{}", "{a}{0}{"])
def test_a_format_that_cannot_work_is_told_at_once(rule: str) -> None:
    with pytest.raises(errors.ConfigError) as raised:
        Naming(plain, rule)
    message = str(raised.value)
    assert f"{HERE}.plain" in message
    assert repr(rule) in message
    assert "The arguments are a, b, c" in message


@pytest.mark.parametrize(
    ("rule", "why"),
    [("{cfg.rate}", "AttributeError"), ("{step:%d-%}", "ValueError"), ("{cfg[0]}", "TypeError"), ("{step!x}", "!|conversion")],
)
def test_a_format_that_fails_in_a_call(rule: str, why: str) -> None:
    with pytest.raises(errors.ConfigError, match=rf"(?s)configured: no tag.*({why}).*The arguments are cfg, step, client"):
        Naming(configured, rule).call((Cfg, 1), {})


def test_a_rule_of_another_kind() -> None:
    with pytest.raises(errors.ConfigError, match="tag=3 is neither"):
        Naming(plain, 3)  # type: ignore[arg-type]
    with pytest.raises(errors.ConfigError, match="its tag= gave the int 3"):
        Naming(plain, lambda a: 3).call((1,), {})
    with pytest.raises(ZeroDivisionError):
        Naming(plain, lambda a: 1 // 0).call((1,), {})


def test_the_default_tag_is_the_digest() -> None:
    found = Naming(plain, None).call((1,), {})
    assert found is not None
    assert (found.tag, found.tag.given) == (found.digest, False)
    assert found.tag == Naming(plain, None).tag_of((1,), {})


class Named:
    def __str__(self) -> str:
        return "a name"


SHOWING = ["g-{cfg}", "g-{0}", "{cfg!r}", "{cfg!s:>60}", "{cfg!s:>{step}}", "{step}{cfg}", lambda cfg, step: f"g-{cfg}"]


@pytest.mark.parametrize(
    ("rule", "cfg"),
    [*((rule, object()) for rule in SHOWING), *(("g-{cfg}", cfg) for cfg in (Model(3), lambda: 3, plain, Model(3).fit))],
)
def test_a_tag_that_shows_an_address_is_refused(rule: Any, cfg: Any) -> None:
    naming = Naming(configured, rule)
    for call in (naming.call, naming.parts, naming.tag_of):
        with pytest.raises(errors.ConfigError, match=r"configured: the tag .* shows where .*lies in memory.*leave tag= out"):
            call((cfg, 1), {})


def test_the_address_of_what_lies_within_is_refused_too() -> None:
    for cfg in ([object()], {"a": Model(1)}):
        with pytest.raises(errors.ConfigError, match=r"\{cfg\}.*lies in memory"):
            Naming(configured, "g-{cfg}").tag_of((cfg, 1), {})


def test_the_address_of_what_an_argument_leads_to_is_refused_too() -> None:
    held, text = Model(object()), "<x at 0x7fffffff>"  # type: ignore[arg-type]
    with pytest.raises(errors.ConfigError, match=r"tag 'function' shows where an object lies in memory \(at 0x.*leave tag= out"):
        Naming(configured, lambda cfg, step: f"g-{cfg.size}").tag_of((held, 1), {})
    assert Naming(configured, lambda cfg, step: f"g-{step}").tag_of((held, text), {}) == f"g-{text}"


def test_what_names_itself_makes_a_tag() -> None:
    for cfg, text in ((Named(), "a name"), (Model, f"{Model}"), ("<x at 0x7fffffff>", "<x at 0x7fffffff>"), (3.5, "3.5")):
        assert Naming(configured, "g-{cfg}").tag_of((cfg, 1), {}) == f"g-{text}"
    assert Naming(configured, "g-{cfg.size}").tag_of((Model(3), 1), {}) == "g-3"
    assert Naming(configured, lambda cfg, step: cfg).tag_of(("<x at 0x7fffffff>", 1), {}) == "<x at 0x7fffffff>"


def test_an_explicit_tag_comes_first() -> None:
    for rule in (None, "s{a}"):
        found = Naming(plain, rule).call((1,), {}, tag="mine")
        assert found is not None
        assert (found.tag, found.tag.key, found.tag.given) == ("mine", f"{keys_of(plain)}mine", True)


def test_a_tag_that_is_no_valid_unicode() -> None:
    found = Naming(plain, "{a}é").call(("\udc80",), {})
    assert found is not None
    assert (found.tag, found.tag.key) == ("\udc80é", f"{keys_of(plain)}\\udc80é")
    assert found.tag.key == Naming(plain, "{a}é").tag_of(("\udc80",), {}).key


# -- arguments without content -----------------------------------------------------------------------------------------


def test_with_a_tag_such_an_argument_counts_by_its_type(caplog: pytest.LogCaptureFixture) -> None:
    naming = Naming(configured, "s{step}")
    with caplog.at_level(logging.WARNING, "forebay.tasks"):
        first = naming.call((1, 2, threading.Lock()), {})
        assert first == naming.call((1, 2, threading.Lock()), {})
        assert first != naming.call((1, 2, open), {})
        assert first != naming.call((2, 2, threading.Lock()), {})
    assert [r.getMessage() for r in caplog.records] == [
        f"{HERE}.configured: argument 'client' (a _thread.lock) counts by its type only: it has no content that stays"
    ]


def test_without_a_tag_such_a_call_runs_uncached(caplog: pytest.LogCaptureFixture) -> None:
    naming = Naming(configured, None)
    with caplog.at_level(logging.WARNING, "forebay.tasks"):
        assert naming.call((1, 2, threading.Lock()), {}) is None
        assert naming.call((1, 3, threading.Lock()), {}) is None
    assert [r.getMessage() for r in caplog.records] == [
        f"{HERE}.configured runs uncached: argument 'client' (a _thread.lock) has no content that stays: give a tag, or ignore it"
    ]
    with pytest.raises(errors.ConfigError, match="argument 'client'"):
        naming.tag_of((1, 2, threading.Lock()), {})
    assert naming.call((1, 2), {}) is not None


def test_functions_of_one_name_stay_apart() -> None:
    def adder(n: int) -> Callable[[int], int]:
        def add(x: int) -> int:
            return x + n

        return add

    assert key(adder(1), 5) == key(adder(1), 5) != key(adder(2), 5)
    assert key(lambda x: x, 5) != key(lambda x: -x, 5)
    assert key(functools.partial(plain, 1), 5) != key(functools.partial(plain, 2), 5)


def test_a_partial_that_holds_what_has_no_content(caplog: pytest.LogCaptureFixture) -> None:
    held = functools.partial(configured, client=threading.Lock())
    assert Naming(held, None).call((1, 2), {}) is None
    assert Naming(held, "s{step}").call((1, 2), {}) == Naming(held, "s{step}").call((1, 2), {})


def test_a_tag_can_be_pickled() -> None:
    naming = Naming(plain, "s{a}", version=2, ignore="c")
    arrived = pickle.loads(pickle.dumps(naming))
    assert arrived.call((1,), {}) == naming.call((1,), {"c": 9})
    assert (arrived.name, arrived.identity, arrived.version) == ("plain", f"{HERE}.plain", "2")
