"""A configuration: what it says, and how it says what is wrong with it."""

from __future__ import annotations

import errno
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from forebay import errors
from forebay.tasks.config import Config, load
from forebay.tasks.naming import Tag

WHOLE = """
# of one flow
cache:
  build: true
  simulate: {cache: true, tags: ["iter.*", "last"], pin: true}
  report:
    cache: true
    tags: final
  scratch: false
bypass:
  build: true
  simulate:
    bypass: true
    data: recorded/simulate.json
    tags: iter-[0-3]
  report: {bypass: false, data: x}
"""


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load(written(tmp_path / "flow.yaml", WHOLE))


def test_what_is_cached(config: Config) -> None:
    assert config.caches("build")
    assert config.caches("build", "any")
    assert not config.caches("scratch")
    assert not config.caches("unlisted", "iter-1")
    assert [config.caches("simulate", tag) for tag in ("iter-1", "iter", "last", "xiter-1", "lasting", "", None)] == [True] * 3 + [
        False
    ] * 4
    assert [config.caches("report", tag) for tag in ("final", "final2", None)] == [True, False, False]


def test_a_tag_that_nobody_gave_fits_no_pattern(config: Config) -> None:
    assert config.caches("simulate", Tag("iter-1", "module.simulate:iter-1"))
    assert not config.caches("simulate", Tag("iter-1", "module.simulate:iter-1", given=False))
    assert config.caches("build", Tag("1", given=False))


def test_s39_what_is_pinned(config: Config) -> None:
    assert config.pins("simulate", "iter-1")
    assert not config.pins("simulate", "other")
    assert not config.pins("build", "iter-1")


def test_what_is_replayed(config: Config) -> None:
    build, simulate = config.bypass["build"], config.bypass["simulate"]
    assert (build.on, build.data, build.fits(None)) == (True, None, True)
    assert (simulate.on, simulate.data, simulate.fits("iter-3")) == (True, "recorded/simulate.json", True)
    assert not any(simulate.fits(tag) for tag in ("iter-4", "iter-33", None))
    assert not any(name in config.bypass and config.bypass[name].on for name in ("report", "unlisted"))


def test_as_chia_tells_it(config: Config) -> None:
    assert config.as_chia() == {"build": True, "simulate": ["iter.*", "last"], "report": ["final"]}


def test_a_configuration_can_be_pickled(config: Config) -> None:
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_mapping_says_the_same(config: Config) -> None:
    yaml = pytest.importorskip("yaml")
    assert load(yaml.safe_load(WHOLE)) == config
    assert load(config) is config


@pytest.mark.parametrize("text", ["", "cache:\nbypass:\n", "cache: {}", "null"])
def test_a_configuration_that_lists_nothing_is_the_default(tmp_path: Path, text: str) -> None:
    assert load(written(tmp_path / "flow.yaml", text)) == Config()


def test_a_rule_that_says_neither_is_off(tmp_path: Path) -> None:
    found = load(written(tmp_path / "flow.yaml", "bypass:\n  f: {data: x}\ncache:\n  f: {tags: x}\n"))
    assert not found.bypass["f"].on
    assert not found.caches("f", "x")


def test_anchors_and_merges(tmp_path: Path) -> None:
    text = "cache:\n  a: &often {cache: true, tags: [x, y]}\n  b: *often\n  c:\n    <<: *often\n    tags: z\n"
    found = load(written(tmp_path / "flow.yaml", text))
    assert [found.caches(*call) for call in (("a", "x"), ("b", "y"), ("c", "z"), ("c", "x"))] == [True, True, True, False]


WRONG = [
    ("caching:\n  f: true\n", 1, "no section 'caching': is 'cache' meant? It may be 'cache' or 'bypass'"),
    ("cache:\n  f: true\nother: 1\n", 3, "no section 'other'"),
    ("- cache\n", 1, "a list stands where the sections"),
    ("cache:\n  - f\n", 2, "cache: a list stands where functions are expected"),
    ("cache:\n  f: yes please\n", 2, "cache: f: the text 'yes please' stands where true, false or the keys 'cache', 'tags' or 'pin'"),
    ("cache:\n  f:\n", 2, "cache: f: nothing stands"),
    ("cache:\n  f:\n    cahce: true\n", 3, "cache: f: there is no key 'cahce': is 'cache' meant?"),
    ("cache:\n  f:\n    cache: true\n    data: x\n", 4, "cache: f: there is no key 'data'. It may be 'cache', 'tags' or 'pin'"),
    ("bypass:\n  f: {bypass: true, pin: true}\n", 2, "bypass: f: there is no key 'pin'"),
    ("bypass:\n  f:\n    bypass: 'true'\n", 3, "bypass: f: bypass is the text 'true', where true or false is expected"),
    ("cache:\n  f:\n    cache: true\n    pin: x\n", 4, "cache: f: pin is the text 'x'"),
    (
        "cache:\n  f:\n    cache: true\n    tags: [a, '(']\n",
        4,
        "cache: f: tags: '(' is no regular expression: missing ), unterminated subpattern",
    ),
    (
        "cache:\n  f:\n    cache: true\n    tags:\n      - a\n      - '*'\n",
        6,
        "cache: f: tags: '*' is no regular expression: nothing to repeat",
    ),
    ("cache:\n  f:\n    cache: true\n    tags: 3\n", 4, "cache: f: tags: the number 3 stands where a regular expression is expected"),
    ("bypass:\n  f:\n    bypass: true\n    data: ''\n", 4, "bypass: f: data is the text '', where the path"),
    ("cache:\n  f: true\n  g: true\n  f: false\n", 4, "'f' stands here a second time; the first is in line 2"),
    ("cache:\n  f: true\ncache:\n  g: true\n", 3, "'cache' stands here a second time"),
    ("cache:\n  1: true\n", 2, "1 (int) is no name: put it in quotes"),
    ("cache:\n  ? [a]\n  : true\n", 2, "is no name"),
    ("cache:\n  f: [true\n", 3, "expected ',' or ']', but got"),
    ("cache:\n\tf: true\n", 2, "found character '\\t'"),
    ("cache:\n  f: *nobody\n", 2, "found undefined alias"),
    ("cache: &a\n  f: *a\n", 1, "an alias of what it stands in"),
    ("cache:\n  f: !!python/object/apply:os.system ['true']\n", 2, "stands where"),
    (
        "cache:\n  f: true\n---\ncache:\n  g: true\n",
        3,
        "this is no YAML: expected a single document in the stream, but found another document",
    ),
]


