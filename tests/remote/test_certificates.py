"""Whom TLS connections trust, and which certificate they show: of every door that makes them, with nginx at the other end."""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import forebay
from forebay import errors
from forebay._model import Span
from forebay.remote import Realm, RemoteOptions
from forebay.remote.http import HttpRemote
from forebay.remote.hub import HubRemote
from forebay.remote.s3 import S3Remote
from forebay.testing import ScriptedServer
from tests.servers.nginx import Nginx
from tests.servers.nginx import nginx as running
from tests.servers.tls import both as both

BODY = b"thirteen bytes"
MISSING = r"the server asks for a client certificate: name one with RemoteOptions\(client_cert="
ONCE = RemoteOptions(attempts=1, backoff=0.01)


@pytest.fixture(autouse=True)
def no_trust(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "AWS_CA_BUNDLE", "AWS_PROFILE", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "somewhere-1")


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    with running(tmp_path_factory.mktemp("nginx") / "tls", tls=True) as found:
        yield put(found)


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    with running(tmp_path_factory.mktemp("nginx") / "strict", tls=True, verify="on") as found:
        yield put(found)


@pytest.fixture(scope="module")
def curious(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    with running(tmp_path_factory.mktemp("nginx") / "curious", tls=True, verify="optional") as found:
        yield put(found)


def put(nginx: Nginx) -> Nginx:
    (nginx.files / "bucket").mkdir()
    nginx.put("bucket/a", BODY)
    return nginx


def trusting(nginx: Nginx, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(nginx.ca))


def own(nginx: Nginx, **more: object) -> RemoteOptions:
    assert nginx.ca is not None
    return RemoteOptions(client_cert=nginx.ca, client_key=nginx.ca.with_name("key.pem"), **more)  # type: ignore[arg-type]


def s3(nginx: Nginx, options: RemoteOptions = ONCE) -> bytes:
    return S3Remote(options, nginx.url).read("s3://bucket/a", Span(0, 100))


def http(nginx: Nginx, options: RemoteOptions = ONCE) -> bytes:
    return HttpRemote(options).read(f"{nginx.url}/bucket/a", Span(0, 100))


# -- whom to trust ---------------------------------------------------------------------------------------------------------


def test_s3_trusts_whom_aws_does(tls: Nginx, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("botocore")
    with pytest.raises(errors.RemoteUnavailable, match=r"in AWS_CA_BUNDLE, ca_bundle of the AWS profile, REQ.*SSL_CERT_FILE"):
        s3(tls)
    (tmp_path / "config").write_text(f"[default]\nca_bundle = {tls.ca}\n[profile other]\nregion = a\n")
    assert s3(tls) == BODY
    with pytest.raises(errors.RemoteUnavailable, match="not trusted"):  # those settings are not for other URLs
        http(tls)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "none"))
    assert s3(tls) == BODY
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "none"))
    with pytest.raises(errors.RemoteUnavailable, match=r"cannot be read.*trusted are those of AWS_CA_BUNDLE or ca_bundle=.*none"):
        s3(tls)
    monkeypatch.delenv("AWS_CA_BUNDLE")
    monkeypatch.setenv("AWS_PROFILE", "other")
    with pytest.raises(errors.RemoteUnavailable, match="those of REQUESTS_CA_BUNDLE="):
        s3(tls)


