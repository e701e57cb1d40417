"""Sizes, ages, flags, settings and the default place."""

from __future__ import annotations

import logging
import math
import pwd
import tempfile
from pathlib import Path

import pytest

from forebay import Cache, _config
from forebay._config import EnvironmentSettings, default_root, format_age, format_size, parse_age, parse_budget, parse_flag, parse_size
from forebay.checkpoint import Checkpoint
from forebay.claims import claim
from forebay.cli.hints import hint_for
from forebay.errors import ConfigError, RootRefused


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (7, 7),
        (0, 0),
        ("12", 12),
        ("1_000", 1000),
        ("10mb", 10_000_000),
        ("100G", 100 * 10**9),
        ("500GB", 500 * 10**9),
        ("500GiB", 500 * 2**30),
        ("1.5kB", 1500),
        (".5 KiB", 512),
        (" 3 Ti ", 3 * 2**40),
        ("9007199254740993", 9007199254740993),  # 2**53 + 1: a float would lose it
    ],
)
def test_sizes(text: int | str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", -1, "1e3", "10 q", "10 %%", "GB", True, 1.5, None, b"1"])
def test_what_is_no_size_is_said_with_its_name(text: int | str) -> None:
    with pytest.raises(ConfigError, match="budget=") as caught:
        parse_size(text, name="budget")
    assert caught.value.facts["value"] == str(text)


def test_a_share_of_the_disk() -> None:
    assert parse_size("80%", total=1000) == 800
    with pytest.raises(ConfigError, match="give bytes"):
        parse_size("80%")
    with pytest.raises(ConfigError, match="whole disk"):
        parse_size("101%", total=1000)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1_500_000, "1.5 MB"), (999_499, "999 kB"), (999_500, "1 MB"), (2 * 10**18, "2,000 PB")],
)
def test_sizes_as_text(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30d", 30 * 86400), ("90s", 90), ("15m", 900), ("1.5h", 5400), ("2 w", 14 * 86400), (3, 3), ("0", 0), ("Forever", math.inf)],
)
def test_ages(text: float | str, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "-3d", -1, math.nan, "3 months", True])
def test_what_is_no_age(text: float | str) -> None:
    with pytest.raises(ConfigError, match="max_age="):
        parse_age(text, name="max_age")


def test_ages_as_text() -> None:
    assert [format_age(s) for s in (-1, 0, 59.9, 60, 3600, 86400 * 400)] == ["0s", "0s", "59s", "1m", "1h", "400d"]


@pytest.mark.parametrize("text", ["1", "ON", "yes", "True"])
def test_flags_that_are_set(text: str) -> None:
    assert parse_flag(text, name="FOREBAY_OFFLINE")
    assert EnvironmentSettings.from_environment({"FOREBAY_OFFLINE": text}).offline