@pytest.mark.parametrize(("text", "line", "words"), WRONG)
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    path = written(tmp_path / "flow.yaml", text)
    with pytest.raises(errors.ConfigError) as raised:
        load(path)
    assert str(raised.value).startswith(f"{path}, line {line}: ")
    assert words in str(raised.value)
    assert isinstance(raised.value, ValueError)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"cache:\n  f: \x00", b"cache: {f: 1e}\nx: \xc3\x28", b"cache: {2026-99-99: true}"])
def test_bytes_that_are_no_text(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(errors.ConfigError, match=r"flow\.yaml"):
        load(written(tmp_path / "flow.yaml", data))


@pytest.mark.parametrize(
    "mapping",
    [
        {"caching": {}},
        {"cache": []},
        {"cache": {"f": 1}},
        {"cache": {"f": {"tag": "x"}}},
        {"cache": {"f": {"cache": True, "tags": ["("]}}},
        {"cache": {3: True}},
    ],
)
def test_a_mapping_is_checked_as_a_file(mapping: Mapping[str, Any]) -> None:
    with pytest.raises(errors.ConfigError, match="config: "):
        load(mapping)


def test_what_would_take_for_ever_to_read(tmp_path: Path) -> None:
    laughs = "".join(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 10)}]\n" for n in range(1, 30))
    for text in (f"x0: &x0 [1]\n{laughs}", "[" * 100_000, "cache: {a: " * 1000):
        with pytest.raises(errors.ConfigError, match=r"flow\.yaml"):
            load(written(tmp_path / "flow.yaml", text))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"flow\.yaml") as raised:
        load(tmp_path / "flow.yaml")
    assert isinstance(raised.value, errors.ConfigError)
    again = pickle.loads(pickle.dumps(raised.value))
    assert (again.errno, again.filename, str(again)) == (errno.ENOENT, str(tmp_path / "flow.yaml"), str(raised.value))
    with pytest.raises(errors.ConfigError, match="Is a directory") as unreadable:
        load(str(tmp_path))
    assert isinstance(unreadable.value, OSError)
    assert unreadable.value.errno == errno.EISDIR


def test_sections_of_other_programs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    others = "ports: {8080: web, 8080: more}\n? [a, b]\n: 1\n7: x\nlines: &l [f]\nports: 1\n"
    path = written(tmp_path / "flow.yaml", f"{others}cache:\n  f: {{cache: true, tags: *l}}\nbypas:\n  f: true\n")
    found = load(path, shared=True)
    assert (found.caches("f", "f"), found.caches("f", "g"), dict(found.bypass)) == (True, False, {})
    assert caplog.messages == [
        f"{path}, line 9: the section 'bypas' is ignored: there is no section 'bypas': is 'bypass' meant? It may be 'cache' or 'bypass'"
    ]
    merged = "x: &x\n  cache: {f: true}\n  other: 1\n<<: *x\nbypass: {f: true}\ncache: {g: true}\n"
    found = load(written(tmp_path / "flow.yaml", merged), shared=True)
    assert (list(found.cache), list(found.bypass)) == (["g"], ["f"])
    with pytest.raises(errors.ConfigError, match="line 2: cache: f: nothing"):
        load(written(tmp_path / "flow.yaml", "cache:\n  f:\n"), shared=True)
    with pytest.raises(errors.ConfigError, match="a second time"):
        load(written(tmp_path / "flow.yaml", "cache: {}\ncache: {}\n"), shared=True)


def test_without_pyyaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(errors.MissingExtra, match="extra 'tasks'"):
        load(written(tmp_path / "flow.yaml", "cache: {}"))
    assert load({"cache": {"f": True}}).caches("f")
