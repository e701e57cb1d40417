"""No key, and no answer of a server, can forge a line of a log or move a terminal's cursor."""

from __future__ import annotations

import ast
import logging
from pathlib import Path
from urllib.parse import quote

import pytest

import forebay
from forebay import _logs
from forebay.testing import ScriptedServer

PACKAGE = Path(forebay.__file__).parent
EVIL = "a\n2026-11-22 ERROR forged\r\x1b[2J\x9b\u2028\u202e\ud800b"


class Handler(logging.Handler):
    """Of a user: he may hang it anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.mark.parametrize("where", ["", "forebay", "forebay.some", "forebay.some.room"])
def test_a_message_is_one_line_wherever_its_handler_hangs(where: str) -> None:
    handler, place = Handler(), logging.getLogger(where)
    place.addHandler(handler)
    try:
        _logs.logger("forebay.some.room").warning("%s is damaged, of %d", EVIL, 3)
        _logs.logger("forebay.some.room").warning(EVIL)
        _logs.logger("forebay.some.room").warning("%s is damaged, of %d", "a é b", 3)
    finally:
        place.removeHandler(handler)
    first, second, plain = handler.records
    assert first.getMessage() == r"a\n2026-11-22 ERROR forged\r\x1b[2J\x9b\u2028\u202e\ud800b is damaged, of 3"
    assert second.getMessage().isprintable()
    assert (plain.msg, plain.args) == ("%s is damaged, of %d", ("a é b", 3))


def test_arguments_that_do_not_fit_are_left_to_the_handler() -> None:
    record = logging.LogRecord("forebay.some.room", logging.WARNING, __file__, 1, "%d", ("x",), None)
    assert _logs.logger("forebay.some.room").filter(record)
    assert (record.msg, record.args) == ("%d", ("x",))


def test_the_text_of_an_error_makes_no_line_of_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        try:
            raise KeyError from ValueError(EVIL)
        except KeyError as error:
            error.add_note(EVIL)
            group = ExceptionGroup(EVIL, [error, OSError(EVIL)])
        raise group

    try:
        fail()
    except ExceptionGroup:
        _logs.logger("forebay.some.room").exception("it failed")
    (record,) = caplog.records
    text = logging.Formatter().format(record)
    lines = text.split("\n")
    assert all(line.isprintable() for line in lines)
    assert not [line for line in lines if "forged" in line and r"a\n2026-11-22 ERROR forged\r" not in line]
    assert len([line for line in lines if "forged" in line]) >= 4
    assert "    raise KeyError from ValueError(EVIL)" in text


def test_a_record_without_an_error_has_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    _logs.logger("forebay.some.room").warning("told", exc_info=True)
    assert caplog.records[0].exc_text is None or "NoneType" in caplog.records[0].exc_text


def calls_of_logging(path: Path) -> list[str]:
    source = path.read_text()
    if "getLogger" not in source and "getChild" not in source:
        return []
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return [ast.unparse(call) for call in calls if call.func.attr in ("getLogger", "getChild")]  # type: ignore[attr-defined]


def test_every_room_takes_its_logger_from_one_place() -> None:
    found = {path.relative_to(PACKAGE).as_posix(): calls_of_logging(path) for path in PACKAGE.rglob("*.py")}
    assert {name: calls for name, calls in found.items() if calls} == {
        "_logs.py": ["logging.getLogger(self._name)"],
        "cli/main.py": ["logging.getLogger('forebay')"],  # its level and its handler
    }


@pytest.mark.parametrize("name", ["a\n.bin", "a\x1b[2J.bin", "\u202e.bin"])
def test_a_key_with_control_characters(cache: forebay.Cache, server: ScriptedServer, caplog: pytest.LogCaptureFixture, name: str) -> None:
    caplog.set_level(logging.DEBUG)
    assert not cache.space("shelf", quota=100).put(name, bytes(200_000))
    server.put("/" + quote(name), b"x", statuses=[503])
    assert cache.read(f"{server.url}/{name}") == b"x"
    assert caplog.records
    assert all(record.getMessage().isprintable() for record in caplog.records if record.name.startswith("forebay"))
