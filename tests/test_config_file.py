"""The user's `forebay.toml`: what counts of it, and when it is ignored."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay import Cache, RemoteOptions, _config, _config_file
from forebay._config import EnvironmentSettings
from forebay.errors import ConfigError, RemoteUnavailable
from forebay.testing import ScriptedServer
from tests.cli.conftest import Run, home, run  # noqa: F401 (fixtures)

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes the file, and returns its path."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(_config, "_warned", set())
    path = tmp_path / "config" / "forebay" / "forebay.toml"
    path.parent.mkdir(parents=True)
    path.parent.chmod(0o755)

    def write(text: str) -> Path:
        path.write_text(text)
        path.chmod(0o644)
        return path

    return write


def test_where_it_lies() -> None:
    assert _config_file.location({"HOME": "/h"}) == Path("/h/.config/forebay/forebay.toml")
    assert _config_file.location({"HOME": "/h", "XDG_CONFIG_HOME": "/x"}) == Path("/x/forebay/forebay.toml")
    assert _config_file.location({"HOME": "/h", "XDG_CONFIG_HOME": "x"}) == Path("/h/.config/forebay/forebay.toml")
    assert _config_file.location({}) is None


def test_a_variable_wins_over_the_file(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write('home = "~/cache"\nmax_age = "12h"\noffline = true\nattempts = 7\nmax_connections = 9\nbudget = "500GB"\n')
    settings = EnvironmentSettings.from_environment()
    assert settings == EnvironmentSettings(
        home=Path("~/cache").expanduser(), max_age=43_200, offline=True, max_connections=9, budget="500GB"
    )  # fmt: skip
    assert RemoteOptions.from_environment().attempts == 7
    monkeypatch.setenv("FOREBAY_MAX_AGE", "5")
    monkeypatch.setenv("FOREBAY_OFFLINE", "0")
    monkeypatch.setenv("FOREBAY_ATTEMPTS", "3")
    settings = EnvironmentSettings.from_environment()
    assert (settings.max_age, settings.offline, settings.max_connections) == (5, False, 9)
    assert RemoteOptions.from_environment().attempts == 3


def test_a_cache_follows_it(write: Write, tmp_path: Path, server: ScriptedServer) -> None:
    write(f'home = "{tmp_path}/cache"\nbudget = "70MB"\nattempts = 1\n')
    with Cache() as cache:
        assert (cache.path, cache.budget) == (tmp_path / "cache", 70_000_000)
        with pytest.raises(RemoteUnavailable):
            cache.read(server.put("/x", b"x", statuses=[503]))
    assert server.gets == 1
    write(f'home = "{tmp_path}/cache"\nbudget = "90MB"\n')
    with Cache() as cache:
        assert cache.budget == 70_000_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(("budget = [", "is not valid TOML"), ("\xff = 1", "is not valid TOML"), ("budget = 500", "budget='500' is not valid")),
        *(
            ("max_age = 'old'", "max_age='old' is not valid"),
            ("offline = [1]", "offline must be text"),
            ("attempts = 0", "attempts is '0'"),
        ),
        *(("client_cert = 'me.pem'", "client_cert='me.pem' is not valid: use an absolute path"),),
        *(("home = 'cache'", "use an absolute path"), ("[offline]\nx = 1", "offline must be text")),
    ],
)
def test_what_is_wrong_in_it_names_the_file(write: Write, tmp_path: Path, text: str, message: str) -> None:
    path = write("")
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as refused:
        Cache(tmp_path / "cache")
    assert str(refused.value).startswith(str(path))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_unknown_key_is_told_once_and_ignored(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    path = write('budgte = "5GB"\nclaims = "/x"\nmax_age = 7\n')
    for _ in range(2):
        assert EnvironmentSettings.from_environment().max_age == 7
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: the key budgte is unknown and ignored: did you mean budget?", f"{path}: the key claims is unknown and ignored",
    ]  # fmt: skip


@pytest.mark.parametrize("which", ["the file", "its directory", "the directory of its target"])
def test_one_that_another_user_could_write_is_ignored(write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture, which: str) -> None:
    path = write("max_age = 7")
    assert EnvironmentSettings.from_environment().max_age == 7
    if which == "the directory of its target":
        (tmp_path / "dotfiles").mkdir()
        path.rename(tmp_path / "dotfiles" / "mine.toml")
        path.symlink_to(tmp_path / "dotfiles" / "mine.toml")
        assert EnvironmentSettings.from_environment().max_age == 7
        writable = tmp_path / "dotfiles"
    else:
        writable = path if which == "the file" else path.parent
    writable.chmod(0o775 if writable.is_dir() else 0o664)
    for _ in range(2):
        assert EnvironmentSettings.from_environment().max_age == 300
    (told,) = (record.getMessage() for record in caplog.records)
    assert f"`chmod go-w {writable}`" in told


def test_one_of_another_user_is_ignored(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("max_age = 7")
    other = os.geteuid() + 1
    if os.geteuid() == 0:
        os.chown(path, other, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: other)
    assert "belongs to another user" in _config_file.read(os.environ).ignored


def test_what_is_no_plain_file_is_refused_without_waiting(write: Write) -> None:
    path = write("")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="not a plain file"):
        EnvironmentSettings.from_environment()


# -- forebay config ----------------------------------------------------------------------------------------------------


def settings_of(run: Run, *arguments: str) -> dict[str, tuple[str, str, str, list[str]]]:  # noqa: F811
    found = run("config", "--json", *arguments).json["settings"]
    return {one["name"]: (one["value"], one["source"], one["where"], one["unused"]) for one in found}


def test_config_tells_each_setting_and_its_source(run: Run, home: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    path = str(write('max_age = "12h"\nstreams = 3\nbudget = "90MB"\n'))
    monkeypatch.setenv("FOREBAY_MAX_AGE", "5")
    found = settings_of(run)
    assert not home.exists()
    assert found["home"] == (str(home), "variable", "FOREBAY_HOME", [])
    assert found["max_age"] == ("5", "variable", "FOREBAY_MAX_AGE", [f"12h (file {path})"])
    assert found["streams"] == ("3", "file", path, [])
    assert found["budget"] == ("90MB", "file", path, [])
    assert found["attempts"] == ("5", "default", "", [])
    assert set(found) == {name.lower() for name in _config.KNOWN} | {"max_entries"}
    with Cache(home, budget="70MB", max_rate="1GB"):
        pass
    found = settings_of(run)
    assert found["budget"] == ("70 MB", "cache", str(home), [f"90MB (file {path})"])
    assert found["max_rate"] == ("1 GB/s", "cache", str(home), [])
    other = settings_of(run, "--root", str(home.with_name("other")))
    assert other["home"] == (str(home.with_name("other")), "argument", "--root", [f"{home} (variable FOREBAY_HOME)"])
    text = run("-v", "config").out
    assert "variable FOREBAY_MAX_AGE" in text
    assert "argument -v" in text


def test_config_lists_all_that_is_wrong_and_shows_the_rest(
    run: Run, home: Path, write: Write, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    path = write("max_age = 'old'\nstreams = 3\n")
    monkeypatch.setenv("FOREBAY_ATTEMPTS", "0")
    ran = run("config")
    assert ran.code == 1
    assert [line.startswith("error: ") for line in ran.err.splitlines()] == [True, False, True, False]
    assert f"{path}: max_age='old'" in ran.err
    assert "FOREBAY_ATTEMPTS is '0'" in ran.err
    assert "streams" in ran.out
    path.write_text("budget = [")
    ran = run("config")
    assert (ran.code, "is not valid TOML" in ran.err, "(invalid)" in ran.out, "Traceback" in ran.err) == (1, True, True, False)
    ran = run("ls")
    assert (ran.code, len(ran.err.splitlines()), "`forebay config`" in ran.err) == (2, 2, True)