def test_a_directory_of_certificates(tls: Nginx, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With its certificates under their hashes, as `openssl rehash` names them, and requests expects them."""
    assert tls.ca is not None
    (tmp_path / "trusted").mkdir()
    shutil.copy(tls.ca, tmp_path / "trusted" / "it.pem")
    done = subprocess.run(["openssl", "x509", "-hash", "-noout", "-in", tls.ca], check=True, capture_output=True, text=True)
    (tmp_path / "trusted" / f"{done.stdout.strip()}.0").symlink_to("it.pem")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "trusted"))
    assert http(tls) == BODY


def test_the_first_setting_that_is_set_counts(tls: Nginx, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ["REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"]
    for name in reversed(names):
        for other in names[names.index(name) + 1 :]:
            monkeypatch.setenv(other, str(tmp_path / "none"))
        monkeypatch.setenv(name, str(tls.ca))
        assert http(tls) == BODY


def test_a_proxy_that_speaks_tls_is_trusted_likewise(both: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    both.put("/a", BODY)
    monkeypatch.setenv("http_proxy", both.url.replace("http:", "https:"))
    assert HttpRemote(ONCE).read("http://far.example/a", Span(0, 100)) == BODY
    assert both.requests[-1].path == "http://far.example/a"


# -- client certificates ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [http, s3])
def test_a_server_that_wants_one(strict: Nginx, monkeypatch: pytest.MonkeyPatch, read: Callable[..., bytes]) -> None:
    trusting(strict, monkeypatch)
    assert read(strict, own(strict, attempts=1)) == BODY
    with pytest.raises(errors.AccessDenied, match=MISSING):
        read(strict)


def test_a_server_that_says_so_by_http_does_not_accept_any(strict: Nginx, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As nginx does, after the handshake."""
    trusting(strict, monkeypatch)
    another = certificate_of("another", tmp_path)
    with pytest.raises(errors.AccessDenied, match=f"the server does not accept the client certificate in {another}"):
        http(strict, RemoteOptions(client_cert=another))


def certificate_of(name: str, folder: Path) -> Path:
    """A new certificate, with its key in the same file."""
    key, file = folder / "new.key", folder / f"{name}.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    subprocess.run([*make, "-keyout", key, "-out", file], check=True, capture_output=True)
    file.write_text(key.read_text() + file.read_text())
    return file


def test_the_hub_gets_one(strict: Nginx, monkeypatch: pytest.MonkeyPatch) -> None:
    trusting(strict, monkeypatch)
    for options, error in ((own(strict, attempts=1), errors.NotFound), (ONCE, errors.AccessDenied)):
        with pytest.raises(error, match="404" if error is errors.NotFound else MISSING):
            HubRemote(options, strict.url).stat("hf://owner/name/config.json")


def test_in_one_file_with_its_key_from_a_variable(strict: Nginx, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert strict.ca is not None
    (tmp_path / "both.pem").write_text(strict.ca.read_text() + strict.ca.with_name("key.pem").read_text())
    trusting(strict, monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FOREBAY_CLIENT_CERT", "~/both.pem")
    assert http(strict, RemoteOptions.from_environment()) == BODY
    with forebay.Cache(tmp_path / "root", budget="100MB") as cache:
        assert bytes(cache.read(f"{strict.url}/bucket/a")) == BODY
    monkeypatch.delenv("FOREBAY_CLIENT_CERT")
    monkeypatch.setenv("FOREBAY_CLIENT_KEY", "~/both.pem")
    with pytest.raises(errors.ConfigError, match="client_key is of no use without client_cert"):
        RemoteOptions.from_environment()


def test_connections_with_and_without_one_are_not_mixed(curious: Nginx, monkeypatch: pytest.MonkeyPatch) -> None:
    trusting(curious, monkeypatch)
    mine, nobody = HttpRemote(own(curious)), HttpRemote()
    for _ in range(3):
        assert mine.read(f"{curious.url}/who", Span(0, 100)) == b"CN=127.0.0.1"
        assert nobody.read(f"{curious.url}/who", Span(0, 100)) == b""


def test_after_a_redirect_to_another_port_none_is_shown(
    curious: Nginx, strict: Nginx, both: ScriptedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`both` has a certificate of its own."""
    trusted = tmp_path / "trusted.pem"
    assert curious.ca is not None
    assert strict.ca is not None
    trusted.write_text(curious.ca.read_text() + strict.ca.read_text() + Path(os.environ["REQUESTS_CA_BUNDLE"]).read_text())
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(trusted))
    url = both.put("/a", b"", redirect=f"{curious.url}/who").replace("http:", "https:")
    assert HttpRemote(own(curious, attempts=1)).read(url, Span(0, 100)) == b""
    both.put("/a", b"", redirect=f"{strict.url}/bucket/a")
    with pytest.raises(errors.AccessDenied, match="client certificate: none is shown after a redirect to another server"):
        HttpRemote(own(strict, attempts=1)).read(url, Span(0, 100))


def tls_server(certificate: Path, version: ssl.TLSVersion, *, cut: bool = False) -> tuple[str, threading.Thread, socket.socket]:
    """A server that asks for a certificate. With TLS 1.3, it says so after the handshake; ``cut``: it never does."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    context.load_verify_locations(certificate)
    context.verify_mode = ssl.CERT_OPTIONAL if cut else ssl.CERT_REQUIRED
    context.minimum_version = context.maximum_version = version
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection = listener.accept()[0]
            except OSError:
                return
            with connection:
                connection.settimeout(60)
                try:
                    with context.wrap_socket(connection, server_side=True) as secure:
                        while cut and b"\r\n\r\n" not in secure.recv(1 << 16):
                            continue
                        if not cut:
                            secure.recv(1 << 16)
                            secure.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 14\r\nConnection: close\r\n\r\n" + BODY)
                except OSError:
                    continue

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return f"https://127.0.0.1:{listener.getsockname()[1]}/a", thread, listener


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_what_is_missing_is_told(tls: Nginx, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: ssl.TLSVersion) -> None:
    assert tls.ca is not None
    trusting(tls, monkeypatch)
    url, thread, listener = tls_server(tls.ca, version)
    another = certificate_of("another", tmp_path)
    options = RemoteOptions(attempts=3, backoff=0.01)
    with pytest.raises(errors.RemoteError, match=MISSING):
        HttpRemote(options).read(url, Span(0, 100))
    with pytest.raises(errors.RemoteError, match=rf"not accept the client certificate in {another}"):
        HttpRemote(RemoteOptions(attempts=3, backoff=0.01, client_cert=another)).read(url, Span(0, 100))
    assert HttpRemote(own(tls, attempts=1)).read(url, Span(0, 100)) == BODY
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(60)


def test_a_cut_by_a_server_that_may_be_shown_one_is_retried(tls: Nginx, monkeypatch: pytest.MonkeyPatch) -> None:
    """It need not be the reason."""
    assert tls.ca is not None
    trusting(tls, monkeypatch)
    url, thread, listener = tls_server(tls.ca, ssl.TLSVersion.TLSv1_3, cut=True)
    with pytest.raises(errors.RemoteUnavailable, match=f"the connection was cut, and {MISSING}.* after 3 attempts"):
        HttpRemote(RemoteOptions(attempts=3, backoff=0.01)).read(url, Span(0, 100))
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(60)


def test_one_that_cannot_be_used(strict: Nginx, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also one whose key has a password: nobody is asked for it on the terminal."""
    assert strict.ca is not None
    trusting(strict, monkeypatch)
    key = strict.ca.with_name("key.pem")
    locked, wrong = tmp_path / "locked.pem", tmp_path / "wrong.pem"
    subprocess.run(["openssl", "rsa", "-aes128", "-passout", "pass:pass", "-in", key, "-out", locked], check=True, capture_output=True)
    subprocess.run(["openssl", "genrsa", "-out", wrong, "2048"], check=True, capture_output=True)
    for options in (
        {"client_key": locked},
        {"client_key": wrong},
        {"client_key": tmp_path / "none"},
        {},
        {"client_cert": tmp_path / "none"},
    ):
        given = {"client_cert": strict.ca, **options}
        with pytest.raises(errors.RemoteUnavailable, match=r"the client certificate in .* cannot be used.*after 1 attempt"):
            http(strict, RemoteOptions(**given))  # type: ignore[arg-type]


def test_its_content_is_part_of_the_key(tmp_path: Path) -> None:
    one, other, copy = (tmp_path / name for name in ("one", "other", "copy"))
    one.write_text("a")
    copy.write_text("a")
    other.write_text("b")

    def key(**options: object) -> str:
        realm = Realm(RemoteOptions(**options))  # type: ignore[arg-type]
        assert realm.is_usual == ("client_cert" not in options or options.get("partition") == "")
        return realm("https") + realm("s3") + realm("hf") + realm("gs")

    assert len({key(), key(client_cert=one), key(client_cert=other), key(client_cert=one, token="t") and "token"}) == 4
    assert key(client_cert=one) == key(client_cert=str(copy))
    assert key(client_cert=one, partition="") == key(client_cert=tmp_path / "none", partition="") == key()
    assert Realm(RemoteOptions(client_cert=one))("gs") == ""
    with pytest.raises(errors.ConfigError, match=r"client_cert=.*none.* cannot be read: No such file"):
        key(client_cert=tmp_path / "none")


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = RemoteOptions(client_cert="a.pem", client_key=Path("b.pem"))
    assert (options.client_cert, options.client_key) == (str(tmp_path / "a.pem"), str(tmp_path / "b.pem"))
    assert pickle.loads(pickle.dumps(options)) == options
    assert hash(pickle.loads(pickle.dumps(options))) == hash(options)
    for wrong in ("", 5, b"a", "a\0"):
        with pytest.raises(errors.ConfigError, match=r"client_cert is .*: it must be the path of a file"):
            RemoteOptions(client_cert=wrong)  # type: ignore[arg-type]
