"""What completes a command line: names of entries and spaces, read from the cache's catalog, and the script for bash.

It opens the catalog read-only, and imports nothing that fetches or stores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from click.shell_completion import BashComplete, CompletionItem, add_completion_class, split_arg_string

if TYPE_CHECKING:
    from forebay._engine.store import Store

MOST = 100
"""Names that are offered at once; of more, what they have in common up to a slash."""

LINE = "COMP_LINE"
"""The variable in which the script for bash passes the line up to the cursor."""

_LAST = chr(0x10FFFF)

# bash cuts words at ":" and "=", so that a URL is several. The whole line is passed on, and of each completion what bash takes for earlier
# words is cut off again.
_BASH = r"""
%(complete_func)s() {
    local line="${COMP_LINE:0:COMP_POINT}" breaks="" head="" word type value reply
    word="${line##*[[:space:]]}"
    [[ $COMP_WORDBREAKS == *:* ]] && breaks+=":"
    [[ $COMP_WORDBREAKS == *=* ]] && breaks+="="
    [[ -n $breaks && $word != [\'\"]* ]] && head="${word%%"${word##*[$breaks]}"}"
    COMPREPLY=()
    while IFS=, read -r type value; do
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain)
                case $word in  # names are others' choice: none may end a quotation, or be executed within one
                    \'*) reply=${value//\'/\'\\\'\'} ;;
                    \"*)
                        [[ $value == *!* ]] && continue  # no quoting there stops the history from being expanded
                        reply=${value//\\/\\\\} reply=${reply//\"/\\\"} reply=${reply//\$/\\\$} reply=${reply//\`/\\\`}
                        ;;
                    *) printf -v reply %%q "$value" ;;
                esac
                COMPREPLY+=("${reply#"$head"}")
                [[ $value == */ ]] && compopt -o nospace
                ;;
        esac
    done < <(%(complete_var)s=bash_complete COMP_LINE="$line" "$1" 2>/dev/null)
}

complete -F %(complete_func)s %(prog_name)s
"""


class _Bash(BashComplete):
    source_template = _BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        if LINE not in os.environ:  # a script that an earlier version printed
            return super().get_completion_args()
        words = split_arg_string(os.environ[LINE] + "x")  # so that a blank at the end begins a word
        return words[1:-1], words[-1][:-1]


def prepare() -> None:
    """Make click use the script for bash."""
    add_completion_class(_Bash, "bash")


def names(root: Callable[[], Path], incomplete: str) -> list[CompletionItem[str]]:
    """Complete the name of an entry. ``root``: finds the directory of the cache."""
    return _items(root, lambda store: _common(store, incomplete))


def spaces(root: Callable[[], Path], incomplete: str) -> list[CompletionItem[str]]:
    """Complete the name of a space. ``root``: as for `names`."""
    return _items(root, lambda store: [space.name for space in store.seeing.usage().spaces if space.name.startswith(incomplete)])


def _items(root: Callable[[], Path], find: Callable[[Store], list[str]]) -> list[CompletionItem[str]]:
    try:
        from forebay._engine.store import Settings, Store  # here: verbs and options complete without it

        store = Store.open(root(), Settings(), shared=True, read_only=True)
        try:
            return [CompletionItem(name) for name in find(store) if name.isprintable()]
        finally:
            store.close()
    except Exception:  # noqa: BLE001 (no completion is better than a message in the line that someone types)
        return []


def _common(store: Store, prefix: str) -> list[str]:
    """The names that begin with ``prefix``; of more than `MOST`, their beginnings up to the next slash."""
    while True:
        found = list(islice(_names(store, prefix), MOST + 1))
        if len(found) <= MOST:
            return found
        groups = list(islice(_groups(store, prefix), MOST))
        if len(groups) > 1 or groups[0] == prefix:
            return groups
        prefix = groups[0]


def _names(store: Store, prefix: str) -> Iterator[str]:
    for space, head, rest in _sources(store, prefix):
        if rest and store.entry(space, rest) is not None:
            yield head + rest
        after = rest
        while keys := store.seeing.key_page(space, after):
            yield from (head + key for key in keys if key.startswith(rest))
            after = keys[-1]
            if not after.startswith(rest):
                break


def _groups(store: Store, prefix: str) -> Iterator[str]:
    """The distinct beginnings of names, up to the next slash, or the colon behind the name of a space."""
    for space, head, rest in _sources(store, prefix):
        if len(prefix) < len(head):
            if store.seeing.key_page(space, None):
                yield head
            continue
        after = rest
        while keys := store.seeing.key_page(space, after):
            key = keys[0]
            if not key.startswith(rest):
                break
            start = max(len(rest), key.find("://") + 3 if "://" in key else 0)
            end = key.find("/", start)
            group = key if end < 0 else key[: end + 1]
            yield head + group
            after = group + _LAST if end >= 0 else group


def _sources(store: Store, prefix: str) -> Iterator[tuple[str, str, str]]:
    """The spaces that may have names with this beginning: the space, what its names have before the keys, how these keys begin."""
    for space in sorted(space.name for space in store.seeing.usage().spaces):
        head = "" if space == "urls" else f"{space}:"
        if prefix.startswith(head):
            yield space, head, prefix[len(head) :]
        elif head.startswith(prefix):
            yield space, head, ""
