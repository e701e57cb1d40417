"""The fetch of one object over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from forebay import errors
from forebay._model import Buffer, ObjectInfo, Partial, Sink, Span
from forebay.remote.base import Call
from forebay.remote.http.answers import LARGE, SURE, Answer, info_of, ranged
from forebay.remote.http.exchange import Exchange
from forebay.remote.transfer import Work, parts, share


class Download:
    """One version of one object, into one sink. Called, it begins anew: after a `Trouble` that it could not resume from.

    1. The first question asks for the first part, so that a small object costs one request. 206 tells size and validator;
       200 is a server that ignores Range: its one stream is taken as it comes.
    2. With a strong validator the other parts come in parallel, each under If-Match and compared with the first; a cut one goes
       on where it ended. Without one, ranges could mix two versions: the object is asked for whole.
    """

    def __init__(self, exchange: Exchange, call: Call, url: str, sink: Sink, kept: Partial | None, *, whole: bool = False) -> None:
        self._exchange, self._call, self._url, self._sink, self._kept = exchange, call, url, sink, kept
        self._whole = whole  # ask without Range
        self._info = ObjectInfo(url, None)
        self._wanted: tuple[Span, ...] = ()

    def __call__(self) -> None:
        asked = self._first()
        with self._open(asked) as answer:
            if asked is None or answer.status == 200:
                again = self._take_whole(answer)
            elif answer.status == 206:
                again = self._take_range(answer, asked)
            else:
                again = self._is_past_the_end(answer)
        if again:
            self()

    def _first(self) -> Span | None:
        if self._whole:
            return None
        part = self._call.options.part
        if self._kept is None:
            return Span(0, part)
        missing = self._kept.missing[0] if self._kept.missing else Span(0, 1)
        return Span(missing.start, min(missing.length, part))

    def _open(self, asked: Span | None) -> Answer:
        if asked is None:
            return self._exchange.ask(self._call, "GET", self._url, {}, ok=(200,))
        headers = {"Range": f"bytes={asked.start}-{asked.end - 1}"}
        if self._kept is not None:
            headers["If-Range"] = self._kept.validator
        return self._exchange.ask(self._call, "GET", self._url, headers, ok=(200, 206, 416))

    # -- the three first answers; each says whether to ask again, otherwise ------------------------------------------

    def _is_past_the_end(self, answer: Answer) -> bool:
        """416: the object is empty (and its validator is told only where it is asked for whole), or shorter than what was kept of it."""
        answer.drain()
        self._whole = self._kept is None
        self._kept = None
        return True

    def _take_whole(self, answer: Answer) -> bool:
        size = answer.length if not answer.encoding else None
        if size is not None and size > LARGE:
            answer.secure(SURE)
        spans = self._begin(info_of(self._url, answer.headers, size))
        if size is not None and self._info.strong:
            if spans:
                self._bring(Span(0, size), answer)
        else:
            self._take_stream(answer)
        return False

    def _take_stream(self, answer: Answer) -> None:
        """A whole body in one go: where it is cut, the next attempt begins anew, since the rest may be another version's."""
        ask = getattr(self._sink, "most", None) if answer.encoding else None
        at, most = 0, ask() if ask is not None else None
        for block in answer.content():
            if most is not None and at + len(block) > most:
                todo = "what it is compressed from may be of any size, and is read into memory up to the budget only"
                raise errors.NoSpace.of(self._call.url, at + len(block), most, most, todo, hopeless=True)
            self._write(at, block)
            at += len(block)

    def _take_range(self, answer: Answer, asked: Span) -> bool:
        got, total = ranged(answer, asked)
        info = info_of(self._url, answer.headers, total)
        kept = self._kept
        if kept is not None and (info.validator != kept.validator or total != kept.size):
            self._kept = None  # a server that ignores If-Range
            return True
        if total is None or answer.encoding or not (info.strong or got.length == total):
            self._whole = True
            return True
        if total > LARGE and got.length < min(asked.length, SURE):  # too little to believe a size by
            self._whole = True
            return True
        if total > LARGE:
            answer.secure(min(got.length, SURE))
        spans = self._begin(info)
        if not info.strong:
            self._take_stream(answer)
            return False
        if kept is not None:
            self._call.transfer.resumed = total - sum(span.length for span in spans)
        self._bring_all(spans, got, answer)
        return False

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def _begin(self, info: ObjectInfo) -> tuple[Span, ...]:
        self._info = self._call.transfer.info = info
        self._wanted = self._sink.begin(info)
        return self._wanted

    def _write(self, at: int, block: Buffer) -> None:
        """To the sink, but what it has already."""
        end = at + len(block)
        for span in self._wanted:
            if span.length < 0 or (span.start <= at and end <= span.end):
                self._sink.write(at, block)
            elif span.start < end and at < span.end:
                low, high = max(at, span.start), min(end, span.end)
                self._sink.write(low, memoryview(block)[low - at : high - at])

    def _bring_all(self, spans: tuple[Span, ...], got: Span, answer: Answer) -> None:
        if (got,) == spans:  # all of a small object
            return self._bring(got, answer)
        options = self._call.options
        rest = [piece for span in spans for piece in _without(span, got)]
        opened = any(span.start < got.end and got.start < span.end for span in spans)
        needed = -(-sum(span.length for span in rest) // options.part)
        threads = min(options.streams - 1, needed, self._exchange.pool.spare())
        _keep_freed(2 * options.buffer)

        def work() -> Iterator[Work]:
            if opened:
                yield partial(self._bring, got, answer)
            for span in parts(rest, options.part):
                yield partial(self._bring, span)

        return share(work(), threads, self._call)

    def _bring(self, span: Span, answer: Answer | None = None) -> None:
        """All bytes of ``span``, from ``answer`` as far as that goes; a new question takes up where one was cut."""
        at = span.start

        def attempt() -> None:
            nonlocal at, answer
            opened, answer = answer, None
            with opened or self._range(Span(at, span.end - at)) as body:
                for block in body.blocks(span.end - at):
                    self._write(at, block)
                    at += len(block)

        while at < span.end:
            before = at
            self._call.retrying(attempt)
            if at == before:
                raise errors.RemoteProtocolError(f"{self._call.url}: an empty answer for byte {at:,}", url=self._call.url)

    def _range(self, span: Span) -> Answer:
        """The answer whose body begins with ``span``, of the version that `begin` was told of. Raises `RemoteChanged`."""
        info = self._info
        headers = {"Range": f"bytes={span.start}-{span.end - 1}", "If-Match": info.validator or "*"}
        answer = self._exchange.ask(self._call, "GET", self._url, headers, ok=(200, 206, 412, 416))
        try:
            if answer.status in (412, 416):
                answer.drain()
                raise changed(self._call.url)
            if answer.status == 206:
                self._check_range(answer, span)
            elif info_of(self._url, answer.headers, answer.length) != info:
                raise changed(self._call.url)
            else:
                answer.skip(span.start)
        except BaseException:
            answer.close()
            raise
        return answer

    def _check_range(self, answer: Answer, span: Span) -> None:
        total = ranged(answer, span).total
        if info_of(self._url, answer.headers, total).validator != self._info.validator or total != self._info.size or answer.encoding:
            raise changed(self._call.url)


def changed(url: str) -> errors.RemoteChanged:
    """``url``: without secrets."""
    return errors.RemoteChanged(f"{url} became another object while it was read", url=url)


def _keep_freed(size: int) -> None:
    """Let glibc keep freed blocks of up to ``size`` bytes for the next ones. It would give each back to the kernel and have its pages
    zeroed anew, which takes a fifth of the CPU of a large fetch."""
    bytearray(size)  # never touched; what was freed once is no longer too large to be kept


def _without(span: Span, got: Span) -> Iterator[Span]:
    """What of ``span`` is not in ``got``."""
    if got.end <= span.start or span.end <= got.start:
        yield span
        return
    if span.start < got.start:
        yield Span(span.start, got.start - span.start)
    if got.end < span.end:
        yield Span(got.end, span.end - got.end)
