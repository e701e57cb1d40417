"""What a claim tells of itself: whole, or nothing; and no secrets."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay import errors
from forebay.claims import records
from forebay.claims.processes import masked, own, shortened
from forebay.claims.records import ClaimedStream, ExternalFiles, Record, load

RECORD = Record(
    3, "train", "job=", "0", 1000, "node", 17, 4026531836, 99, 4026531840, 1.5, "python train.py",
    (ClaimedStream(records.canonical("/local/train"), "s3://bucket/train", True), ClaimedStream(records.canonical("/local/eval"), None)),
    {"rank": 0}, ExternalFiles(("/dev/shm/a",), "/dev/shm/b"),
)  # fmt: skip


def test_what_is_kept_comes_back() -> None:
    assert load(RECORD.dump()) == RECORD


def test_a_record_without_directories() -> None:
    bare = RECORD._replace(streams=(), world=None, beside=None)
    assert load(bare.dump()) == bare


def text_of(record: Record) -> dict[str, Any]:
    data = record.dump()
    found: dict[str, Any] = json.loads(data[data.index(b"{") :])
    return found


def with_text(text: Any) -> bytes:
    return records._HEAD.pack(records._MAGIC, 0) + json.dumps(text).encode()


def test_a_field_that_is_missing_is_damage() -> None:
    assert load(with_text(text_of(RECORD))) == RECORD
    for field in Record._fields:
        found = text_of(RECORD)
        del found[field]
        assert load(with_text(found)) is None or field in Record._field_defaults


@pytest.mark.parametrize("value", [None, [], {}, "text", 1.5, [[1]], True])
def test_a_field_of_another_kind_is_damage(value: Any) -> None:
    for field in Record._fields:
        found = load(with_text(text_of(RECORD) | {field: value}))
        if found is not None:  # then it is as sound as any
            assert load(found.dump()) == found
            assert records.user_name(found.uid)
            assert records.owner(found.job)
            assert isinstance(found.command, str)


@given(st.binary(max_size=200))
@example(b"")
@example(b"null")
@example(b"[" * 100_000)
def test_damage_is_nobodys_error(data: bytes) -> None:
    assert load(data) is None
    assert load(RECORD.dump()[:12] + data) is None
    assert isinstance(records.may_overlap(data, asked("/local/train")), bool)
    assert isinstance(records.may_overlap(RECORD.dump()[:12] + data, asked("/local/train")), bool)


def asked(path: str) -> frozenset[int]:
    return records.opposite(records.marks([records.canonical(path)]))


def test_a_record_that_is_cut_short_may_be_anything() -> None:
    assert not records.may_overlap(RECORD.dump(), asked("/elsewhere"))
    assert records.may_overlap(RECORD.dump()[:24], asked("/elsewhere"))
    assert records.may_overlap(RECORD.dump(), asked("/local/train/deep"))
    assert records.may_overlap(RECORD.dump(), asked("/local"))


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["/usr/bin/python3.11", "train.py", "--steps=3"], "python3.11 train.py --steps=*"),
        (["python", "-m", "a.train", "-p", "hush"], "python -m a.train -p *"),
        (["python", "-u", "train.py", "-phush", "hush", "hush"], "python -u train.py -p* *"),
        (["/opt/a", "--api-token", "hush", "hush", "-p", "hush"], "a --api-token * -p *"),
        (["a", "--password", "--steps"], "a --password --steps"),
        (["a", "--Secret-Key=hush", "WANDB_API_KEY=hush"], "a --Secret-Key=* *"),
        (["a", "https://me:hush@host/x?signature=hush", "-1"], "a *"),
        (["python", "-c", "password = 'hush'", "hush"], "python -c *"),
        (["python", "-uc", "password = 'hush'", "hush"], "python -uc *"),
        (["python", "-Bcpassword = 'hush'", "hush"], "python -Bc* *"),
        (["python", "-W", "ignore", "-X", "dev", "train.py", "hush"], "python -W * -X * train.py *"),
        (["python", "-Wignore", "-OO", "train.py", "hush"], "python -W* -OO train.py *"),
        (["python", "-W", "", "train.py", "hush"], "python -W * train.py *"),
        (["python", "-um", "a.train", "hush"], "python -um a.train *"),
        (["python", "-ma.train", "hush"], "python -m a.train *"),
        (["python", "--check-hash-based-pycs", "never", "train.py", "hush"], "python --check-hash-based-pycs train.py *"),
        (["python", "-", "hush"], "python - *"),
        ([], ""),
    ],
)
def test_secrets_of_a_command_are_not_shown(words: list[str], shown: str) -> None:
    assert masked(words) == shown


def test_the_own_command_is_known() -> None:
    assert "python" in own().command
    assert len(own().command) <= 500


def test_a_user_without_a_name_is_a_number() -> None:
    assert records.user_name(0) == "root"
    assert records.user_name(4_000_000) == "4000000"


def test_a_long_command_shows_its_program_and_its_last_arguments() -> None:
    words = ["/a/long/way/to/python", "-c", "x" * 1000, "--steps=100"]
    cut = shortened(" ".join(words), 200)
    assert len(cut) == 200
    assert cut.startswith("/a/long/way/to/python -c xxx")
    assert cut.endswith("xxx --steps=100")
    assert shortened("x" * 200, 200) == "x" * 200


def test_of_too_many_directories_a_claim_is_refused() -> None:
    many = RECORD._replace(streams=(ClaimedStream(records.canonical("/local/" + "x" * 200), None),) * 40_000)
    with pytest.raises(errors.ConfigError, match=r"40,000 directories .* more than the 16,777,216 that a claim may have"):
        many.dump()
