"""Where bytes come from: `resolve` finds the `Remote` of a URL. Knows nothing of the engine.

- `urls`: keys, suffixes, local paths
- `base`: options, one call with its retries, the edge where foreign errors become ours
- `transfer`: several ranges at once
- `connections` < `answers` < `exchange` < `download` < `http`: one object over HTTP
- `s3`: the same data plane, with AWS signatures
- `local`: files of this host
- `filesystems`: fsspec and pyarrow
"""

from __future__ import annotations

from forebay._model import Remote
from forebay.remote.base import RemoteOptions as RemoteOptions
from forebay.remote.urls import canonical as canonical
from forebay.remote.urls import local_path as local_path
from forebay.remote.urls import scheme
from forebay.remote.urls import suffix as suffix

_made: dict[tuple[str, RemoteOptions], Remote] = {}


def resolve(url: str, options: RemoteOptions | None = None) -> Remote:
    """The remote that serves ``url``: one for each scheme and options in a process. Raises `MissingExtra`."""
    kind = scheme(url)
    key = ("http" if kind == "https" else kind, options or RemoteOptions())
    found = _made.get(key)
    # two threads may both make one: setdefault lets the first win, and the other's holds nothing yet
    return found if found is not None else _made.setdefault(key, _make(*key))


def _make(kind: str, options: RemoteOptions) -> Remote:
    if kind == "http":
        from forebay.remote.http import HttpRemote

        return HttpRemote(options)
    if kind == "file":
        from forebay.remote.local import LocalRemote

        return LocalRemote()
    if kind == "s3":
        from forebay.remote.s3 import S3Remote

        return S3Remote(options)
    from forebay.remote.filesystems import FilesystemRemote

    return FilesystemRemote(None, options)
