"""Digests of contents that others may choose: BLAKE2b (RFC 7693), of which nobody finds two contents with one digest. Where only damage is
to be noticed, xxh3 is quicker."""

from __future__ import annotations

import functools
import os

from _blake2 import blake2b  # of hashlib, which would load OpenSSL into every process

from forebay._kernel.threads import run_all
from forebay._model import Buffer

LEAF = 2 << 20  # bytes that one thread digests at a time: of more, the digest is that of the leaves' digests
_JOBS = 8


def digest(data: Buffer) -> bytes:
    """16 bytes that only equal contents share. Large contents take several threads."""
    if len(data) <= 2 * LEAF:
        return blake2b(data, digest_size=16).digest()
    view = memoryview(data)
    digests = [b""] * -(-len(view) // LEAF)

    def one(number: int) -> None:
        digests[number] = blake2b(view[number * LEAF : (number + 1) * LEAF], digest_size=16).digest()

    jobs = min(_JOBS, len(os.sched_getaffinity(0)))
    try:
        run_all([functools.partial(one, number) for number in range(len(digests))], jobs, name="digest", inline=True)
    except RuntimeError:  # no thread can be started while the interpreter ends
        for number in range(len(digests)):
            one(number)
    return blake2b(b"".join(digests), digest_size=16, person=b"leaves").digest()