@pytest.mark.parametrize("text", ["0", "Off", "no", "FALSE", ""])
def test_flags_that_are_not_set(text: str) -> None:
    assert not EnvironmentSettings.from_environment({"FOREBAY_OFFLINE": text}).offline


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FOREBAY_OFFLINE", "maybe"),
        ("FOREBAY_BUDGET", "much"),
        ("FOREBAY_MIN_FREE", "120%"),
        ("FOREBAY_MAX_AGE", "old"),
        ("FOREBAY_PROGRESS", "2"),
        ("FOREBAY_VERBOSITY", "loud"),
    ],
)
def test_a_wrong_variable_is_named_with_its_value(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EnvironmentSettings.from_environment({name: value})
    assert name in str(caught.value)
    assert value in str(caught.value)


def test_settings_are_read_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EnvironmentSettings.from_environment() == EnvironmentSettings()
    monkeypatch.setenv("FOREBAY_HOME", "~/cache")
    monkeypatch.setenv("FOREBAY_BUDGET", "80%")
    monkeypatch.setenv("FOREBAY_MAX_AGE", "forever")
    monkeypatch.setenv("FOREBAY_PROGRESS", "0")
    monkeypatch.setenv("FOREBAY_VERBOSITY", "debug")
    assert EnvironmentSettings.from_environment() == EnvironmentSettings(
        home=Path("~/cache").expanduser(), budget="80%", max_age=math.inf, progress=False, verbosity="DEBUG"
    )  # fmt: skip


def local(path: Path) -> bool:
    return False


def test_the_default_place() -> None:
    assert default_root(is_network=local, environ={"HOME": "/home/a"}) == Path("/home/a/.cache/forebay")
    assert default_root(is_network=local, environ={"HOME": "/home/a", "XDG_CACHE_HOME": "/x"}) == Path("/x/forebay")
    assert default_root(is_network=local, environ={"HOME": "/home/a", "XDG_CACHE_HOME": "x"}) == Path("/home/a/.cache/forebay")


def test_a_default_place_on_a_network_moves_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_config, "_warned_roots", set())
    monkeypatch.setattr("os.geteuid", lambda: 1234)
    home, slurm, tmp = (tmp_path / name for name in ("home", "slurm", "tmp"))
    for place in (home, slurm, tmp):
        place.mkdir()
    environ = {"HOME": str(home), "SLURM_TMPDIR": str(slurm), "TMPDIR": str(tmp)}

    def on_network(path: Path) -> bool:
        return path == home or home in path.parents

    with caplog.at_level(logging.WARNING, "forebay"):
        assert default_root(is_network=on_network, environ=environ) == slurm / "forebay-1234"
        assert default_root(is_network=on_network, environ=environ) == slurm / "forebay-1234"
    assert [record.message for record in caplog.records if "network file system" in record.message] == [caplog.records[0].message]
    del environ["SLURM_TMPDIR"]
    assert default_root(is_network=on_network, environ=environ) == tmp / "forebay-1234"
    del environ["TMPDIR"]
    assert default_root(is_network=on_network, environ=environ) == Path(tempfile.gettempdir()) / "forebay-1234"


def test_the_network_is_asked_of_the_nearest_directory_that_exists(tmp_path: Path) -> None:
    asked: list[Path] = []

    def note(path: Path) -> bool:
        asked.append(path)
        return False

    default_root(is_network=note, environ={"HOME": str(tmp_path)})
    assert asked == [tmp_path]


def test_a_share_that_is_hardly_anything_is_no_budget() -> None:
    assert parse_budget("1%", total=80 << 30) == (80 << 30) // 100
    assert parse_budget("50%", total=100 << 20) == 50 << 20  # a small disk
    for text in ("0.0001%", "0%"):
        with pytest.raises(ConfigError, match="64 MiB minimum"):
            parse_budget(text, total=80 << 30)


@pytest.fixture
def no_passwd_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for the arbitrary user of a container."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("FOREBAY_HOME", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("home", [None, "", "~", "relative"])
def test_a_user_without_a_home_directory_is_told_which_variable_to_set(
    no_passwd_entry: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    with pytest.raises(ConfigError, match="set FOREBAY_HOME") as caught:
        Cache()
    hint = hint_for(caught.value).todo
    assert "export FOREBAY_HOME=" in hint
    assert "unset" not in hint
    assert list(tmp_path.iterdir()) == []


def test_no_directory_is_ever_called_tilde(no_passwd_entry: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "~")
    for name, call in (("root", lambda: Cache("~/c")), ("dirs", lambda: claim(["~/d"])), ("path", lambda: Checkpoint("~/e"))):
        with pytest.raises(ConfigError, match=rf"{name}='~/.' begins with ~, and this user has no home directory"):
            call()
    monkeypatch.setenv("FOREBAY_HOME", "~/f")
    with pytest.raises(ConfigError, match="FOREBAY_HOME='~/f' begins with ~"):
        Cache()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("HOME", str(tmp_path))
    with Cache("~/c", budget="100MB", min_free=0) as cache:
        assert cache.put("key", b"value")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("home", ["/proc", "/dev/null"])
def test_a_home_directory_that_cannot_hold_a_cache_is_refused_with_the_variable_to_set(monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    monkeypatch.setenv("HOME", home)
    for name in ("FOREBAY_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RootRefused, match="FOREBAY_HOME"):
        Cache()
