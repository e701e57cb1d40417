"""What lets small files be written and published in one step: before them there is a word that names them.

intent   the word in the table of slots is set            a crash: there is nothing to remove
files    written under their final names                  a crash: the next writer removes them, before he grants room to anybody
commit   the entries are visible                          a crash: the next writer finds their rows, and only clears the word
clear

All of it happens under the writer lock, so one word is enough, and nobody can promise the files' bytes to somebody else before
they are counted or gone.
"""

from __future__ import annotations

from forebay._engine.catalog import Catalog, Txn, entries
from forebay._engine.files import blobs
from forebay._engine.files.root import Root
from forebay._engine.index.slots import Slots


class Intent:
    """The intent of one root. Its methods are called under the writer lock."""

    def __init__(self, root: Root, catalog: Catalog, slots: Slots) -> None:
        self._root, self._catalog, self._slots = root, catalog, slots

    def begin(self, txn: Txn, ids: range) -> None:
        """The files of these ids may be written from now on, and ``txn`` is to commit their rows."""
        self._slots.set_intent(ids)
        txn.then = self._clear

    def _clear(self) -> None:
        self._slots.set_intent(range(0))

    def recover(self) -> None:
        """Remove what a writer left that did not come to its commit."""
        ids = self._slots.intent()
        if ids:
            for id in ids:
                if not entries.is_known(self._catalog, id):
                    blobs.remove_whatever_suffix(self._root, id)
            self._clear()
