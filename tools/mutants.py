"""Deliberate breaches of the invariants: each must turn a named test red. One that survives is a missing test.

    python tools/mutants.py                 all of them
    python tools/mutants.py budget lease    those whose name or test contains one of these words
    python tools/mutants.py --list          what there is
    python tools/mutants.py --jobs 4        four at a time (default: 2)
    python tools/mutants.py --page          write them into docs/internals/invariants.md

Each breach is applied to a copy of the tree, where its test must fail. Before that, the test must pass on the copy as it is.
A breach names a function and a small piece of Python in it. The piece is found by its syntax tree, so its line breaks may
change, and the code around it may move and change.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TAKEN = ("src", "tests", "tools", "docs", "benchmarks", "examples", "pyproject.toml", "mkdocs.yml", "Makefile", "README.md", "CHANGELOG.md")
MOST = 100
MOST_EACH = 10
FEWEST_EACH = 6
FEW = {8: 3}  # invariants that have fewer
SECONDS = 60  # for one test
HANGS = 10  # a mutant's test hangs if it takes longer than this, and three times the tests of its file without mutants
STAMPS = itertools.count(1_000_000_000)


@dataclass(frozen=True)
class Mutant:
    """An edit of one function that breaks an invariant.

    ``invariant``: its number in the design.
    ``where``: ``module:function``: the module below ``forebay``, and the function by its qualified name, such as
    ``claims.members:Members.leave``. A class stands for all of its body, and ``module:`` for all of the module.
    ``old``: an expression, or one or more statements, that the function contains exactly once. It cannot be a part of an
    f-string: before Python 3.12, such parts have no positions.
    ``new``: what replaces it; an empty text removes statements.
    ``test``: the test that must fail, from ``tests/`` on.
    """

    invariant: int
    name: str
    where: str
    old: str
    new: str
    test: str

    @property
    def file(self) -> str:
        """The module's file, from the root of the repository on."""
        path = "src/forebay/" + self.where.partition(":")[0].replace(".", "/")
        return f"{path}/__init__.py" if (ROOT / path).is_dir() else f"{path}.py"


