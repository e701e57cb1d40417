"""``hf://``: revisions, files here and on another host, tokens, listings and refusals, against a hub that the real client reads too."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay.remote
from forebay import Cache, errors
from forebay._model import BufferSink, ObjectInfo, Partial, Remote, Span
from forebay.remote import resolve
from forebay.remote.base import RemoteOptions, tracking_hosts
from forebay.remote.hub import HubRemote
from forebay.remote.hub.names import HubName, token_from
from forebay.testing import ScriptedServer
from tests.servers.hub import LARGE, Hub, hub, oid

SMALL = b'{"hidden_size": 8}'
WEIGHTS = random.Random("weights").randbytes(3 * LARGE)
FILES = {"config.json": SMALL, "weights.bin": WEIGHTS, "data/a b#1.txt": b"a", "data/empty": b"", "database": b"b"}
MODEL = "me/model"
URL = f"hf://{MODEL}"


@pytest.fixture(scope="module")
def shared_hub() -> Iterator[Hub]:
    with hub() as running:
        yield running


@pytest.fixture
def there(shared_hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """The hub with one model, for a user who is not logged in."""
    fresh = Hub(shared_hub.url, shared_hub.cdn)
    shared_hub.__dict__.update(fresh.__dict__)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_IMPLICIT_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
    monkeypatch.setenv("HF_ENDPOINT", shared_hub.url)
    monkeypatch.setattr(forebay.remote, "_remotes", {})
    shared_hub.commit(MODEL, FILES)
    return shared_hub


def body_of(url: str, remote: Remote | None = None) -> bytes:
    sink = BufferSink()
    (remote or HubRemote()).fetch(url, sink)
    return bytes(sink.data)


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("hf://me/model/a/b.txt", ("", "me/model", "main", "a/b.txt")),
        ("hf://models/me/model/a", ("", "me/model", "main", "a")),
        ("hf://datasets/me/data@v1/a", ("datasets", "me/data", "v1", "a")),
        ("hf://spaces/me/space", ("spaces", "me/space", "main", "")),
        ("hf://gpt2@main/config.json", ("", "gpt2", "main", "config.json")),
        ("hf://me/model@feature%2Fa/x@y", ("", "me/model", "feature/a", "x@y")),
        ("hf://me/model@refs/pr/7/a", ("", "me/model", "refs/pr/7", "a")),
        ("hf://datasets/me/data@refs/convert/parquet", ("datasets", "me/data", "refs/convert/parquet", "")),
        ("hf://me/model/a@b.txt", ("", "me/model", "main", "a@b.txt")),
    ],
)
def test_a_url_names_a_repository_a_revision_and_a_path(url: str, name: tuple[str, ...]) -> None:
    assert tuple(HubName.of(url)) == name
    assert HubName.of(HubName.of(url).url) == HubName.of(url)


@pytest.mark.parametrize("url", ["hf://", "hf://me", "hf://datasets/me", "hf:///model/a", "hf://me/model@/a"])
def test_a_url_without_a_repository_is_refused(url: str) -> None:
    with pytest.raises(errors.ConfigError, match="names no repository"):
        HubName.of(url)


def test_a_url_without_a_path_is_no_file(there: Hub) -> None:
    with pytest.raises(errors.ConfigError, match="names no file"):
        HubRemote().stat(URL)


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_a_file_arrives_with_the_hubs_own_description(there: Hub, name: str) -> None:
    remote, url, body = HubRemote(), f"{URL}/{name}", FILES[name]
    info = remote.stat(url)
    assert info is not None
    assert (info.url, info.size, info.strong, info.sha256 is not None) == (url, len(body), True, len(body) >= LARGE)
    assert info.validator == f'"{info.sha256 or oid(body)}"'
    assert body_of(url, remote) == body
    assert remote.read(url, Span(3, 5), info=info) == body[3:8]
    assert {info.url: info for info in remote.list(f"{URL}/")}[url] == info


def test_a_large_file_is_fetched_in_parts_from_where_the_first_redirect_led(there: Hub) -> None:
    remote = HubRemote(RemoteOptions(part=LARGE // 2))
    assert body_of(f"{URL}/weights.bin", remote) == WEIGHTS
    assert len(there.requests("cdn", "GET")) == 6
    assert [path for path in there.requests("hub", "GET") if "/resolve/" in path] == [f"/{MODEL}/resolve/{head(there)}/weights.bin"]


def head(there: Hub, page: str = MODEL) -> str:
    return there.repositories[page].refs["main"]


def test_a_branch_is_resolved_once_for_many_files(there: Hub) -> None:
    remote = HubRemote()
    for name in FILES:
        assert body_of(f"{URL}/{name}", remote) == FILES[name]
    assert [path for path in there.requests() if path.startswith("/api/")] == [f"/api/models/{MODEL}/revision/main"]


def test_threads_that_need_one_revision_ask_for_it_once(there: Hub) -> None:
    remote, bodies = HubRemote(), list[bytes]()
    threads = [threading.Thread(target=lambda: bodies.append(body_of(f"{URL}/config.json", remote))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bodies == [SMALL] * 6
    assert len([path for path in there.requests() if "/revision/" in path]) == 1


def test_a_listing_describes_its_files_so_that_none_is_asked_about(there: Hub) -> None:
    remote = HubRemote()
    assert [info.url for info in remote.list(f"{URL}/")] == [f"{URL}/{name}" for name in sorted(FILES)]
    assert body_of(f"{URL}/weights.bin", remote) == WEIGHTS
    assert there.requests(method="HEAD") == []


def test_a_file_of_a_commit_is_never_asked_about_again(there: Hub) -> None:
    url, remote = f"{URL}@{head(there)}/config.json", HubRemote()
    info = remote.stat(url)
    before = len(there.asked)
    assert info is not None
    assert remote.stat(url, known=info.validator) is None
    assert len(there.asked) == before


def test_a_branch_that_moved_is_seen_by_a_call_that_wants_no_old_answer(there: Hub) -> None:
    remote, url = HubRemote(), f"{URL}/config.json"
    assert body_of(url, remote) == SMALL
    there.commit(MODEL, {"config.json": b"new"})
    assert body_of(url, remote) == SMALL
    with tracking_hosts(None, max_age=0.0):
        assert body_of(url, remote) == b"new"


def test_a_read_of_a_file_that_another_commit_replaced_raises(there: Hub) -> None:
    remote, url = HubRemote(), f"{URL}/config.json"
    info = remote.stat(url)
    there.commit(MODEL, {"config.json": b"new"})
    with tracking_hosts(None, max_age=0.0), pytest.raises(errors.RemoteChanged):
        remote.read(url, Span(0, 2), info=info)


def test_the_part_that_an_earlier_fetch_left_is_resumed(there: Hub) -> None:
    remote, url = HubRemote(), f"{URL}/weights.bin"
    info = remote.stat(url)
    assert info is not None
    assert info.validator is not None

    class Resumed(BufferSink):
        def begin(self, info: ObjectInfo) -> tuple[Span, ...]:
            super().begin(info)
            return (Span(LARGE, 2 * LARGE),)

    sink = Resumed()
    sink.partial = Partial(len(WEIGHTS), info.validator, (Span(LARGE, 2 * LARGE),))
    transfer = remote.fetch(url, sink)
    assert bytes(sink.data[LARGE:]) == WEIGHTS[LARGE:]
    assert (transfer.received, transfer.resumed) == (2 * LARGE, LARGE)


def test_a_dataset_and_one_of_the_first_models_are_read_too(there: Hub) -> None:
    there.commit("datasets/me/data", {"train.txt": b"rows"}, branch="feature/a")
    there.commit("gpt2", {"config.json": b"{}"})
    assert body_of("hf://datasets/me/data@feature%2Fa/train.txt") == b"rows"
    assert body_of("hf://gpt2@main/config.json") == b"{}"


def test_a_renamed_repository_is_followed_with_the_token(there: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    there.repositories[MODEL].needs = "hf_mine"
    there.moved["old/name"] = MODEL
    assert body_of("hf://old/name/weights.bin") == WEIGHTS
    assert [info.url for info in HubRemote().list("hf://old/name/data")] == [f"hf://old/name/{n}" for n in sorted(FILES) if n[:4] == "data"]


# -- tokens ------------------------------------------------------------------------------------------------------------


def by_option(monkeypatch: pytest.MonkeyPatch, home: Path) -> RemoteOptions:
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    return RemoteOptions(token="hf_mine")


def by_variable(monkeypatch: pytest.MonkeyPatch, home: Path) -> RemoteOptions:
    monkeypatch.setenv("HF_TOKEN", " hf_mine\n")
    return RemoteOptions()


def by_path(monkeypatch: pytest.MonkeyPatch, home: Path) -> RemoteOptions:
    (home / "elsewhere").write_text("hf_mine\n")
    monkeypatch.setenv("HF_TOKEN_PATH", str(home / "elsewhere"))
    return RemoteOptions()


def by_home(monkeypatch: pytest.MonkeyPatch, home: Path) -> RemoteOptions:
    (home / "token").write_text("hf_mine")
    return RemoteOptions()


@pytest.mark.parametrize("login", [by_option, by_variable, by_path, by_home])
def test_the_token_goes_to_the_hub_and_to_no_other_host(
    there: Hub, login: Callable[[pytest.MonkeyPatch, Path], RemoteOptions], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    there.repositories[MODEL].needs = "hf_mine"
    (tmp_path / "hf-home").mkdir()
    remote = HubRemote(login(monkeypatch, tmp_path / "hf-home"))
    assert body_of(f"{URL}/weights.bin", remote) == WEIGHTS
    assert {(a.host, a.token) for a in there.asked} == {("hub", "hf_mine"), ("cdn", "")}


def test_headers_of_the_user_go_to_the_hub_and_to_no_other_host(there: Hub) -> None:
    there.repositories[MODEL].needs = "hf_mine"
    remote = HubRemote(RemoteOptions(headers={"authorization": "Bearer hf_mine"}, part=LARGE))
    assert body_of(f"{URL}/weights.bin", remote) == WEIGHTS
    assert {(a.host, a.token) for a in there.asked} == {("hub", "hf_mine"), ("cdn", "")}
    assert len(there.requests("cdn")) == 3


def test_anonymous_calls_send_no_token(there: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    assert body_of(f"{URL}/config.json", HubRemote(RemoteOptions(anonymous=True))) == SMALL
    assert {a.token for a in there.asked} == {""}


def test_a_user_who_wants_no_implicit_token_sends_none() -> None:
    assert token_from({"HF_TOKEN": "hf_mine"}) == "hf_mine"
    assert token_from({"HF_TOKEN": "hf_mine", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}) is None


# -- listings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [1, 2, 1000])
def test_all_pages_of_a_listing_are_read_and_put_in_order(there: Hub, page: int) -> None:
    there.page = page
    assert [info.url for info in HubRemote().list(f"{URL}/")] == [f"{URL}/{name}" for name in sorted(FILES)]


def test_a_listing_continues_on_the_same_host_only(there: Hub, server: ScriptedServer) -> None:
    """A hub that names another host would have it get the headers of the user."""
    there.page, there.next_on = 2, server.url
    with pytest.raises(errors.RemoteProtocolError, match="its listing continues on another host"):
        list(HubRemote(RemoteOptions(headers={"Cookie": "mine"})).list(f"{URL}/"))
    assert server.requests == []


@pytest.mark.parametrize(
    ("prefix", "names"), [("data", [n for n in sorted(FILES) if n[:4] == "data"]), ("data/", ["data/a b#1.txt", "data/empty"])]
)
def test_a_listing_has_what_begins_with_the_url(there: Hub, prefix: str, names: list[str]) -> None:
    assert [info.url for info in HubRemote().list(f"{URL}@main/{prefix}")] == [f"{URL}@main/{name}" for name in names]


def test_a_folder_that_is_not_there_has_no_files(there: Hub) -> None:
    assert list(HubRemote().list(f"{URL}/none/")) == []


# -- refusals ----------------------------------------------------------------------------------------------------------


def gate(there: Hub) -> str:
    there.repositories[MODEL].gated, there.repositories[MODEL].needs = True, "hf_mine"
    return f"{URL}/config.json"


def hide(there: Hub) -> str:
    there.repositories[MODEL].needs = "hf_mine"
    return f"{URL}/config.json"


REFUSALS: list[Any] = [
    (
        gate,
        "",
        errors.AccessDenied,
        "is gated, and nobody has access: accept the terms at {hub}/me/model, then log in with `hf auth login`",
    ),
    (gate, "hf_other", errors.AccessDenied, "is gated, and the user of this token has access"),
    (hide, "", errors.NotFound, "the hub has no model me/model, or it is private: log in"),
    (hide, "hf_wrong", errors.AccessDenied, "the hub does not know this token: log in"),
    (lambda there: f"{URL}@v9/config.json", "", errors.NotFound, "the model me/model has no revision 'v9': see {hub}/me/model/tree/main"),
    (lambda there: f"{URL}/none.txt", "", errors.NotFound, "the model me/model has no such file"),
    (lambda there: "hf://datasets/me/none/a", "", errors.NotFound, "the hub has no dataset me/none, or it is private"),
]


@pytest.mark.parametrize(("ask", "token", "error", "message"), REFUSALS)
def test_a_refusal_says_what_to_do(
    there: Hub, ask: Callable[[Hub], str], token: str, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there.commit("you/other", {})
    there.repositories["you/other"].needs = "hf_other"
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(error) as raised:
        HubRemote().stat(ask(there))
    text = str(raised.value)
    assert message.format(hub=there.url) in text
    assert not token or token not in text


def test_a_hub_that_answers_for_another_commit_is_not_believed(there: Hub) -> None:
    there.liar = True
    with pytest.raises(errors.RemoteProtocolError, match="the hub answers for commit '000"):
        HubRemote().stat(f"{URL}/config.json")


def test_what_is_no_hub_is_named(there: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", there.cdn)
    there.repositories[MODEL].refs["main"] = "none"
    with pytest.raises(errors.RemoteError, match="403"):
        HubRemote().stat(f"{URL}/config.json")


# -- through the cache -------------------------------------------------------------------------------------------------


def test_a_file_is_served_from_the_cache_offline(there: Hub, cache: Cache) -> None:
    assert cache.read(f"{URL}/weights.bin") == WEIGHTS
    assert cache.read_many([f"{URL}/{name}" for name in FILES]) == list(FILES.values())
    count = len(there.asked)
    with Cache(cache.path, offline=True) as offline:
        assert offline.read(f"{URL}/weights.bin") == WEIGHTS
    assert len(there.asked) == count


def test_a_refresh_sees_the_next_commit_at_once(there: Hub, cache: Cache) -> None:
    assert cache.read(f"{URL}/config.json") == SMALL
    there.commit(MODEL, {"config.json": b"new"})
    assert cache.read(f"{URL}/config.json") == SMALL
    assert cache.read(f"{URL}/config.json", refresh=True) == b"new"


def test_a_file_of_a_commit_is_fetched_once_whatever_its_age(there: Hub, cache: Cache) -> None:
    url = f"{URL}@{head(there)}/config.json"
    assert cache.read(url) == SMALL
    count = len(there.asked)
    assert cache.read(url, max_age=0) == SMALL
    assert cache.read(url, refresh=True) == SMALL
    assert len(there.asked) == count


@pytest.mark.parametrize("stores", [True, False])
def test_bytes_that_are_not_those_of_the_listing_are_refused(there: Hub, cache: Cache, stores: bool) -> None:
    there.damage = True
    with pytest.raises(errors.ChecksumMismatch, match="sha256"):
        cache.read(f"{URL}/weights.bin", bypass=not stores)
    assert cache.entry(f"{URL}/weights.bin") is None
    there.damage = False
    assert cache.read(f"{URL}/weights.bin") == WEIGHTS


def test_a_directory_is_fetched_with_one_listing_and_one_request_for_each_small_file(there: Hub, cache: Cache) -> None:
    with cache.directory(f"{URL}@main") as path:
        assert {str(p.relative_to(path)): p.read_bytes() for p in Path(path).rglob("*") if p.is_file()} == FILES
    hub_side = there.requests("hub")
    assert [p for p in hub_side if p.startswith("/api/")] == [
        f"/api/models/{MODEL}/revision/main",
        f"/api/models/{MODEL}/tree/{head(there)}",
    ]
    assert len(hub_side) == 2 + len(FILES) + 1  # an empty file is asked for twice: a range of it does not exist
    assert len(there.requests("cdn")) == 1


def test_a_new_commit_fetches_only_what_it_changed(there: Hub, cache: Cache) -> None:
    with cache.directory(f"{URL}@main"):
        there.commit(MODEL, FILES | {"config.json": b"new"})
        before = there.sent
    with cache.directory(f"{URL}@main", refresh=True) as path:
        assert Path(path, "config.json").read_bytes() == b"new"
    assert there.sent - before == len(b"new")


def test_blocks_of_a_large_file_are_fetched_alone(there: Hub, cache: Cache) -> None:
    body = random.Random("big").randbytes(400_000)
    there.commit(MODEL, {"big.bin": body})
    with cache.open(f"{URL}/big.bin", block_size="64KB") as file:
        file.seek(200_000)
        assert file.read(100) == body[200_000:200_100]
    assert there.sent <= 2 * 64 << 10


def test_a_forked_child_reads_the_hub_too(there: Hub) -> None:
    remote = resolve(URL)
    assert body_of(f"{URL}/config.json", remote) == SMALL
    pid = os.fork()
    if pid == 0:
        os._exit(0 if body_of(f"{URL}/weights.bin", remote) == WEIGHTS else 1)
    assert os.waitpid(pid, 0)[1] == 0


# -- the server itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [2, 1000])
def test_the_real_client_downloads_a_snapshot_from_this_hub(there: Hub, page: int, tmp_path: Path) -> None:
    client = pytest.importorskip("huggingface_hub")
    there.page, there.repositories[MODEL].needs = page, "hf_mine"
    path = client.snapshot_download(MODEL, endpoint=there.url, token="hf_mine", cache_dir=tmp_path / "hub", etag_timeout=20)
    assert {str(p.relative_to(path)): p.read_bytes() for p in Path(path).rglob("*") if p.is_file()} == FILES
    names = [item.path for item in client.HfApi(endpoint=there.url, token="hf_mine").list_repo_tree(MODEL, recursive=True)]
    assert sorted(name for name in names if name in FILES) == sorted(FILES)


def test_the_real_client_understands_the_refusals_of_this_hub(there: Hub) -> None:
    client = pytest.importorskip("huggingface_hub")
    api = client.HfApi(endpoint=there.url, token=False)
    for call, error in (
        (lambda: api.model_info("me/none"), client.errors.RepositoryNotFoundError),
        (lambda: api.model_info(MODEL, revision="v9"), client.errors.RevisionNotFoundError),
        (lambda: client.get_hf_file_metadata(f"{there.url}/{MODEL}/resolve/main/none"), client.errors.EntryNotFoundError),
    ):
        with pytest.raises(error):
            call()
    gate(there)
    with pytest.raises(client.errors.GatedRepoError):
        client.get_hf_file_metadata(f"{there.url}/{MODEL}/resolve/main/config.json", token=False)
