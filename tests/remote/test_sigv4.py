"""Our signature is the one that botocore makes."""

from __future__ import annotations

import datetime
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.remote.s3.aws import Keys, sign

pytest.importorskip("botocore")

MOMENT = datetime.datetime(2026, 2, 3, 4, 5, 6, tzinfo=datetime.UTC)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def signed_by_botocore(method: str, url: str, headers: dict[str, str], keys: Keys, region: str) -> Any:
    import botocore.auth
    import botocore.awsrequest
    import botocore.credentials

    credentials = botocore.credentials.Credentials(keys.access, keys.secret, keys.token)
    request = botocore.awsrequest.AWSRequest(method, url, headers=headers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.auth, "get_current_datetime", lambda *_, **__: MOMENT)
        botocore.auth.S3SigV4Auth(credentials, "s3", region).add_auth(request)
    return request.headers


@given(
    st.sampled_from(["GET", "HEAD", "PUT"]),
    TEXT,
    st.dictionaries(TEXT.filter(bool), TEXT, max_size=4),
    st.booleans(),
    st.sampled_from(["us-east-1", "eu-west-9"]),
    st.sampled_from(["https://bucket.s3.amazonaws.com", "http://127.0.0.1:9000"]),
)
def test_as_botocore_signs(method: str, key: str, query: dict[str, str], with_token: bool, region: str, host: str) -> None:
    keys = Keys("AKIA", "secret/+", "to/ken==" if with_token else None)
    url = f"{host}/{quote(key)}?{urlencode(query, quote_via=quote, safe='')}"
    headers = {"x-amz-request-payer": "requester", "X-Amz-Meta": "  two   words "}
    ours = sign(method, url, headers, keys, region, MOMENT)
    theirs = signed_by_botocore(method, url, headers, keys, region)
    assert ours["authorization"] == theirs["Authorization"]
    assert ours["x-amz-date"] == theirs["X-Amz-Date"]
    assert ours.get("x-amz-security-token") == theirs.get("X-Amz-Security-Token")


def test_keys_show_no_secret() -> None:
    assert repr(Keys("AKIA", "sikrit", "tokken")) == "Keys(access='AKIA')"