MUTANTS = (
    # 1. Atomic publish
    Mutant(
        1, "an entry is committed before its file has its name", "_engine.publish:Publisher.enter",
        "place(txn, id)", "txn.after_commit.append(partial(place, txn, id))",
        "crash/test_every_step.py::test_put[blob]",
    ),
    Mutant(
        1, "the index leads to an entry before its commit", "_engine.publish:Publisher.enter",
        "txn.after_commit.append(partial(self._store_record, space, entry, label, now))",
        "self._index.store(space, entry, now, now)\nself._index.note(space, entry)",
        "engine/index/test_records.py::test_nothing_is_led_to_before_its_commit[large]",
    ),
    Mutant(
        1, "a write goes to a catalog before its epoch has begun", "_engine.catalog.connection:Catalog._begin_locked",
        "self._beginners.get(threading.get_ident()) != self._seen", "False",
        "engine/test_lost_meanwhile.py::test_an_epoch_begins_in_the_catalog_that_it_was_prepared_for",
    ),
    Mutant(
        1, "a mixture of two records is believed", "_engine.index.records:EntryIndex._read",
        "proof != second ^ _proof_of(content, id)", "False",
        "engine/index/test_records.py::test_no_mixture_of_two_records_of_a_slot_is_believed",
    ),
    Mutant(
        1, "a sweep removes a small file whose row is about to be committed",
        "_engine.space.eviction:Eviction.remove_orphan",
        "self._catalog.writer()", "__import__('contextlib').nullcontext()",
        "engine/catalog/test_writer.py::test_a_sweeper_leaves_a_file_alone_that_is_about_to_be_published",
    ),
    Mutant(
        1, "an index of the log that was deleted is read by", "_engine.catalog.connection:Catalog._is_current_locked",
        "self._log_files.are(self._wal.files())", "True",
        "engine/catalog/test_wal.py::test_all_go_on_by_another_index_once_theirs_is_deleted",
    ),
    Mutant(
        1, "two appenders fill one slot of a pack", "_engine.packs.pack:Pack._append_locked",
        "self._cells[slot]", "False",
        "engine/packs/test_pack.py::test_who_comes_second_between_the_look_and_the_store",
    ),
    Mutant(
        1, "an open file takes a block of a newer version", "fetch.blocks:Blocks._request",
        "self.info", "None",
        "fetch/test_blocks.py::test_an_open_file_goes_on_with_its_version_and_mixes_none",
    ),
    Mutant(
        1, "an upload is marked complete before its last file is sent", "directories.uploading:_Upload.run",
        "self._write_mark(UploadMarker(False, _noted(files, digests, states)))",
        "self._write_mark(UploadMarker(True, _noted(files, digests, states)))",
        "directories/test_uploading.py::test_killed_and_repeated[arrow]",
    ),
    # 2. One fetch
    Mutant(
        2, "no second look under the lock", "_engine.flight:Flight._look_again",
        "look()", "None",
        "tasks/test_cached.py::test_s06_processes_wait_for_one_run",
    ),
    Mutant(
        2, "a pipeline fetches without a second look", "fetch.pipeline:Pipeline._begin",
        "list(self._look(space, wanted))", "[]",
        "fetch/test_pipeline.py::test_what_was_fetched_between_the_look_and_the_lock_is_not_fetched_again",
    ),
    Mutant(
        2, "a block is fetched while another process fetches it", "fetch.flight:get_or_make_free",
        "list(holds)", "list(keys)",
        "fetch/test_blocks.py::test_processes_that_touch_the_same_blocks_fetch_each_once",
    ),
    Mutant(
        2, "a chunk is marked as present before it is written", "_engine.files.stages:Stage.write",
        "host.pwrite(fd, piece, offset + at)\nwith self._idle:\n    self._take_in_locked(Span(offset + at, len(piece)), piece)",
        "with self._idle:\n    self._take_in_locked(Span(offset + at, len(piece)), piece)\nhost.pwrite(fd, piece, offset + at)",
        "engine/files/test_stages.py::test_a_kill_at_any_step_can_be_gone_on_from",
    ),
    Mutant(
        2, "a failure does not reach the waiting processes", "_engine.flight:Flight.failure",
        "failure is None", "True",
        "scenarios/test_s06_one_fetch.py::test_s06_a_failure_reaches_all_who_waited_once",
    ),
    Mutant(
        2, "a cancelled coroutine cancels the fetch of the others", "cache.aio:AsyncFetches._fetched",
        "await future",
        "try:\n    await future\nexcept asyncio.CancelledError as error:\n    self._background._fail(error)\n    raise",
        "cache/test_aio.py::test_a_cancelled_call_cancels_nothing_for_the_others",
    ),
    Mutant(
        2, "the lock of a copy is kept although its directory was replaced", "directories.copying:locked",
        "_is_lock_of(fd, target, above)", "above or _is_lock_of(fd, target, above)",
        "directories/test_copying.py::"
        "test_a_directory_that_appears_while_its_lock_is_waited_for_is_locked_itself[made]",
    ),
    # 3. No stale state
    Mutant(
        3, "a first touch does not check its slot after the read", "_engine.index.memo:Hits.first_touch",
        "words[base + ID] != id", "False",
        "engine/index/test_records.py::test_what_is_replaced_while_it_is_read_is_not_served",
    ),
    Mutant(
        3, "the wait of a dead process counts as a deadlock", "_engine.files.waiters:Waiters.every",
        "self.locks.locked_among(range(RECORDS))", "list(range(RECORDS))",
        "engine/locks/test_nesting.py::test_what_a_killed_waiter_noted_counts_for_nothing",
    ),
    Mutant(
        3, "no process is ever found dead", "_engine.leases:Owners.reap",
        "id == self._id", "True",
        "crash/test_every_step.py::test_publish_through_a_writing",
    ),
    Mutant(
        3, "a remote that did not answer validates blocks", "fetch.block_files:_Opening._keep",
        "not self._is_stored", "True",
        "fetch/test_blocks.py::test_a_remote_that_cannot_be_reached_validates_nothing",
    ),
    Mutant(
        3, "an object is as fresh as its last byte, not its request", "fetch.job:Job._fetch",
        "self.began or store.now(exact=True)", "None",
        "scenarios/test_s23_freshness.py::test_s23_refresh_does_not_take_what_was_asked_for_before",
    ),
    Mutant(
        3, "a pause between two clock readings makes entries fresher", "_engine.index.head:Clock.look",
        "time.monotonic_ns() + ahead - time.time_ns()", "-time.time_ns() + ahead + time.monotonic_ns()",
        "engine/index/test_clock.py::test_a_pause_between_two_looks_at_the_machines_clocks_makes_it_late_not_early",
    ),
    Mutant(
        3, "a permit is released while its connection is open", "remote.http.loop:Admission._release_idle",
        "not self._loop.close_idle(queue.host, queue.permits - 1)", "False",
        "remote/test_limits.py::test_four_processes_never_open_more_connections_than_the_limit",
    ),
    Mutant(
        3, "an answer of before an invalidation counts", "_engine.index.records:EntryIndex.set_validated",
        "began <= expired <= self.head.clock.look()", "False",
        "engine/index/test_records.py::test_what_a_request_found_that_began_before_an_invalidation_does_not_count",
    ),
    # 4. Never over budget
    Mutant(
        4, "files are unlinked once others can write", "_engine.space.eviction:Eviction.end",
        "txn.after_commit", "txn.after_release",
        "engine/space/test_budget.py::test_nobody_gets_the_room_of_files_that_are_yet_to_be_unlinked[evicts]",
    ),
    Mutant(
        4, "a body of unknown length grows without a reservation", "_engine.publish:Writing._begin_on_disk",
        "self._grow", "None",
        "crash/test_every_step.py::test_grow_of_unknown_length",
    ),
    Mutant(
        4, "totals are reused after another process has changed the catalog",
        "_engine.space.free_space:FreeSpace.knows",
        "change not in (txn.seen, txn.change)", "False",
        "engine/write/test_small_values.py::test_a_put_after_any_other_change_queries[in another process-file]",
    ),
    Mutant(
        4, "a transaction that was rolled back withdraws another process's reservation",
        "_engine.space.budget:Budget.grant",
        "txn.after_commit.append(partial(setattr, search, 'reserved', row))", "search.reserved = row",
        "engine/space/test_budget.py::test_what_was_rolled_back_withdraws_nothing_of_others",
    ),
    Mutant(
        4, "what a stopped reader makes the catalog's log grow by does not count", "_engine.catalog.connection:Catalog.look_at_log",
        "size - transactions.FREE", "0",
        "engine/catalog/test_wal.py::test_a_log_that_a_stopped_reader_needs_counts_against_the_budget",
    ),
    Mutant(
        4, "free ends of a dead writer's segments are not returned",
        "_engine.space.eviction:any_left",
        "bool(_left(root, rows))", "False",
        "crash/test_packs.py::test_a_writer_that_needs_what_stands_empty_behind_the_dead",
    ),
    Mutant(
        4, "a server's claim of a large size evicts entries before a byte arrives",
        "remote.http:HttpDownload._take_range",
        "response.wait_for(min(span.length, FIRST_BYTES))", "",
        "remote/test_http_hostile.py::test_a_claim_alone_evicts_nothing",
    ),
    # 5. A lease pins
    Mutant(
        5, "local copies of a bulk call are not leased", "_engine.writers:Writers.publish_collected",
        "one.pending(one.info.validator if one.info is not None else None, leased=wanted)", "one.pending(None, leased=False)",
        "cache/test_many.py::test_local_many_gives_paths_that_stay",
    ),
    Mutant(
        5, "eviction ignores leases", "_engine.leases:Leases.try_evict",
        "self._evicting[id % LEASE_FILES].try_lock(id, exclusive=True)",
        "self._evicting[id % LEASE_FILES].try_lock(id, exclusive=True) or True",
        "engine/space/test_budget.py::test_a_lease_is_never_taken_on_a_version_that_was_replaced",
    ),
    Mutant(
        5, "a lease is taken without a second look", "_engine.leases:Leases._try",
        "self._index.id_of(entry.slot) != entry.id", "False",
        "engine/space/test_budget.py::test_a_lease_is_never_taken_on_a_version_that_was_replaced",
    ),
    Mutant(
        5, "a sweep removes a replaced entry that is leased", "_engine.space.eviction:Eviction.end",
        "self._leases.try_evict(entry.id)", "(self._leases.try_evict(entry.id) or entry.kind == 'blob')",
        "engine/space/test_budget.py::test_a_lease_is_never_taken_on_a_version_that_was_replaced",
    ),
    Mutant(
        5, "a file goes before the directory that contains it", "_engine.catalog.entries:end",
        "txn.all(sql, *some)", "txn.all(sql.replace('member = entries.id', 'FALSE'), *some)",
        "directories/test_directories.py::test_a_tree_goes_before_its_files_can",
    ),
    Mutant(
        5, "a lazy object does not hold its loaded entry", "prefetch.loader:Loader._keep",
        "ref.lease = lease", "pass",
        "prefetch/test_objects.py::test_a_lazy_holds_its_object_until_it_is_read",
    ),
    Mutant(
        5, "a leased small value is evicted", "_engine.space.eviction:Eviction.end",
        "self._leases.try_evict(entry.id)", "(self._leases.try_evict(entry.id) or entry.kind == 'value')",
        "engine/write/test_links.py::test_a_small_value_that_is_leased_makes_no_way",
    ),
    # 6. The cache never breaks the job
    Mutant(
        6, "an error of the disk reaches the caller", "_engine.files.layout:faults.__exit__",
        "not isinstance(error, OSError)", "error is not None",
        "engine/test_faults.py::test_any_change_may_fail[blob-EDQUOT]",
    ),
    Mutant(
        6, "a damaged catalog is not replaced", "_engine.engine:Engine._recover_from",
        "self.reopen(error, recoveries)", "raise error",
        "engine/test_faults.py::test_two_processes_go_on_after_harm[catalog.sqlite-scribble]",
    ),
    Mutant(
        6, "a handle that bypasses the cache never tries again", "fetch:Fetcher._catch_up",
        "reopening.attempt(self._opened.open_again)", "None",
        "scenarios/test_reopening.py::test_every_front_uses_the_cache_once_it_can_be_used",
    ),
    Mutant(
        6, "a pipe in place of a file hangs the reader", "_kernel.below:Below.open",
        "flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK", "flags | os.O_CLOEXEC | os.O_NOFOLLOW",
        "engine/files/test_strange_files.py::test_what_is_no_file_hangs_nobody[blob-a pipe]",
    ),
    Mutant(
        6, "a forged slot number of the catalog is believed", "_engine.catalog.recovery:heal",
        "holder.slot == entry.slot", "False",
        "engine/catalog/test_forged_rows.py::test_an_entry_with_a_forged_slot_gets_another[a slot of another]",
    ),
    Mutant(
        6, "a time in the future keeps an entry fresh", "_engine.index.records:EntryIndex._if_past",
        "self.head.clock.is_past(moment)", "True",
        "scenarios/test_clocks.py::test_times_that_were_forged_make_nothing_fresh_for_ever",
    ),
    Mutant(
        6, "a process takes back the connection that it gave up for others", "_engine.index.settings:ConnectionRequest._try",
        "self._is_waiting or not limits.locks.is_locked(self._first + _WAITING)", "True",
        "engine/index/test_limits.py::test_a_request_that_begins_lets_those_that_wait_look_first",
    ),
    Mutant(
        6, "a dead process's look-ahead still protects entries", "_engine.index.orders:Orders._is_used",
        "lock.is_locked(0)", "True",
        "engine/index/test_orders.py::test_what_a_killed_process_wanted_is_wanted_no_more",
    ),
    # 7. kill -9 anywhere is fine
    Mutant(
        7, "what a killed process began is not finished", "_engine.parts:Parts._finish_intent",
        "self.index.head.intent()", "False",
        "crash/test_every_step.py::test_replace[blob-blob]",
    ),
    Mutant(
        7, "a file is unlinked before the commit of its eviction", "_engine.space.eviction:Eviction.end",
        "self._index.empty(slot, id)", "self._index.empty(slot, id)\nblobs.remove_blob(self._root, id)",
        "crash/test_every_step.py::test_evict_under_pressure",
    ),
    Mutant(
        7, "a file that a killed process wrote under its last name stays", "_engine.catalog.recovery:recover",
        "not entries.is_known(catalog, id)", "False",
        "crash/test_every_step.py::test_put[small blob]",
    ),
    Mutant(
        7, "the process that closes the catalog last copies the log by an old index", "_engine.catalog.connection:Catalog._close_locked",
        "guard.try_lock(_SHARED, exclusive=False)", "False",
        "engine/catalog/test_wal.py::test_a_process_with_a_deleted_index_that_closes_last_does_not_copy_the_log_by_it",
    ),
    Mutant(
        7, "an old log is applied to a new catalog", "_engine.catalog.making:_name",
        "root.files.make_way(path)", "continue",
        "crash/test_creation.py::test_somebody_deletes_a_part_of_it[catalog.sqlite]",
    ),
    Mutant(
        7, "what an exception left half done waits for the next writer", "_engine.catalog.connection:Catalog._make_agree",
        "self._recover()", "pass",
        "engine/test_agreement.py::test_an_exception_at_any_step_leaves_rows_records_and_files_that_agree[removal-an interrupt]",
    ),
    Mutant(
        7, "a catalog is replaced since a call says that it is damaged", "_engine.catalog.connection:Catalog.rebuild",
        "self._damage_locked() and self._damage_locked()", "why",
        "engine/test_damage.py::test_what_only_a_call_says_is_no_damage",
    ),
    Mutant(
        7, "a dead process keeps its reservations", "_engine.catalog.reservations:disown",
        "'DELETE FROM reservations WHERE owner = ? AND keyhash = 0'",
        "'DELETE FROM reservations WHERE owner = ? AND FALSE'",
        "engine/space/test_budget.py::test_what_a_dead_process_had_reserved_is_free",
    ),
    Mutant(
        7, "a signal does not wait while a call runs", "_kernel.interrupts:guarded",
        "_inside or get_ident() != _main", "True",
        "interrupts/test_every_line.py::test_a_signal_at_any_line[a lock]",
    ),
    Mutant(
        7, "what a call returned stays where a signal comes at its end", "_kernel.interrupts:undone_by",
        "undo_guarded(done[0])", "pass",
        "interrupts/test_every_line.py::test_a_signal_at_any_line[a claim]",
    ),
    # 8. A hit takes no lock, no system call, no copy
    Mutant(
        8, "the first read of a process queries the catalog", "_engine.store:Store.first_touch",
        "self.engine.first_touch(space, key, max_age, alias or key, maps)", "None",
        "fetch/test_first_touch.py::test_the_first_read_of_a_process_asks_the_index_alone[read]",
    ),
    Mutant(
        8, "a hit makes a system call", "_engine.index.memo:Memo.hot_lookup.hit",
        "slot[USED] = now", "slot[USED] = now\n__import__('os').getppid()",
        "engine/test_hit_path.py::test_a_hit_makes_no_system_call",
    ),
    Mutant(
        8, "a hit copies", "_engine.index.memo:Memo.hot_lookup.hit",
        "entry.view", "bytes(entry.view)",
        "engine/test_hit_path.py::test_two_remembered_hits_are_views_of_the_same_bytes",
    ),
    # 9. Fork, spawn and pickle are safe
    Mutant(
        9, "a child frees libcurl's objects of its parent", "remote.http.loop:_Loop.leave_to_parent",
        "ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))", "",
        "remote/test_curl_processes.py::test_libcurls_objects_of_the_parent_are_never_freed_in_a_child",
    ),
    Mutant(
        9, "a child has no share in its parent's leases", "_kernel.locks:LockFile._taken_twice",
        "_take(fd, {offset: hold for offset, hold in self._held.items() if not hold[1]})", "{}",
        "engine/test_forks.py::test_s17_a_lease_pins_for_parent_and_child_alike",
    ),
    Mutant(
        9, "an unlock in a child forked by C code drops the parent's lease", "_kernel.locks:LockFile.drain",
        "self._pid == os.getpid()", "True",
        "engine/test_forks.py::test_a_fork_by_c_code_is_passed_by",
    ),
    Mutant(
        9, "a child waits for its parent's read-ahead", "fetch.block_files:ReadAhead.extend",
        "os.getpid() != self._pid", "False",
        "fetch/test_block_files.py::test_a_child_of_a_fork_reads_ahead_by_itself",
    ),
    Mutant(
        9, "a child keeps its parent's connections open", "remote.http.loop:_Loop.leave_to_parent",
        "os.dup2(nothing.fileno(), descriptor, inheritable=False)", "continue",
        "remote/test_curl_processes.py::test_a_child_holds_no_connection_of_its_parent",
    ),
    Mutant(
        9, "a child waits for its parent's loads", "prefetch.loader:Loader.after_fork_child",
        "not load.is_settled", "False",
        "prefetch/test_objects.py::test_after_a_fork_both_processes_go_on",
    ),
    Mutant(
        9, "a spawned rank reads the shards of its parent", "adapters.torch.shards:Shards._world_here",
        "self._spawned == os.getpid()", "True",
        "adapters/test_torch_shards.py::test_ranks_that_are_spawned_with_a_dataset_have_parts_of_their_own",
    ),
    Mutant(
        9, "a child keeps the catalogs of its ancestors", "_engine.catalog.connection:Catalog.after_fork_child",
        "_peers.pop", "_peers.get",
        "engine/test_forks.py::test_s17_a_child_knows_no_catalogs_of_its_ancestors",
    ),
    # 10. Nobody else's bytes
    Mutant(
        10, "a symbolic link is followed", "_kernel.below:Below._open",
        "_open_at_once(self.top, names, flags, mode)", "os.open(path, flags & ~os.O_NOFOLLOW)",
        "engine/test_faults.py::test_s03_a_damaged_blob_is_never_served[a link elsewhere]",
    ),
    Mutant(
        10, "a file goes to whichever root has the path", "_kernel.below:_Walk._from_top",
        "(there.st_dev, there.st_ino) != kept[:2]", "False",
        "engine/test_lost_meanwhile.py::test_no_file_goes_to_a_root_that_has_the_place_for_a_moment[a file]",
    ),
    Mutant(
        10, "a foreign rollback journal is applied", "_engine.catalog.connection:Catalog._connected_to_write",
        "guard.try_lock(_RESERVED, exclusive=False)", "False",
        "engine/files/test_strange_files.py::test_nor_one_that_comes_a_moment_later",
    ),
    Mutant(
        10, "what one token got is served for another", "remote:Realm.__call__",
        "any(parts)", "False",
        "security/test_keys.py::test_what_one_token_got_is_not_served_for_another[of-read]",
    ),
    Mutant(
        10, "a listing may name a file outside its directory", "directories.manifests:_find_bad",
        "why_not_below(name)", "''",
        "directories/test_directories.py::test_a_hostile_name[arrow-up]",
    ),
    Mutant(
        10, "a temporary copy is the user's original", "directories.copying:copy",
        "tempfile.mkdtemp(prefix='forebay-checkpoint-')",
        "location.local or tempfile.mkdtemp(prefix='forebay-checkpoint-')",
        "test_checkpoint.py::test_what_a_caller_removes_is_never_the_original",
    ),
    Mutant(
        10, "pickles that others can write are loaded by default", "codecs:default_codec",
        "'pytree' if others_can_write else 'pickle'", "'pickle'",
        "cache/test_shared_roots.py::test_a_pickle_of_anothers_is_a_miss",
    ),
    Mutant(
        10, "a netrc password follows a redirect to another host", "remote.http.requests:Exchange._default_headers",
        "endpoint == first or _may_use_netrc(endpoint, first)", "True",
        "remote/test_http_secrets.py::test_netrc_does_not_go_in_clear",
    ),
    Mutant(
        10, "an error message shows a signature", "remote.urls:redacted",
        "re.sub(_SECRET, '\\\\1...', re.sub(_URL_IN_TEXT, _redacted_url, masked(text)))", "text",
        "remote/test_redaction.py::test_a_url_that_was_taken_for_a_path_holds_no_secret[http:/h/x?sig=SIKRIT]",
    ),
    # 11. Nobody waits in silence
    Mutant(
        11, "calls that need each other wait for ever", "_engine.flight:Flight._enter",
        "leads_to(held, keyhash, waiters.every())", "False",
        "engine/locks/test_nesting.py::test_coroutines_that_need_each_other_do_not_wait_for_ever",
    ),
    Mutant(
        11, "a wait for a directory is silent", "directories.trees:_Tree._one_at_a_time",
        "self._options.on_wait", "None",
        "directories/test_directories.py::test_who_waits_says_so",
    ),
    Mutant(
        11, "a wait is not logged", "_kernel.waits:Wait.turn",
        "log.warning", "log.debug",
        "engine/test_faults.py::test_s08_a_stopped_fetcher_is_named",
    ),
    Mutant(
        11, "a wait for a connection is not logged", "_engine.index.settings:ConnectionRequest._say",
        "now >= self._say_at", "False",
        "engine/index/test_limits.py::test_a_wait_is_logged",
    ),
    Mutant(
        11, "a response header that arrives byte by byte never times out", "remote.http.transfers:CurlHandle._head_line",
        "self.connected = self.answered = True",
        "self.connected, self.answered, self.heard = True, True, time.monotonic()",
        "remote/test_time_limits.py::test_a_head_has_the_read_timeout_in_all[continue]",
    ),
    Mutant(
        11, "callers wait for the objects of a broken pipeline", "prefetch.loader:Loader._load",
        "[*self._under_way.values(), *(ref for ref, _ in self._links)]", "[]",
        "prefetch/test_objects.py::test_a_bulk_fetch_that_breaks_leaves_its_objects_to_the_callers",
    ),
    Mutant(
        11, "a caller is not woken when its load has finished", "prefetch.loader:Loader._set",
        "state is not State.LOADING and load.waiters", "False",
        "prefetch/test_prefetch.py::test_running_it_is_waited_for",
    ),
    Mutant(
        11, "an item that a dead process was loading is not looked for again", "prefetch.loader:Loader._look_again",
        "self._queued.extend", "list",
        "prefetch/test_linked_objects.py::test_a_killed_process_leaves_its_objects_to_the_others",
    ),
    # 12. A call gets its own output
    Mutant(
        12, "a hit ignores the arguments of its call", "tasks.cached:Cached._look",
        "digest", "None",
        "tasks/test_cached.py::test_what_was_stored_under_other_arguments_is_a_miss",
    ),
    Mutant(
        12, "calls with one tag share a failure", "tasks.values:_Call.run",
        "key if digest is None or key.endswith(digest) else f'{key} {digest}'", "key",
        "tasks/test_cached.py::test_what_another_call_of_the_same_tag_raises_is_its_own",
    ),
    Mutant(
        12, "values are hashed without their lengths", "tasks.hashing:sized",
        "b'%b%x:%b' % (mark, length, data)", "mark + bytes(data)",
        "tasks/test_hashing.py::test_values_do_not_run_into_each_other",
    ),
    Mutant(
        12, "sets and dicts are hashed in the order of the process", "tasks.hashing:DigestWriter.unordered",
        "sorted", "list",
        "tasks/test_hashing.py::test_s35_digests_agree_in_every_process",
    ),
    Mutant(
        12, "a changed helper function changes nothing", "tasks.naming:_content",
        "code", "(part[:0] for part in code)",
        "tasks/test_identity.py::test_what_makes_another_function[return x + 1-return x + 2]",
    ),
    Mutant(
        12, "the source file is believed after an edit", "tasks.code:ModuleSource.find",
        "shape_of(function.code) == shape_of(code)", "function",
        "tasks/test_identity.py::test_a_file_that_was_edited_since_is_not_believed",
    ),
    Mutant(
        12, "a sent function keeps its identity where its code differs", "tasks.naming:code_of",
        "_mark(functions, uses, sent.names) == sent.mark", "sent.mark",
        "tasks/test_identity.py::test_who_sends_a_function_tells_its_code",
    ),
    Mutant(
        12, "a script is another module to its child processes", "tasks.code:module_of",
        "module not in SCRIPT", "True",
        "tasks/test_naming.py::test_s35_a_script_and_its_children_agree",
    ),
    # 13. A directory has one job
    Mutant(
        13, "another run's environment names the job of these ranks", "claims.processes:_launched",
        "info.num_ranks == world.num_ranks", "True",
        "claims/test_jobs.py::test_a_launcher_of_something_else_does_not_name_the_job",
    ),
    Mutant(
        13, "a reused inode number is the old directory", "claims.conflicts:find_conflict",
        "_current(theirs, other.directory)", "other.directory",
        "claims/test_registry.py::test_a_directory_that_was_removed_and_its_number_given_away_is_no_conflict",
    ),
    Mutant(
        13, "ranks wait for a leader whose claim was refused", "claims.registry:Registry.register",
        "locked.refuse(request, conflict)", "",
        "claims/test_registry.py::test_the_other_ranks_are_told_of_a_conflict_at_once",
    ),
    Mutant(
        13, "a child forked during a claim keeps a lock", "claims.processes:InheritedFds.after_fork_child",
        "self.close(fd)", "",
        "crash/test_claims.py::test_a_child_forked_at_each_step_holds_nothing",
    ),
    Mutant(
        13, "a prefix is taken while a Streaming job has a part of it", "adapters.streaming.names:is_free",
        "any(map(os.path.lexists, paths_of(prefix)))", "os.path.lexists(paths_of(prefix)[0])",
        "adapters/streaming/test_streaming_prefix.py::test_a_number_of_which_anything_is_there_is_not_taken",
    ),
    Mutant(
        13, "a barrier counts a rank that died while it waited", "claims.barriers:_Visit._check_round_locked",
        "self._all_live(seats)", "True",
        "claims/test_barriers.py::test_ranks_that_join_later_are_told_of_no_earlier_death",
    ),
    Mutant(
        13, "a barrier counts arrivals of the round before the last", "claims.barriers:BarrierState.next_round_locked",
        "self._clear_locked(after)", "",
        "claims/test_barriers.py::test_nobody_is_a_round_ahead",
    ),
    Mutant(
        13, "a barrier waits for a rank that died after the last round", "claims.barriers:_Visit._missed",
        "[*dead, *snapshot.occupants(seat for seat in previous if not seat & DEAD)]", "[*dead]",
        "claims/test_barriers.py::test_a_rank_that_crossed_a_barrier_is_killed_on_its_way",
    ),
)  # fmt: skip


