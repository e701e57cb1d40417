"""What lets a small file be written and published in one step: before the file there is a word that names it.

intent   the word in the table of slots is set            a crash: there is nothing to remove
file     written under its final name                     a crash: the next writer removes it, before he grants room to anybody
commit   the entry is visible                             a crash: the next writer finds its row, and only clears the word
clear

All of it happens under the writer lock, so one word is enough, and nobody can promise the file's bytes to somebody else before
they are counted or gone.
"""

from __future__ import annotations

from forebay._engine import blobs
from forebay._engine.catalog import Catalog, Txn, entries
from forebay._engine.root import Root
from forebay._engine.slots import Slots


class Intent:
    """The intent of one root. Its methods are called under the writer lock."""

    def __init__(self, root: Root, catalog: Catalog, slots: Slots) -> None:
        self._root, self._catalog, self._slots = root, catalog, slots

    def begin(self, txn: Txn, id: int) -> None:
        """The file of ``id`` may be written from now on, and ``txn`` is to commit its row."""
        self._slots.set_intent(id)
        txn.then = self._clear

    def _clear(self) -> None:
        self._slots.set_intent(0)

    def recover(self) -> None:
        """Remove what a writer left that did not come to its commit."""
        id = self._slots.intent()
        if id:
            if not entries.is_known(self._catalog, id):
                blobs.remove_whatever_suffix(self._root, id)
            self._clear()