def named(node: ast.AST, names: Sequence[str]) -> Iterator[ast.AST]:
    """The functions and classes below ``node`` that have this qualified name: several if a property has a setter."""
    if not names:
        yield node
        return
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from named(child, names)
        elif child.name == names[0]:
            yield from named(child, names[1:])


def pieces(scope: ast.AST, length: int) -> Iterator[list[ast.expr] | list[ast.stmt]]:
    """Each expression of ``scope`` if ``length`` is 0, else each run of so many statements that follow one another."""
    for node in ast.walk(scope):
        if isinstance(node, ast.expr) and not length:
            yield [node]
        for body in (getattr(node, field, None) for field in ("body", "orelse", "finalbody")):
            if isinstance(body, list) and length:  # the body of a lambda is an expression
                yield from (body[at : at + length] for at in range(len(body) - length + 1))


def edited(mutant: Mutant, source: str) -> str:
    """``source`` with the edit of ``mutant``. Raises ValueError if it does not fit exactly once."""
    old, new = ast.parse(mutant.old).body, ast.parse(mutant.new).body
    is_expression = [type(node) for node in (*old, *new)] == [ast.Expr, ast.Expr]
    wanted = [ast.dump(node.value if is_expression and isinstance(node, ast.Expr) else node) for node in old]
    function = mutant.where.partition(":")[2]
    scopes = list(named(ast.parse(source), function.split(".") if function else []))
    if not scopes:
        raise ValueError(f"there is no {mutant.where}")
    found = [piece for scope in scopes for piece in pieces(scope, 0 if is_expression else len(old)) if list(map(ast.dump, piece)) == wanted]
    if len(found) != 1:
        raise ValueError(f"{mutant.where} contains {mutant.old!r} {len(found)} times")
    first, last = found[0][0], found[0][-1]
    starts = [0, *itertools.accumulate(map(len, source.encode().splitlines(keepends=True)))]  # columns count bytes, too
    assert last.end_lineno is not None
    assert last.end_col_offset is not None
    before = source.encode()[: starts[first.lineno - 1] + first.col_offset].decode()
    after = source.encode()[starts[last.end_lineno - 1] + last.end_col_offset :].decode()
    if is_expression:
        return f"{before}({mutant.new}){after}"
    return before + textwrap.indent(mutant.new or "pass", " " * first.col_offset).lstrip() + after


def misfits(root: Path = ROOT) -> list[str]:
    """What is wrong with the mutants: edits that do not fit, tests that are missing, too many or too few for an invariant."""
    found = []
    for mutant in MUTANTS:
        try:
            ast.parse(edited(mutant, (root / mutant.file).read_text()))
        except (ValueError, SyntaxError, OSError) as error:
            found.append(f"{mutant.name}: {error}")
        file, _, test = mutant.test.partition("[")[0].partition("::")
        if not (root / "tests" / file).exists() or f"def {test}(" not in (root / "tests" / file).read_text():
            found.append(f"{mutant.name}: there is no {mutant.test}")
    found += [f"two mutants are named {name!r}" for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1]
    if len(MUTANTS) > MOST:
        found.append(f"{len(MUTANTS)} mutants instead of at most {MOST}")
    counts = Counter(mutant.invariant for mutant in MUTANTS)
    for number in range(1, 14):
        if not FEW.get(number, FEWEST_EACH) <= counts[number] <= MOST_EACH:
            found.append(f"invariant {number} has {counts[number]} mutants")
    return found


def invariants_page(page: Path = ROOT / "docs/internals/invariants.md") -> str:
    """The page of the invariants, with the mutants of this file under each of them."""
    lines: list[str] = []
    number = 0
    for line in page.read_text().splitlines():
        if heading := re.match(r"## (\d+)\.", line):
            number = int(heading[1])
        elif line == "**Mutants**":
            names = [mutant.name.replace("__", r"\_\_") for mutant in MUTANTS if mutant.invariant == number]
            lines += [line, "", *(f"- {name}" for name in names), ""]
            number = -number
        if number >= 0:
            lines.append(line)
    return "\n".join(lines).rstrip() + "\n"


def copy_tree(place: Path) -> None:
    place.mkdir()
    for name in TAKEN:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, place / name)


def run(place: Path, tests: Sequence[str], limit: float) -> tuple[int, float, str]:
    """pytest's exit status in the copy, seconds, and its output. A test that takes more than ``limit`` seconds has failed."""
    began = time.monotonic()
    options = ["-x", "-q", "--runxfail", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib", "--timeout", f"{limit:.0f}"]
    command = [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in tests)]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
    with tempfile.TemporaryFile() as output:  # no pipe: a child that outlives its test would keep it open
        try:
            status = subprocess.run(
                command, cwd=place, env=environment, stdout=output, stderr=output, timeout=limit * (1 + len(tests)), check=False
            ).returncode
        except subprocess.TimeoutExpired:
            status = 1
        output.seek(0)
        return status, time.monotonic() - began, output.read().decode(errors="replace")


def rewrite(file: Path, text: str) -> None:
    """Compiled files are recognised by size and whole seconds: each content gets a time of its own."""
    file.write_text(text)
    stamp = next(STAMPS)
    os.utime(file, (stamp, stamp))


def judge(place: Path, mutant: Mutant, limit: float) -> tuple[str, float]:
    """``killed`` if the test fails on the breach, ``SURVIVED`` if it passes, else what went wrong."""
    file = place / mutant.file
    source = file.read_text()
    rewrite(file, edited(mutant, source))
    try:
        status, seconds, _ = run(place, [mutant.test], limit)
    finally:
        rewrite(file, source)
    return {0: "SURVIVED", 1: "killed"}.get(status, f"pytest ended with {status}"), seconds


def judge_all(mutants: list[Mutant], places: queue.SimpleQueue[Path]) -> int:
    """Judge the mutants whose tests are in one file, in one copy of the tree. Return how many were not killed."""
    place = places.get()
    try:
        status, seconds, output = run(place, list(dict.fromkeys(mutant.test for mutant in mutants)), SECONDS)
        if status:
            print(output[-3000:], file=sys.stderr)
        print(f"    {mutants[0].test.partition('::')[0]:<60} {'RED' if status else 'green':<10} {seconds:6.1f} s", flush=True)
        limit = max(HANGS, 3 * seconds)  # the machine may be busy
        bad = 0
        for mutant in mutants:
            verdict, seconds = ("a test of its file fails without it", 0.0) if status else judge(place, mutant, limit)
            bad += verdict != "killed"
            print(f"{mutant.invariant:>2}  {mutant.name:<60} {verdict:<10} {seconds:6.1f} s  {mutant.test}", flush=True)
        return bad
    finally:
        places.put(place)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mutants whose name or test contains one of these")
    parser.add_argument("--list", action="store_true", help="list them and end")
    parser.add_argument("--jobs", type=int, default=2, help="how many tests run at once (default: %(default)s)")
    parser.add_argument("--page", action="store_true", help="write them into docs/internals/invariants.md and end")
    arguments = parser.parse_args()
    if arguments.page:
        (ROOT / "docs/internals/invariants.md").write_text(invariants_page())
        return 0
    chosen = [m for m in MUTANTS if not arguments.words or any(word in m.name or word in m.test for word in arguments.words)]
    if arguments.list:
        for mutant in chosen:
            print(f"{mutant.invariant:>2}  {mutant.name:<60} {mutant.test}")
        return 0
    if wrong := misfits():
        print("\n".join(wrong), file=sys.stderr)
        return 2
    by_file: dict[str, list[Mutant]] = {}
    for mutant in chosen:
        by_file.setdefault(mutant.test.partition("::")[0], []).append(mutant)
    began = time.monotonic()
    places: queue.SimpleQueue[Path] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="forebay-mutants-") as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        for number in range(arguments.jobs):
            copy_tree(Path(folder, str(number)))
            places.put(Path(folder, str(number)))
        largest_first = sorted(by_file.values(), key=len, reverse=True)
        bad = sum(pool.map(lambda mutants: judge_all(mutants, places), largest_first))
    print(f"{len(chosen) - bad} of {len(chosen)} killed in {(time.monotonic() - began) / 60:.1f} min")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
