"""Deliberate breaches of the invariants: each must turn a named test red. One that survives is a missing test.

    python tools/mutants.py                 all of them
    python tools/mutants.py budget lease    those whose name contains one of these words
    python tools/mutants.py --list          what there is
    python tools/mutants.py --jobs 4        four at a time (default: 2)

Each breach is applied to a copy of the tree, its test is run there, and must fail; before, the same test must pass on the copy as it is.
"""

from __future__ import annotations

import argparse
import itertools
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TAKEN = ("src", "tests", "tools", "docs", "benchmarks", "examples", "pyproject.toml", "mkdocs.yml", "Makefile", "README.md", "CHANGELOG.md")
SECONDS = 240
STAMPS = itertools.count(1_000_000_000)


@dataclass(frozen=True)
class Mutant:
    """``invariant``: its number in the design. ``old`` occurs exactly once in ``file``, which lies under src/forebay."""

    invariant: int
    name: str
    file: str
    old: str
    new: str
    test: str


WAL = "tests/engine/catalog/test_wal.py::"
NAMES = "tests/engine/catalog/test_names.py::"
STEPS = "tests/crash/test_every_step.py::"
OTHERS = "tests/crash/test_others_look_on.py::"
DAMAGE = "tests/engine/test_damage.py::"
STRANGE = "tests/engine/files/test_strange_files.py::"
FAULTS = "tests/engine/test_faults.py::"
FORKS = "tests/engine/test_forks.py::"
CURL = "tests/remote/test_curl_processes.py::"
BUDGET = "tests/engine/space/test_budget.py::"
SMALL = "tests/engine/write/test_small_values.py::"
TASKS = "tests/tasks/test_tasks.py::"
IDENTITY = "tests/tasks/test_identity.py::"
JOBS = "tests/claims/test_jobs.py::"
REGISTRY = "tests/claims/test_registry.py::"
BARRIERS = "tests/claims/test_barriers.py::"
MEMBERS = "tests/claims/test_members.py::"
MEMORY = "tests/cli/test_memory.py::test_memory_does_not_grow_with_what_is_kept"
KEYS = "tests/engine/index/test_keys.py::"
VALUES = "tests/engine/index/test_values.py::"
LIMITS = "tests/engine/index/test_limits.py::"
FILESYSTEMS = "tests/remote/test_filesystems.py::"
BLOCKS = "tests/origin/test_blocks.py::"
BLOCK_FILES = "tests/origin/test_block_files.py::"
LOOP = "tests/remote/test_limits.py::"
AHEAD = "tests/prefetch/test_ahead.py::"
KNOWN = "tests/cache/test_known_orders.py::"
OBJECTS = "tests/prefetch/test_objects.py::"
LINKED = "tests/prefetch/test_linked_objects.py::"
BUSY = "tests/cache/test_connection_timeouts.py::"
FIRST_VALUES = "tests/engine/test_first_values.py::"
TOGETHER = "tests/samples/test_many.py::"
SHARDS = "tests/adapters/test_torch_shards.py::"
STREAMING = "tests/adapters/streaming/test_streaming_prefix.py::"

MUTANTS = (
    # 1. Atomic publish
    Mutant(
        2, "many objects are fetched without a second look", "origin/bulk.py",
        "for request in self._look(wanted, stale):", "for request in self._look({}, stale):",
        "tests/origin/test_bulk.py::test_what_was_fetched_between_the_look_and_the_lock_is_not_fetched_again",
    ),
    Mutant(
        2, "blocks are fetched without a second look", "origin/blocks.py",
        "                    blocks[number] = data\n                    _release(holds, [number])\n", "                    continue\n",
        f"{BLOCKS}test_what_was_fetched_between_the_look_and_the_lock_is_not_fetched_again",
    ),
    Mutant(
        2, "a block that another process fetches is fetched all the same", "origin/blocks.py",
        "self._key(number))) is not None:\n                    holds", "self._key(number))) is not number:\n                    holds",
        f"{BLOCKS}test_processes_that_touch_the_same_blocks_fetch_each_once",
    ),
    Mutant(
        1, "blocks of two versions have one key", "origin/spaces.py", "&size={size}&version={validator}", "&size={size}",
        f"{BLOCKS}test_an_open_file_goes_on_with_its_version_and_mixes_none",
    ),
    Mutant(
        1, "a block is of the version that the remote has", "origin/blocks.py", "span, info=self.info, exact=True", "span, exact=True",
        f"{BLOCKS}test_an_open_file_goes_on_with_its_version_and_mixes_none",
    ),
    Mutant(
        1, "blocks are put together by a weak validator", "origin/block_files.py",
        "return info.strong and info.validator is not None", "return info.validator is not None",
        f"{BLOCKS}test_without_a_strong_validator_the_object_is_fetched_whole",
    ),
    Mutant(
        3, "a new version that a block has met is not noted", "origin/blocks.py", "store.set_validated(index, 0)", "index.key",
        f"{BLOCKS}test_an_open_file_goes_on_with_its_version_and_mixes_none",
    ),
    Mutant(
        3, "a remote that does not answer validates blocks", "origin/block_files.py", " and not self._is_stored:", ":",
        f"{BLOCKS}test_a_remote_that_cannot_be_reached_validates_nothing",
    ),
    Mutant(
        6, "a server without ranges sends the object for each block", "origin/blocks.py", "info=self.info, exact=True", "info=self.info",
        f"{BLOCKS}test_a_server_without_ranges_is_asked_for_the_whole_object_and_never_again_for_parts",
    ),
    Mutant(
        6, "what cannot be kept is read ahead", "origin/block_files.py",
        "return self._blocks.are_kept and not self._is_closed", "return not self._is_closed",
        f"{BLOCK_FILES}test_where_the_cache_has_no_room_nothing_is_read_ahead",
    ),
    Mutant(
        9, "a forked child waits for what its parent reads ahead", "origin/block_files.py",
        "if os.getpid() != self._pid:", "if not self._pid:",
        f"{BLOCK_FILES}test_a_child_of_a_fork_reads_ahead_by_itself",
    ),
    Mutant(
        2, "a call for many that is given up keeps its keys", "origin/bulk.py",
        "                if fetch in left or not fetch.by_thread:", "                if fetch in left:",
        "tests/cache/test_many.py::test_a_call_that_is_given_up_releases_its_keys",
    ),
    Mutant(
        1, "a range that came is taken for the whole object", "remote/http/__init__.py",
        """incoming.headers.get("Content-Range") == whole""", """incoming.headers.get("Content-Range") != \"\"""",
        "tests/origin/test_bulk.py::test_a_range_that_says_there_is_more_is_not_the_whole",
    ),
    Mutant(
        4, "objects that are published together are not charged", "_engine/write/publish.py",
        "key, 0, size, charged=charged, entries=len(ready)", "key, 0, 0, charged=0, entries=0",
        "tests/cache/test_many.py::test_together_they_may_exceed_the_budget",
    ),
    Mutant(
        5, "many local copies are not leased", "_engine/write/publish.py",
        "one.writing.prepare(leases if wanted else None)", "one.writing.prepare(None)",
        "tests/cache/test_many.py::test_local_many_gives_paths_that_stay",
    ),
    Mutant(
        2, "a call that is cancelled cancels the function of all", "cache/space.py",
        "return await asyncio.shield(task)", "return await task",
        "tests/cache/test_aio.py::test_a_cancelled_maker_makes_it_for_the_others",
    ),
    Mutant(
        2, "a coroutine that is cancelled cancels the fetches of all", "cache/aio.py",
        "            await awaited.future\n            if not request.is_busy:\n",
        "            try:\n                await awaited.future\n            except asyncio.CancelledError as error:\n"
        "                self._fail(error)\n                raise\n            if not request.is_busy:\n",
        "tests/cache/test_aio.py::test_a_cancelled_call_cancels_nothing_for_the_others",
    ),
    Mutant(
        2, "the time limit of one caller is a failure for all that wait", "_engine/locks/fill.py",
        "except (errors.CacheFault, errors.WaitTimeout):", "except errors.CacheFault:",
        f"{BUSY}test_the_time_limit_of_one_call_is_no_failure_of_those_that_wait_for_the_object",
    ),
    Mutant(
        2, "a refresh of many asks again for what another call has just validated", "origin/bulk.py",
        "        return stamp != request.stamp\n", "        return False\n",
        "tests/origin/test_bulk.py::test_what_another_call_validated_after_the_first_look_of_a_refresh_is_not_validated_again[True]",
    ),
    Mutant(
        2, "a refresh of many serves what no call has validated since", "origin/bulk.py",
        "        if options.refresh and not self._was_validated_meanwhile(request, lease):\n            return False\n        if",
        "        options = options._replace(since=1)\n        if",
        "tests/cache/test_many.py::test_what_changed_is_fetched_again_and_what_did_not_is_only_asked_for",
    ),
    Mutant(
        2, "a lazy list is read by the thread that fetches", "cache/many.py",
        """if isinstance(_several(urls, "warm"), Sized):""", """if _several(urls, "warm") is not None:""",
        "tests/origin/test_feeding.py::test_what_has_come_is_there_for_others_while_the_next_url_is_waited_for",
    ),
    Mutant(
        8, "a young process goes to the catalog first", "_engine/store.py",
        "            row = engine.known_spaces.get(space) or self.spaces.lookup(space)\n",
        "            row = engine.known_spaces.get(space)\n            if row is None:\n                return None\n",
        "tests/origin/test_first_touch.py::test_the_first_read_of_a_process_asks_the_index_alone[read]",
    ),
    Mutant(
        1, "a hint of the index is believed though its slot has another entry", "_engine/index/keys.py",
        "        if words[base + ID] != id:\n            return None\n        if kind", "        if kind",
        f"{KEYS}test_what_is_evicted_is_not_led_to",
    ),
    Mutant(
        1, "a record of the index is read torn", "_engine/index/keys.py",
        " or proof != second ^ hash(record[_ID:_SOUND]) & _MASK", "",
        f"{KEYS}test_no_mixture_of_two_records_of_a_slot_is_believed",
    ),
    Mutant(
        1, "soundness of another boot is believed", "_engine/index/keys.py",
        " or sound != self._boot ^ id", "",
        f"{KEYS}test_soundness_of_another_boot_is_not_believed",
    ),
    Mutant(
        1, "the index leads to what is not committed", "_engine/write/insert.py",
        "        txn.after_release.append(lambda: self._keys.note_new(label.space, [(entry, data)]))\n",
        "        self._keys.note(label.space, entry)\n",
        f"{KEYS}test_nothing_is_led_to_before_its_commit[large]",
    ),
    Mutant(
        1, "a first touch serves a file that was written to", "_engine/reading.py",
        " or status.st_mtime_ns % blobs.SECOND != seal", "",
        f"{KEYS}test_a_file_that_was_written_to_is_not_served",
    ),
    Mutant(
        1, "a first touch serves a file of another size", "_engine/reading.py",
        "            if status.st_size != size or ", "            if ",
        f"{KEYS}test_a_file_of_another_size_is_not_served",
    ),
    Mutant(
        1, "a first touch serves a damaged value", "_engine/reading.py",
        " or blobs.mark_of(blobs.checksum_of(value)) != mark", "",
        f"{KEYS}test_a_damaged_value_is_not_served",
    ),
    Mutant(
        1, "a text that looks like the key of a part is looked up as it is", "origin/request.py",
        'text.startswith(_REMOTE) and "#" not in text', "text.startswith(_REMOTE)",
        f"{KEYS}test_an_entry_whose_key_looks_like_a_part_of_an_object_is_not_served_for_it",
    ),
    Mutant(
        10, "a first touch follows a link", "_engine/reading.py",
        "        fd = open_quickly(path)\n", "        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)\n",
        f"{KEYS}test_a_link_in_place_of_a_directory_is_not_followed",
    ),
    Mutant(
        3, "a first touch does not look at the slot again", "_engine/reading.py",
        "        if data is None or words[base + ID] != id:", "        if data is None:",
        f"{KEYS}test_what_is_replaced_while_it_is_read_is_not_served",
    ),
    Mutant(
        12, "the first read of a value does not compare what its entry carries", "_engine/reading.py",
        "noted_meta != meta_hash(meta) or ", "",
        f"{FIRST_VALUES}test_a_value_that_carries_another_text_is_not_served",
    ),
    Mutant(
        1, "the slots keep the entries of a lost catalog", "_engine/engine.py",
        "            if not boot:  # a new catalog\n", "            if boot is None:\n",
        "tests/engine/test_damage.py::test_what_a_process_knows_of_a_lost_catalog_is_not_served_beside_the_next_version[3-100]",
    ),
    Mutant(
        1, "a torn cell is believed", "_engine/index/values.py",
        " if mark_of(checksum_of(value)) == mark else None", "",
        f"{VALUES}test_a_torn_cell_is_not_believed_and_written_again[500]",
    ),
    Mutant(
        1, "the cell of another entry is believed", "_engine/index/values.py",
        "value if mark_of(checksum_of(value)) == mark", "value if any(value)",
        f"{VALUES}test_the_cell_of_another_entry_is_not_believed",
    ),
    Mutant(
        6, "a cell is stored to where the file has no blocks", "_engine/index/values.py",
        "                self._allocate(cells, start // _STEP)\n", "                host.set_byte(cells.view, PAGE + start // _STEP, 1)\n",
        f"{VALUES}test_on_a_full_disk_a_value_has_no_cell[True]",
    ),
    Mutant(
        4, "the cells are as many in a small root as in a large one", "_engine/index/values.py",
        "        size = _size_for(self._budget())\n", "        size = _MOST\n",
        f"{VALUES}test_the_cells_take_a_small_part_of_the_budget[67108864]",
    ),
    Mutant(
        3, "the first read of a value does not look at the slot again", "_engine/reading.py",
        "        if view is None or words[base + ID] != id:", "        if view is None:",
        f"{FIRST_VALUES}test_what_is_replaced_while_it_is_read_is_not_served",
    ),
    Mutant(
        12, "the first read of a process takes a value of other arguments", "tasks/values.py",
        "store.first_value(self.space, key, self._meta(digest))", "store.first_value(self.space, key, self.codec.name)",
        f"{TASKS}test_the_first_read_of_a_process_takes_no_value_of_other_arguments_or_codecs",
    ),
    Mutant(
        12, "what only begins like an array is taken for one", "codecs/__init__.py",
        "return arrays.parse_head(head) if stream == _stream_of(head) else None", "return arrays.parse_head(head) if head else None",
        "tests/codecs/test_codecs.py::test_what_only_begins_like_an_array_is_unpickled",
    ),
    Mutant(
        10, "spaces share keys in the index", "_engine/index/keys.py",
        "        keyed.update(space.to_bytes(8, \"little\"))\n", "",
        f"{KEYS}test_a_key_of_another_space_is_another_key",
    ),
    Mutant(
        6, "a table that is said to have moved is opened for ever", "_engine/index/keys.py",
        " and not table.words[_MOVED] else None", " else None",
        f"{KEYS}test_a_table_that_is_said_to_have_moved_is_looked_at_once_more",
    ),
    Mutant(
        4, "what was evicted stays mapped by the order of the coldest", "_engine/index/memo.py",
        "            self._coldest = every[len(every) // 4 :: -1]\n",
        "            self._coldest = every[len(every) // 4 :: -1]\n            self._mapped = list(self._all_locked())\n",
        "tests/engine/index/test_memo.py::test_an_evicted_entry_is_unmapped_though_it_stood_in_the_order",
    ),
    Mutant(
        1, "finish without the last byte", "_engine/files/stages.py",
        '        if lacking:\n            raise CacheFault(f"{self.path}',
        '        if lacking and size < 0:\n            raise CacheFault(f"{self.path}',
        "tests/engine/files/test_stages.py::test_a_missing_byte_forbids_to_finish",
    ),
    Mutant(
        1, "the row before the file", "_engine/write/publish.py",
        "                blobs.publish(self.root, writing.stage.path, reserved.id, label.suffix)\n                has_name = True\n",
        '                txn.run("COMMIT")\n                blobs.publish(self.root, writing.stage.path, reserved.id, label.suffix)\n'
        '                txn.run("BEGIN IMMEDIATE")\n                has_name = True\n',
        f"{STEPS}test_put[blob]",
    ),
    Mutant(
        1, "a small file is entered before it is written", "_engine/write/publish.py",
        "        self._write(one, ids[0])\n", "        txn.after_commit.append(lambda: self._write(one, ids[0]))\n",
        f"{STEPS}test_put[small blob]",
    ),
    Mutant(
        1, "a sweeper takes a small file for an orphan before its row is committed", "_engine/space/eviction.py",
        "as free, self._catalog.writer():\n", "as free:\n",
        "tests/engine/catalog/test_writer.py::test_a_sweeper_leaves_a_file_alone_that_is_about_to_be_published",
    ),
    Mutant(
        1, "a small file is written without an intent", "_engine/write/insert.py",
        "        self._slots.set_intent(ids)\n", "        self._slots.set_intent(range(0))\n",
        f"{STEPS}test_put[small blob]",
    ),
    Mutant(
        1, "serve without a look at the checksum", "_engine/reading.py",
        "        if blobs.checksum_of(data) != entry.checksum:\n", "        if len(data) != entry.size:\n",
        f"{FAULTS}test_s03_a_damaged_blob_is_never_served[flipped]",
    ),
    Mutant(
        1, "map without a look at the size", "_engine/files/blobs.py",
        "        if size != entry.size:\n", "        if size < 0:\n",
        "tests/engine/files/test_blobs.py::test_a_blob_of_another_size_is_damaged",
    ),
    Mutant(
        1, "what was handed out is served though it was written to", "_engine/files/blobs.py",
        "    return status.st_mtime_ns % SECOND == seal_of(checksum)\n", "    return True\n",
        "tests/directories/test_written_to.py::test_the_file_by_its_own_name[local]",
    ),
    Mutant(
        1, "a time of whole seconds is a seal", "_engine/files/blobs.py",
        "    return status.st_mtime_ns % SECOND == seal_of(checksum)\n",
        "    return status.st_mtime_ns % SECOND in (0, seal_of(checksum))\n",
        "tests/directories/test_written_to.py::test_a_write_that_leaves_a_whole_second_is_noticed",
    ),
    Mutant(
        2, "who waits for a copy's lock believes what was there before", "directories/copying.py",
        "            if _is_lock_of(fd, target, above):", "            if above or _is_lock_of(fd, target, above):",
        "tests/directories/test_copying.py::test_a_directory_that_appears_while_its_lock_is_waited_for_is_locked_itself[made]",
    ),
    Mutant(
        10, "a copy that its caller removes is the original", "directories/trees.py",
        "        return to_temporary(origin, location, part, options)\n",
        "        return location.local or to_temporary(origin, location, part, options)\n",
        "tests/test_checkpoint.py::test_what_a_caller_removes_is_never_the_original",
    ),
    Mutant(
        1, "a tree is looked at once in a process", "_engine/reading.py",
        "if tree.boot == host.boot_id() and self._trees.get(tree.id) == _fingerprint(files):", "if tree.id in self._trees:",
        "tests/directories/test_written_to.py::test_what_is_added_removed_or_replaced_costs_no_fetch[add]",
    ),
    Mutant(
        1, "a file that was read as its listing described it is not compared with that", "remote/filesystems/__init__.py",
        "        if self._stat(call, url).validator != info.validator:\n",
        "        if listed is None and self._stat(call, url).validator != info.validator:\n",
        f"{FILESYSTEMS}test_a_listing_that_is_out_of_date_is_not_believed[pyarrow_local-131073]",
    ),
    Mutant(
        1, "a file that is fetched again is read by the same listing", "remote/filesystems/__init__.py",
        "call, trusted = call.restarted(), None", "call = call.restarted()",
        f"{FILESYSTEMS}test_a_listing_that_is_out_of_date_is_not_believed[pyarrow_local-3]",
    ),
    Mutant(
        1, "an old listing tells what a file is before it is read", "directories/trees.py",
        "is_new = expected is not None and at >= self._began", "is_new = expected is not None",
        "tests/directories/test_directories.py::test_files_of_an_older_listing_are_looked_at_before_they_are_read",
    ),
    Mutant(
        1, "bytes that may still change are kept without a copy", "_model.py",
        """getattr(data.obj, "is_mutable", True) is False)""", """data.readonly)""",
        "tests/engine/files/test_memory_stage.py::test_a_view_that_cannot_write_may_still_change",
    ),
    Mutant(
        2, "what waits for its turn in a call for many keeps its key when that fails", "origin/bulk.py",
        "            self._held_back.append(fetch)\n", "            self._held_back.append(fetch)\n            fetch.by_thread = True\n",
        "tests/origin/test_bulk.py::test_a_call_that_fails_releases_what_it_held_back",
    ),
    Mutant(
        2, "what a successor could resume stays in memory until it is whole", "_engine/write/publish.py",
        "if size <= self._collect and (size <= SMALL or not self._resumable):", "if size <= self._collect:",
        "tests/origin/test_bulk.py::test_only_what_a_successor_could_resume_is_on_the_disk_while_it_comes[True]",
    ),
    Mutant(
        1, "an upload is said to be complete before it is", "directories/uploading.py",
        "self._write_mark(UploadMarker(False, ", "self._write_mark(UploadMarker(True, ",
        "tests/directories/test_uploading.py::test_killed_and_repeated[arrow]",
    ),
    Mutant(
        1, "what an older upload left is taken for what a killed one sent", "directories/uploading.py",
        'same = noted.etag is None or noted.etag not in ("", _state(info))', "same = True",
        "tests/directories/test_uploading.py::test_killed_over_an_older_one[arrow]",
    ),
    Mutant(
        1, "nobody looks at what was uploaded", "directories/uploading.py",
        "if info is None or info.size not in (None, file.size) or not self._is_same(written, info):", "if info is None and not files:",
        "tests/directories/test_uploading.py::test_somebody_removes_what_was_sent[local_folder]",
    ),
    Mutant(
        1, "a file that changed while it was sent is noted as it was", "directories/manifests.py",
        "        if not same:\n", "        if not same and self.size < 0:\n",
        "tests/directories/test_uploading.py::test_a_file_that_changes_while_it_is_sent[arrow]",
    ),
    Mutant(
        1, "a private copy of another version is taken for this one", "directories/copying.py",
        " and has_stamp(status.st_mtime_ns, self._stamps[file.name])", "",
        "tests/directories/test_copying.py::test_another_version_of_the_same_size_is_another_file",
    ),
    Mutant(
        1, "what comes straight from the remote is not looked at", "directories/copying.py",
        "        if other or (", "        if (",
        "tests/directories/test_copying.py::test_another_version_than_was_listed_is_told[version]",
    ),
    Mutant(
        1, "a file that is kept is taken for the version that is listed", "directories/trees.py",
        "            return is_same_version(entry.validator, file.validator)\n", "            return bool(entry.validator)\n",
        "tests/directories/test_directories.py::test_a_change_is_seen_after_max_age",
    ),
    Mutant(
        1, "half an upload is taken for a directory", "directories/listings.py",
        "    if complete and not missing:\n", "    if not missing:\n",
        "tests/directories/test_directories.py::test_an_upload_that_goes_on_is_not_handed_out[arrow]",
    ),
    Mutant(
        1, "a list of files may be as long as its server likes", "directories/listings.py",
        "        if size > LARGEST:\n", "        if size > LARGEST << 60:\n",
        "tests/remote/test_hostile_listings.py::test_a_large_mark_on_a_filesystem",
    ),
    Mutant(
        1, "a file that was uploaded is not looked for", "directories/listings.py",
        "    if complete and not missing:\n", "    if complete:\n",
        "tests/directories/test_directories.py::test_a_file_of_the_manifest_that_is_missing",
    ),
    Mutant(
        1, "a part of a signature drops parameters", "remote/urls.py",
        "whole = self.all_of <= names and",
        "whole = bool(self.all_of & names) and",
        "tests/scenarios/test_s35_keys_stay_apart.py::test_s35_what_users_and_queries_are_given_stays_apart",
    ),
    Mutant(
        1, "users share an entry", "remote/urls.py",
        "    if not user:\n        return host if",
        "    if not user or kind in _KNOWN:\n        return host if",
        "tests/scenarios/test_s35_keys_stay_apart.py::test_s35_what_users_and_queries_are_given_stays_apart",
    ),
    Mutant(
        1, "what is opened past the cache is not compared where its ETag is weak", "origin/files.py",
        "info=self._info)",
        "info=self._info if self._info.strong else None)",
        "tests/remote/test_http_hostile.py::test_open_past_the_cache_reads_one_version",
    ),
    Mutant(
        1, "a range that tells no ETag is of any version", "remote/http/exchange.py",
        "    return any(None not in (one, other) and one != other", "    return any(False",
        "tests/remote/test_http_hostile.py::test_what_ranges_leave_out_is_no_change",
    ),
    Mutant(
        1, "that a range is not there tells nothing of the version", "remote/http/__init__.py",
        "not ends_before(known, response.headers, span)", "known == span",
        "tests/remote/test_http_hostile.py::test_what_ended_sooner_may_be_another_version",
    ),
    # 2. One fetch
    Mutant(
        2, "no second look under the lock", "_engine/locks/fill.py",
        "        value = look()\n        error = self",
        "        value = None\n        error = self",
        "tests/scenarios/test_s06_one_fetch.py::test_s06_a_function_runs_once_per_node",
    ),
    Mutant(
        2, "a chunk is marked before it is written", "_engine/files/stages.py",
        "            host.pwrite(fd, view, offset)\n            with self._idle:\n                self._take_in_locked(written, view)\n",
        "            with self._idle:\n                self._take_in_locked(written, view)\n            host.pwrite(fd, view, offset)\n",
        "tests/engine/files/test_stages.py::test_a_kill_at_any_step_can_be_gone_on_from",
    ),
    Mutant(
        2, "a partial is gone on from whatever the validator", "_engine/files/stages.py",
        "        if kept and (kept.size, kept.validator) == (total, validator):\n", "        if kept and kept.size == total:\n",
        "tests/engine/files/test_stages.py::test_nothing_is_gone_on_from_when_the_object_is_another",
    ),
    Mutant(
        2, "a failure is not shared", "_engine/locks/fill.py",
        "        if failure is None or failure[0] < since:\n            return None\n",
        "        if failure is not None or since >= 0:\n            return None\n",
        "tests/scenarios/test_s06_one_fetch.py::test_s06_a_failure_reaches_all_who_waited_once",
    ),
    Mutant(
        2, "who makes a value waits for no other", "_engine/locks/fill.py",
        "        if held is None or keyhash in held:\n",
        "        if held is None or held:\n",
        "tests/engine/locks/test_nesting.py::test_a_value_that_many_others_need_is_made_once",
    ),
    Mutant(
        11, "two that need each other wait for ever", "_engine/locks/fill.py",
        "            if leads_to(held, target, self._living(txn)):\n",
        "            if not self._living(txn) and held == target:\n",
        "tests/engine/locks/test_nesting.py::test_coroutines_that_need_each_other_do_not_wait_for_ever",
    ),
    Mutant(
        2, "samples that are made together are made without a second look", "samples/__init__.py",
        "if not _added(items, keys[key], self._look(keys[key]))]", "]",
        f"{TOGETHER}test_what_was_stored_between_the_look_and_the_lock_is_not_made_again",
    ),
    Mutant(
        2, "samples that are made together are not locked", "_engine/locks/fill.py",
        "                    holds[key] = hold\n", "                    holds[key] = hold\n                    hold.release()\n",
        f"{TOGETHER}test_what_another_process_makes_is_waited_for_last",
    ),
    Mutant(
        2, "samples that others make are waited for before the free ones are made", "samples/__init__.py",
        "                busy = self._make_free(missing, fn, items)\n", "                busy = list(missing)\n",
        f"{TOGETHER}test_what_another_process_makes_is_waited_for_last",
    ),
    # 3. No stale state
    Mutant(
        3, "what a dead process waited for is believed", "_engine/locks/fill.py",
        "            if self._owners.is_dead(wait.owner):\n",
        "            if self._owners.is_dead(0) and wait.owner < 0:\n",
        "tests/engine/locks/test_nesting.py::test_what_a_killed_waiter_noted_counts_for_nothing",
    ),
    Mutant(
        3, "nobody is ever found dead", "_engine/locks/owners.py",
        "            if id == self._id or not self._probe.try_lock(id, exclusive=True):\n                continue\n            try:\n",
        "            if id or not self._probe.try_lock(id, exclusive=True):\n                continue\n            try:\n",
        f"{STEPS}test_publish_through_a_writing",
    ),
    Mutant(
        3, "a dead parent's lock lives on in the child", "_kernel/locks.py",
        "        second, later = self._second, self._later\n        self._close_locked()\n",
        "        second, later = self._second, self._later\n",
        f"{FORKS}test_s17_a_dead_parents_locks_do_not_live_on_in_the_child",
    ),
    Mutant(
        3, "an object is as new as its last byte", "origin/__init__.py", "validated=began, resume=resume", "resume=resume",
        "tests/scenarios/test_s23_freshness.py::test_s23_refresh_does_not_take_what_was_asked_for_before",
    ),
    Mutant(
        3, "refresh by a clock that was not looked at", "origin/request.py",
        "now = origin.store.now(exact=refresh)", "now = origin.store.now()",
        "tests/scenarios/test_clocks.py::test_refresh_asks_although_its_process_has_not_seen_the_clock_jump",
    ),
    Mutant(
        3, "a pause makes the clock early", "_engine/index/clock.py",
        "        wall = time.time_ns()  # after the monotonic one", "        # after the monotonic one",
        "tests/engine/index/test_clock.py::test_a_pause_between_two_looks_at_the_machines_clocks_makes_it_late_not_early",
    ),
    Mutant(
        3, "of two processes that only read, none looks at its permit again", "_engine/index/limits.py",
        "                if not self._read_only or not self.locks.is_locked(permits + number):\n", "                if number >= 0:\n",
        f"{LIMITS}test_two_that_only_read_never_share_a_permit",
    ),
    Mutant(
        3, "a permit is taken before those that have waited for longer", "_engine/index/limits.py",
        "None if limits.is_any_before(self._queue) else limits.try_permit(self._permits, limit, self._note)\n",
        "limits.try_permit(self._permits, limit, self._note)\n",
        f"{LIMITS}test_the_process_that_has_waited_for_longest_is_next",
    ),
    Mutant(
        3, "a permit is released while its connection is open", "remote/http/transfers.py",
        "            elif is_limited and not self._close_idle(queue.host, queue.permits - 1):\n", "            elif queue.permits < 0:\n",
        f"{LOOP}test_four_processes_never_open_more_connections_than_the_limit",
    ),
    Mutant(
        3, "an idle connection is kept from other processes", "remote/http/transfers.py",
        "            if is_limited and now - since < KEEP and not permit.is_wanted():\n",
        "            if is_limited and now - since < KEEP:\n",
        f"{LOOP}test_an_idle_connection_goes_when_another_process_wants_one",
    ),
    Mutant(
        3, "a call waits for its own connections as for those of others", "remote/http/transfers.py",
        "transfer.request.wait.end(has_one=True)", "transfer.request.wait.end(has_one=False)",
        f"{BUSY}test_a_call_that_has_a_connection_does_not_wait",
    ),
    Mutant(
        3, "the requests of a call wait for connections one after the other", "cache/many.py",
        "own._replace(wait=wait, ahead=True)", "own._replace(ahead=True)",
        f"{BUSY}test_all_requests_of_a_call_wait_together",
    ),
    Mutant(
        3, "the wait for a connection counts as silence of the host", "remote/http/connections.py",
        "began + sum(queued), unreachable", "began, unreachable",
        f"{LOOP}test_the_wait_for_a_connection_is_no_silence_of_the_host",
    ),
    Mutant(
        3, "a copy past the cache heeds no limits", "directories/trees.py",
        "        with origin.reaching(options):\n            origin.count(location.remote.fetch",
        "        with contextlib.nullcontext():\n            origin.count(location.remote.fetch",
        "tests/cache/test_transfer_limits.py::test_a_copy_of_a_directory_stays_within_them[past the cache]",
    ),
    # 4. Never over budget
    Mutant(
        4, "a budget that is a slip is taken at its word", "_config.py",
        " else LEAST_BUDGET):\n", " else 0):\n",
        "tests/cli/test_looking_changes_nothing.py::test_a_budget_that_is_a_slip_is_refused[63MiB-66060288]",
    ),
    Mutant(
        4, "a verb that looks sets the budget", "cli/options.py",
        "    with without_limits(Cache, path, shared=", "    with (lambda make, path, **how: make(path))(Cache, path, shared=",
        "tests/cli/test_looking_changes_nothing.py::test_every_looking_verb[closed]",
    ),
    Mutant(
        4, "doomed bytes are forgotten", "_engine/space/free_space.py",
        "        used = totals.entries + totals.granted", "        used = totals.entries - totals.leaving + totals.granted",
        f"{BUDGET}test_doomed_bytes_count_until_they_are_unlinked",
    ),
    Mutant(
        4, "promised bytes are forgotten", "_engine/space/free_space.py",
        "        used = totals.entries + totals.granted + totals.pending", "        used = totals.entries",
        "tests/stress/test_many_processes.py::test_s04_a_pause_between_samples_is_no_gap",
    ),
    Mutant(
        4, "a body of unknown length grows unasked", "_engine/write/publish.py",
        "else None, on_grow=self._grow, at_once", "else None, at_once",
        f"{STEPS}test_grow_of_unknown_length",
    ),
    Mutant(
        4, "sizes are counted, not blocks", "_engine/space/free_space.py",
        "        return -(-size // self._block) * self._block\n", "        return size\n",
        f"{STEPS}test_publish_through_a_writing",
    ),
    Mutant(
        4, "what a small write left is not removed", "_engine/write/insert.py",
        "                if not entries.is_known(self._catalog, id):\n", "                if id < 0:\n",
        f"{STEPS}test_put[small blob]",
    ),
    Mutant(
        4, "the free bytes of a disk are remembered where there are few", "_engine/space/free_space.py",
        " or catalog.free < floor + EASY:", ":",
        f"{BUDGET}test_a_disk_with_little_room_is_looked_at_by_each_put[{(256 << 20) // 2}-3]",
    ),
    Mutant(
        4, "what a put left is believed after another process has changed the catalog", "_engine/space/free_space.py",
        " or txn.version() != version:", ":",
        f"{SMALL}test_a_put_after_any_other_change_queries[in another process-limit]",
    ),
    Mutant(
        4, "what a put left is believed after this process has changed the catalog", "_engine/space/free_space.py",
        "if number < txn.number - 1 or known", "if number < 0 or known",
        f"{SMALL}test_a_put_after_any_other_change_queries[here-limit]",
    ),
    Mutant(
        4, "what a put left is believed after it was rolled back", "_engine/catalog/connection.py",
        "[0, 0], self._number + 1  # ids", "[0, 0], self._number  # ids",
        f"{SMALL}test_what_was_rolled_back_is_not_counted_on",
    ),
    Mutant(
        4, "what the catalog grows by beside small values is not counted from put to put", "_engine/space/free_space.py",
        " + ROW + GROWTH + 8 * len(key)\n", " + ROW\n",
        f"{SMALL}test_the_budget_holds_whatever_the_catalog_grows_by",
    ),
    Mutant(
        4, "max_entries does not count what is promised", "_engine/catalog/spaces.py",
        "rows - left + waiting, budget", "rows - left - 1, budget",
        "tests/stress/test_many_processes.py::test_s38_max_entries_is_exact_under_8_writers",
    ),
    Mutant(
        4, "a claim makes room before a byte came", "remote/http/__init__.py",
        "if total > LARGE:\n",
        "if total < 0:\n",
        "tests/remote/test_http_hostile.py::test_a_claim_alone_evicts_nothing",
    ),
    Mutant(
        4, "the first bytes of a range are believed though more was asked for", "remote/http/__init__.py",
        "if total > LARGE and span.length < min(first.length, FIRST_BYTES):",
        "if total > LARGE and span.length < 0:",
        "tests/remote/test_http_hostile.py::test_a_few_bytes_of_a_large_object_evict_nothing",
    ),
    Mutant(
        4, "what was asked for of a busy catalog is counted for ever", "_engine/space/budget.py",
        "                for one in owed:\n                    reservations.delete(txn, one)\n                self._eviction",
        "                self._eviction",
        f"{BUDGET}test_what_was_asked_for_is_given_back_once_the_catalog_is_free",
    ),
    Mutant(
        4, "who was rolled back withdraws what another was promised", "_engine/space/budget.py",
        "            attempt.id = id  # one that was entered", "            id = attempt.id  # one that was entered",
        f"{BUDGET}test_what_was_rolled_back_withdraws_nothing_of_others",
    ),
    Mutant(
        4, "a lower limit that met a busy catalog is forgotten", "_engine/engine.py",
        "                if lower:\n", "                if lower and unset:\n",
        f"{BUDGET}test_a_lower_limit_that_met_a_busy_catalog_is_applied_later",
    ),
    Mutant(
        4, "what is to be replaced is there for ever", "_engine/space/free_space.py",
        "            replaces, replaced = entries.version(rows, request.space, request.key)\n", "            pass\n",
        "tests/engine/space/test_budget.py::test_what_was_to_be_replaced_is_gone_by_now",
    ),
    # 5. A lease pins
    Mutant(
        5, "evict what is leased", "_engine/locks/leases.py",
        "        return self._evicting[id % FILES].try_lock(id, exclusive=True)\n",
        "        self._evicting[id % FILES].try_lock(id, exclusive=True)\n        return True\n",
        f"{OTHERS}test_a_lease_pins[press]",
    ),
    Mutant(
        5, "lease without a second look", "_engine/locks/leases.py",
        "        if self._slots.id_of(entry.slot) != entry.id:\n            file.unlock(entry.id)\n            return None\n", "",
        f"{BUDGET}test_a_lease_is_never_taken_on_a_version_that_was_replaced",
    ),
    Mutant(
        5, "a replaced entry goes though it is leased", "_engine/space/eviction.py",
        "        mine = [(id, slot, what) for id, slot, what in rows if self._leases.try_evict(id)]\n",
        "        mine = [(id, slot, what) for id, slot, what in rows if self._leases.try_evict(id) or True]\n",
        f"{OTHERS}test_a_lease_pins[replace]",
    ),
    Mutant(
        5, "a file goes though a directory has it", "_engine/catalog/entries.py",
        '    " AND NOT EXISTS (SELECT 1 FROM links WHERE member = entries.id)"\n', "",
        "tests/directories/test_directories.py::test_a_tree_goes_before_its_files_can",
    ),
    # 6. The cache never breaks the job
    Mutant(
        6, "errors of the disk reach the caller", "_engine/files/faults.py",
        "        if not isinstance(error, OSError) or", "        if error is not None or",
        f"{FAULTS}test_any_change_may_fail[blob-EDQUOT]",
    ),
    Mutant(
        6, "the clock of a root is set back", "_engine/index/clock.py",
        "max(self._ahead, wall - ticks, others or 0)\n", "max(wall - ticks, 0)\n",
        "tests/engine/index/test_clock.py::test_the_clock_goes_on_while_the_wall_clock_was_set_back",
    ),
    Mutant(
        6, "each process has a clock of its own", "_engine/index/clock.py",
        "        return ahead if ticks + ahead - wall <= BELIEVED else 0\n", "        return 0\n",
        "tests/engine/index/test_clock.py::test_a_step_while_another_process_looks_is_one_clock",
    ),
    Mutant(
        6, "a duration is of the wall clock", "origin/__init__.py",
        'self.store.count("wait_ns_remote", time.monotonic_ns() - began)', 'self.store.count("wait_ns_remote", time.time_ns() - began)',
        "tests/scenarios/test_clocks.py::test_a_step_during_a_fetch_reaches_nobody",
    ),
    Mutant(
        6, "a time of the future is believed", "_engine/index/slots.py",
        "        return moment if self.clock.is_past(moment) else 0\n", "        return moment\n",
        "tests/scenarios/test_clocks.py::test_times_that_were_forged_make_nothing_fresh_for_ever",
    ),
    Mutant(
        6, "a hit registers its process first", "_engine/store.py",
        "        return self.engine.reading.view(space, self.spaces.lookup(space).id, key)\n",
        "        self.engine.owners.me()\n        return self.engine.reading.view(space, self.spaces.lookup(space).id, key)\n",
        "tests/scenarios/test_stopped_writer.py::test_a_hit_needs_no_writer_in_a_young_process_either",
    ),
    Mutant(
        6, "who waited in vain for the writer waits again", "_engine/catalog/writer.py",
        "            if self._words.value(WRITER_WORD) == word:", "            if self._words.value(WRITER_WORD) == word and not holder:",
        "tests/scenarios/test_stopped_writer.py::test_who_writes_waits_once_and_is_told_who_it_is",
    ),
    Mutant(
        6, "a handle that passes the cache by stays so", "origin/opening.py",
        "        if not self._turn.take():\n", "        if self._turn is not None:\n",
        "tests/scenarios/test_reopening.py::test_every_front_uses_the_cache_once_it_can_be_used",
    ),
    Mutant(
        6, "a try that was interrupted is the last one", "origin/opening.py",
        "            if store is None:\n", "            if store is not None:\n",
        "tests/scenarios/test_reopening.py::test_a_try_that_was_interrupted_is_made_again",
    ),
    Mutant(
        6, "a forked child waits for a thread that it does not have", "_kernel/waits.py",
        "self._free.setdefault(os.getpid(), [True]).pop()", "self._free.setdefault(0, [True]).pop()",
        "tests/scenarios/test_reopening.py::test_a_child_that_is_forked_while_its_parent_tries_tries_itself",
    ),
    Mutant(
        6, "what the system refuses reaches the caller", "_engine/engine.py",
        "        try:\n            with faults(str(self.root.path)):\n",
        "        try:\n            if self.root:\n",
        "tests/engine/test_no_more_files.py::test_each_call_without_files[True-0]",
    ),
    Mutant(
        6, "statistics that cannot be read are an error", "cache/seeing.py",
        "    except OSError as error:\n        if store.keeps",
        "    except ZeroDivisionError as error:\n        if store.keeps",
        "tests/engine/test_no_more_files.py::test_statistics_that_cannot_be_read_are_zeros",
    ),
    Mutant(
        6, "who opens a pipe waits for its writer", "_kernel/below.py",
        "flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)", "flags | os.O_CLOEXEC | os.O_NOFOLLOW)",
        f"{STRANGE}test_what_is_no_file_hangs_nobody[blob-a pipe]",
    ),
    Mutant(
        6, "a directory and its files do not go together", "_engine/store.py",
        " if self._has_trees() else set()", " if not self._has_trees() else set()",
        "tests/cli/test_pull_directories.py::test_clear_takes_a_directory_and_its_files_at_once[False]",
    ),
    Mutant(
        6, "a damaged catalog is not made anew", "_engine/engine.py",
        "        elif isinstance(error, CatalogBroken):\n            self.reopen(error, recoveries)\n",
        "        elif isinstance(error, CatalogBroken):\n            raise error\n",
        f"{FAULTS}test_two_processes_go_on_after_harm[catalog.sqlite-scribble]",
    ),
    Mutant(
        6, "damage that opening meets is not mended", "_engine/engine.py",
        "            except CatalogBroken as error:\n                if self.root.read_only:\n",
        "            except CatalogBroken as error:\n                if self.root:\n",
        f"{DAMAGE}test_the_first_call_that_meets_the_damage_goes_on",
    ),
    Mutant(
        6, "an index that leads to another key is believed", "_engine/catalog/entries.py",
        "    if row and row[2] != key:\n", "    if row and row[2] is None:\n",
        f"{DAMAGE}test_the_first_call_that_meets_the_damage_goes_on[swapped keys]",
    ),
    Mutant(
        6, "a full disk keeps its ballast", "_engine/catalog/wal.py",
        "            error.relieved = self._root.files.unlink(self._root.ballast) or", "            error.relieved =",
        "tests/scenarios/test_s13_full_disk.py::test_s13_removing_works_when_it_is_needed_most",
    ),
    Mutant(
        4, "the budget goes with the catalog", "_engine/space/settings.py",
        "settings_file.read(root) or _kept(before or Settings())", "Kept()",
        f"{DAMAGE}test_the_first_call_that_meets_the_damage_goes_on[cut 0]",
    ),
    Mutant(
        4, "a budget in the environment changes a cache that exists", "origin/opening.py",
        "            path, budget, environment.min_free", "            path, budget or environment.budget, environment.min_free",
        "tests/scenarios/test_s34_what_was_there_before.py"
        "::test_s34_a_budget_in_the_environment_changes_no_cache_that_exists",
    ),
    Mutant(
        6, "what another user left is gone on with in his file", "_engine/files/stages.py",
        "        if status.st_uid != os.geteuid() and os.geteuid() != 0:\n", "        if status.st_uid < 0:\n",
        "tests/scenarios/test_s10_two_users.py::test_s10_a_dead_users_fetch_is_resumed_and_kept_by_another[read]",
    ),
    Mutant(
        6, "a slow object makes its host silent", "_engine/index/hosts.py",
        "if not began * _SECOND <= heard <= now:",
        "if heard <= now:",
        "tests/scenarios/test_silent_hosts.py::test_who_was_heard_meanwhile_is_not_silent",
    ),
    Mutant(
        6, "a silent host is believed for as long as its record says", "_engine/index/hosts.py",
        "if not now - PERIOD * _SECOND < at <= now or",
        "if not now - PERIOD * _SECOND < at or",
        "tests/scenarios/test_silent_hosts.py::test_what_lies_there_is_not_believed",
    ),
    Mutant(
        1, "who writes keeps to a table of slots that was replaced", "_engine/engine.py",
        "        if not self.slots.are_same():\n", "        if not self.slots:\n",
        f"{STRANGE}test_a_process_that_only_writes_goes_over_to_the_new_slots",
    ),
    Mutant(
        1, "a writer keeps to a catalog that was deleted", "_engine/catalog/names.py",
        "root.st_mtime_ns, *lock", "0, *lock",
        f"{NAMES}test_a_writer_notices_that_a_file_has_lost_its_name[delete_catalog]",
    ),
    Mutant(
        1, "a writer keeps to a lock that was deleted", "_engine/catalog/names.py",
        "root.st_mtime_ns, *lock", "root.st_mtime_ns",
        f"{NAMES}test_a_writer_notices_that_a_file_has_lost_its_name[delete_lock]",
    ),
    Mutant(
        1, "the time of a directory is believed a moment after its names have changed", "_engine/catalog/names.py",
        " and time.time_ns() - self._seen[2] > SETTLED:", ":",
        f"{NAMES}test_a_change_a_moment_ago_may_hide_another_one",
    ),
    Mutant(
        1, "who reads keeps to a table of slots that was replaced", "_engine/index/memo.py",
        "        self._slots.check_same()\n", "",
        f"{STRANGE}test_a_process_that_only_reads_goes_over_to_the_new_slots[False]",
    ),
    Mutant(
        4, "the table of slots grows as far as its next slot says", "_engine/catalog/entries.py",
        "        if type(noted) is not int or top > RECORDS + noted + free:\n", "        if type(noted) is not int:\n",
        "tests/engine/catalog/test_forged_rows.py::test_a_slot_far_away_makes_no_gigabytes_of_slots[the next slot-False]",
    ),
    Mutant(
        6, "a slot of the catalog is believed", "_engine/catalog/checked.py",
        "        and rows.has_slot(row[6])\n", "        and row[6] >= 0\n",
        "tests/engine/catalog/test_forged_rows.py::test_rows_of_one_forged_slot_are_set_aside_and_the_others_stay",
    ),
    Mutant(
        6, "a total or a limit that is no number is believed", "_engine/catalog/spaces.py",
        "    if not _NUMBERS.issuperset(map(type, row)):\n", "    if not row:\n",
        "tests/engine/catalog/test_forged_rows.py::test_what_is_no_number_or_no_name_reaches_no_caller[a budget]",
    ),
    Mutant(
        6, "parts of two windows of the clock are one", "_engine/index/clock.py",
        "        return wall + skew\n", "        return wall + self.window[2]\n",
        "tests/engine/index/test_clock.py::test_a_step_that_another_thread_sees_between_two_lines_is_no_time_of_its_own",
    ),
    Mutant(
        6, "a lost part of the slots stays lost", "_engine/engine.py",
        "isinstance(error, SlotsBroken) and not self.root.read_only:\n",
        "isinstance(error, SlotsBroken) and not self.root:\n",
        f"{STRANGE}test_a_lost_part_of_the_slots_is_made_anew_of_the_catalog[001]",
    ),
    Mutant(
        4, "files that no entry names are counted by nobody", "_engine/check.py",
        "if parsed.id not in intended}", "if parsed.id in intended}",
        "tests/cli/test_strays.py::test_s19_strays_are_counted_told_and_removed[by0]",
    ),
    Mutant(
        4, "a second file with the id of an entry is that entry's", "_engine/catalog/entries.py",
        " or _file_of(files.get(name[0], name)) != _file_of(name)}", "}",
        "tests/cli/test_strays.py::test_what_has_an_entrys_id_and_is_not_its_file_is_a_stray[by0-another suffix]",
    ),
    Mutant(
        10, "a name of ours is ours wherever it lies", "_engine/files/layout.py",
        "    return parsed if parsed and FANS[parsed.id & 0xFF] == fan else None\n", "    return parsed\n",
        "tests/cli/test_strays.py::test_a_name_of_ours_where_it_does_not_belong_is_somebodys",
    ),
    Mutant(
        6, "two false alarms make a catalog anew", "_engine/engine.py",
        "                self.catalog.trust()  # what another", "                self.catalog.lost  # what another",
        f"{DAMAGE}test_false_alarms_that_have_nothing_to_do_with_each_other_cost_nothing",
    ),
    Mutant(
        6, "a log that was taken away stays away", "_engine/catalog/wal.py",
        "head[_MODE_AT:] not in (_LOG_MODE, b\"\")", "head[_MODE_AT:] == b\"\"",
        f"{STRANGE}test_a_log_that_was_taken_away_comes_again",
    ),
    Mutant(
        6, "what takes the place of the log stays there", "_engine/catalog/wal.py",
        "                self.remove(path)\n", "                self.exists()\n",
        f"{STRANGE}test_what_is_no_file_hangs_nobody[catalog.sqlite-wal-a pipe]",
    ),
    Mutant(
        6, "an empty directory in the place of the slots stays there", "_engine/index/slots.py",
        "files.make_way(self._path(chunk))", "files.unlink(self._path(chunk))",
        f"{STRANGE}test_what_is_no_file_hangs_nobody[slots/000-a directory]",
    ),
    Mutant(
        6, "what is noted of an entry is believed", "_model.py",
        "    return content if sound and all(", "    return content if content or all(",
        "tests/engine/catalog/test_forged_rows.py::test_what_is_noted_of_an_entry_is_not_believed[other types]",
    ),
    Mutant(
        1, "a file that is said to be an array is not looked at", "_engine/reading.py",
        ", \"pack\": self._pack_is_there}", "}",
        "tests/engine/catalog/test_forged_rows.py::test_a_file_that_is_said_to_be_another_thing_is_fetched_again[pack]",
    ),
    Mutant(
        6, "a time of the rate is believed that no process can have stored", "_engine/index/limits.py",
        "        if start > now + _BELIEVED:\n", "        if start < 0:\n",
        f"{LIMITS}test_a_damaged_word_of_the_rate_stops_nobody",
    ),
    Mutant(
        6, "damaged limits are believed", "_engine/index/slots.py",
        "        if words[_LIMITS + 1] != packed ^ _LIMITS_MARK:\n", "        if packed < 0:\n",
        f"{LIMITS}test_damaged_limits_are_those_that_were_believed",
    ),
    Mutant(
        6, "a process that was stopped while it waited holds up all others", "_engine/index/limits.py",
        "        return self._sightings >= _SIGHTINGS\n", "        return self._sightings < 0\n",
        f"{LIMITS}test_a_process_that_is_stopped_while_it_waits_holds_nobody_up",
    ),
    # 7. kill -9 anywhere
    Mutant(
        7, "nobody ends what the dead began", "_engine/catalog/connection.py",
        "        if txn.leftovers:\n", "        if txn.leftovers is None:\n",
        f"{STEPS}test_replace[blob-blob]",
    ),
    Mutant(
        7, "unlink before the commit", "_engine/space/eviction.py",
        "                self._slots.clear(candidate.slot, candidate.id)\n",
        "                self._slots.clear(candidate.slot, candidate.id)\n                blobs.remove_blob(self._root, candidate.id)\n",
        f"{STEPS}test_evict_under_pressure",
    ),
    Mutant(
        7, "what a process counted goes with it", "_engine/index/counters.py",
        "            if words[0] != _MARK or max(words[_WORDS:]) >= _BELIEVED:\n", "            if words[0]:\n",
        "tests/scenarios/test_counts.py::test_every_hit_of_every_process_is_counted",
    ),
    Mutant(
        7, "an empty slot does not heal", "_engine/locks/leases.py",
        "                    self._slots.set_id(entry.slot, entry.id)\n                return entry\n",
        "                    return None\n                return entry\n",
        f"{STEPS}test_replace[blob-blob]",
    ),
    Mutant(
        4, "no commit copies the log", "_engine/catalog/connection.py",
        "        if size <= SOFT:\n", "        if size <= 1 << 40:\n",
        f"{WAL}test_many_short_processes_beside_an_idle_one",
    ),
    Mutant(
        4, "a reader that stands still keeps the log from starting again", "_engine/catalog/connection.py",
        "            if size >= RETIRE:", "            if size < 0:",
        f"{WAL}test_a_reader_that_stands_still_is_left_behind",
    ),
    Mutant(
        4, "a checkpoint waits for readers", "_engine/catalog/connection.py",
        "wal_checkpoint(PASSIVE)", "wal_checkpoint(TRUNCATE)",
        f"{WAL}test_a_reader_that_stands_still_is_left_behind",
    ),
    Mutant(
        4, "a log that cannot be bounded is written to", "_engine/catalog/connection.py",
        "        if not self._try_to_bound_locked(size) and size > REFUSE:\n",
        "        if not self._try_to_bound_locked(size) and size < 0:\n",
        f"{WAL}test_nothing_is_written_to_a_log_that_cannot_be_bounded",
    ),
    Mutant(
        4, "what the budget does not count is not shown", "cli/render.py",
        "        self.line(f\"{format_size(sum(overhead.values()))} outside the budget: {parts}\")\n", "",
        "tests/cli/test_overhead.py::test_each_part_keeps_its_bound[0]",
    ),
    Mutant(
        4, "a listing as JSON holds all entries", "cli/render.py",
        '(json.dumps(entry_record(entry)) for entry in entries), "]"', '(json.dumps(entry_record(entry)) for entry in list(entries)), "]"',
        f"{MEMORY}[ls --json]",
    ),
    Mutant(
        4, "names are listed from a list of all", "cache/entries.py",
        "        listings = [self._names_of(space, backwards) for space in self._spaces()]\n",
        "        listings = [iter([*self._names_of(space, backwards)]) for space in self._spaces()]\n",
        f"{MEMORY}[ls -q]",
    ),
    Mutant(
        4, "entries are listed from a list of all", "cache/entries.py",
        "        listings = [self._of(space, backwards) for space in self._spaces()]\n",
        "        listings = [iter([*self._of(space, backwards)]) for space in self._spaces()]\n",
        f"{MEMORY}[ls -q --filter size>1]",
    ),
    Mutant(
        4, "what is sorted stays in memory", "cache/entries.py",
        "            if len(some) >= IN_MEMORY:\n", "            if len(some) < 0:\n",
        f"{MEMORY}[ls -s size]",
    ),
    Mutant(
        4, "a check holds the names of all files", "_engine/check.py",
        "    while some := dict(islice(named, AT_ONCE)):\n", "    while some := dict(named):\n",
        f"{MEMORY}[verify --quick]",
    ),
    Mutant(
        1, "what was read while the log started again is believed", "_engine/catalog/connection.py",
        "            if self._is_current_locked():\n                return rows\n", "            return rows\n",
        f"{WAL}test_a_reader_that_stands_still_is_left_behind",
    ),
    Mutant(
        7, "the index of a log is left behind unmarked", "_engine/catalog/wal.py",
        "            words[0] = _RETIRED\n", "",
        f"{WAL}test_who_has_a_retired_index_can_neither_read_nor_copy_by_it",
    ),
    Mutant(
        7, "a marked index stays", "_engine/catalog/wal.py",
        "        if self.is_retired():\n", "        if not self.index:\n",
        f"{WAL}test_killed_at_each_step_of_leaving_a_reader_behind",
    ),
    Mutant(
        7, "an old journal meets a new catalog", "_engine/catalog/connection.py",
        "            self._root.files.make_way(self._path + ending)\n", "            continue\n",
        "tests/crash/test_creation.py::test_somebody_deletes_a_part_of_it[catalog.sqlite]",
    ),
    Mutant(
        7, "a value that makes way keeps its slot", "_engine/space/eviction.py",
        "            self._slots.clear(slot, id)  # P1 locks and reads",
        "            # P1 locks and reads",
        "tests/engine/space/test_inline_eviction.py::test_who_remembers_what_made_way_finds_nothing",
    ),
    Mutant(
        7, "a replaced entry keeps its slot", "_engine/write/insert.py",
        "        self._slots.clear(old.slot, old.id)\n        txn.leftovers", "        txn.leftovers",
        f"{OTHERS}test_who_remembers_reads_exact_bytes[replace]",
    ),
    Mutant(
        7, "who has the writer lock waits for himself", "_engine/catalog/connection.py",
        "contextlib.nullcontext() if self._writer.is_mine() else self.writer()", "self.writer()",
        f"{WAL}test_who_has_the_writer_lock_goes_on_where_a_killed_one_left_a_marked_index",
    ),
    Mutant(
        7, "who meets the damage second throws a sound catalog away", "_engine/catalog/connection.py",
        "                self._seen = None  # another one may lie there by now, which is sound\n", "",
        "tests/engine/test_damage.py::test_the_second_that_met_the_damage_keeps_what_the_first_began",
    ),
    Mutant(
        7, "an opening connects again at each try", "_engine/catalog/connection.py",
        "        with self._mutex, translated():\n            self._connection_locked()\n",
        "        with self._mutex, translated():\n            self._connect_locked()\n",
        "tests/engine/test_damage.py::test_an_opening_that_takes_two_tries_leaves_no_connection",
    ),
    # 8. A hit takes no lock and no system call
    Mutant(
        8, "a hit asks the kernel", "_engine/index/memo.py",
        "            slot[USED] = now\n", "            slot[USED] = now\n            __import__('os').getppid()\n",
        "tests/engine/test_hit_path.py::test_a_hit_makes_no_system_call",
    ),
    Mutant(
        8, "a hit copies", "_engine/index/memo.py",
        "            return memoryview(entry.view)\n", "            return memoryview(bytes(entry.view))\n",
        "tests/engine/test_hit_path.py::test_two_remembered_hits_are_views_of_the_same_bytes",
    ),
    # 9. Fork, spawn, pickle
    Mutant(
        9, "a lease is closed while the interpreter goes down", "_engine/locks/leases.py",
        "        if not is_finalizing():  # at exit the kernel", "        if is_finalizing:  # at exit the kernel",
        "tests/project/test_finalizers.py::test_a_late_reference_prints_nothing[a lease-here]",
    ),
    Mutant(
        9, "a fork does not wait for the catalog", "_engine/engine.py",
        "        for part in self._forking:\n            part.before_fork()\n",
        "        for part in reversed(self._forking):\n            part.before_fork()\n",
        f"{FORKS}test_s17_a_fork_waits_for_a_transaction_that_takes_locks",
    ),
    Mutant(
        9, "the child has no part in its parent's leases", "_kernel/locks.py",
        "            return fd, _take(fd, {offset: hold for offset, hold in self._held.items() if not hold[1]})\n",
        "            return fd, {}\n",
        f"{FORKS}test_s17_a_lease_pins_for_parent_and_child_alike",
    ),
    Mutant(
        9, "an unlock after a fork by C code drops the parent's lease", "_kernel/locks.py",
        "        while self._later and self._pid == os.getpid() and self", "        while self._later and self",
        f"{FORKS}test_a_fork_by_c_code_is_passed_by",
    ),
    Mutant(
        9, "a child knows the catalogs of its ancestors", "_engine/catalog/peers.py",
        "        _peers.pop(name, None)\n", "        _peers.get(name, None)\n",
        f"{FORKS}test_s17_a_child_knows_no_catalogs_of_its_ancestors",
    ),
    Mutant(
        9, "a fork does not wait for a check of all pages", "_engine/catalog/connection.py",
        "        self._peers.stop_apart()\n        self._close_locked()\n", "        self._close_locked()\n",
        f"{WAL}test_a_check_of_all_pages_stops_and_begins_again[a fork]",
    ),
    Mutant(
        9, "a forked child keeps the connections of its parent open", "remote/http/transfers.py",
        "                        os.dup2(nothing.fileno(), descriptor, inheritable=False)\n",
        "                        continue\n",
        f"{CURL}test_a_child_holds_no_connection_of_its_parent",
    ),
    Mutant(
        9, "a forked child drops a file whose number a connection had", "remote/http/transfers.py",
        "if os.fstat(descriptor).st_ino == inode:", "if os.fstat(descriptor).st_ino:",
        f"{CURL}test_a_descriptor_that_libcurl_closed_is_not_touched",
    ),
    Mutant(
        9, "a forked child frees what libcurl has of its parent", "remote/http/transfers.py",
        "        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))\n", "",
        f"{CURL}test_libcurls_objects_of_the_parent_are_never_freed_in_a_child",
    ),
    Mutant(
        9, "a forked child waits for a thread that reads for its parent", "remote/http/receivers.py",
        "        if self._pid != os.getpid():\n            raise AttemptFailed",
        "        if not self._pid:\n            raise AttemptFailed",
        f"{CURL}test_a_child_waits_for_no_thread_of_its_parent",
    ),
    Mutant(
        9, "a shard is given to all workers of a rank", "adapters/torch/shards.py",
        "own = own[world.worker_of_rank :: world.workers_per_rank]", "own = own[:]",
        f"{SHARDS}test_s17_ranks_and_their_workers_read_each_sample_once",
    ),
    Mutant(
        9, "a shard is given to all ranks", "adapters/torch/shards.py",
        "[world.rank :: world.num_ranks]", "[:]",
        f"{SHARDS}test_s17_ranks_and_their_workers_read_each_sample_once",
    ),
    Mutant(
        9, "a rank takes its part of the shards for that of the process that spawned it", "adapters/torch/shards.py",
        "self._spawned_by.process == os.getpid() and ", "",
        f"{SHARDS}test_ranks_that_are_spawned_with_a_dataset_have_parts_of_their_own",
    ),
    Mutant(
        9, "a spawned worker does not know the rank of its process group", "adapters/torch/shards.py",
        "world = World.detect() if multiprocessing.context.get_spawning_popen() is not None else None", "world = None",
        f"{SHARDS}test_s17_ranks_that_only_a_process_group_knows",
    ),
    Mutant(
        9, "workers that persist stay in the first epoch", "adapters/torch/shards.py",
        "self._shared = torch.zeros(2, dtype=torch.int64).share_memory_()", "self._shared = torch.zeros(2, dtype=torch.int64)",
        f"{SHARDS}test_s17_workers_read_each_sample_once_and_fetch_each_shard_once[fork-persistent workers]",
    ),
    Mutant(
        9, "a state forgets what was put into the buffer", "adapters/torch/shards.py",
        "            at.turns[drawn], at.samples[drawn] = sample.turn, sample.number\n", "",
        f"{SHARDS}test_a_state_leaves_exactly_the_rest",
    ),
    Mutant(
        9, "a state does not count what was drawn", "adapters/torch/shards.py",
        """"sample": self.sample, "drawn": self.drawn}""", """"sample": self.sample, "drawn": 0}""",
        f"{SHARDS}test_a_state_leaves_exactly_the_rest",
    ),
    Mutant(
        9, "a state is resumed by another number of workers", "adapters/torch/shards.py",
        "        self._position.share.check(world)\n", "",
        f"{SHARDS}test_a_state_of_this_process_is_refused_in_several_workers",
    ),
    Mutant(
        9, "a process whose workers iterate has the state of the beginning", "adapters/torch/shards.py",
        "self._shared[_IN_WORKERS] = 1", "pass",
        f"{SHARDS}test_a_process_whose_workers_iterate_has_no_state",
    ),
    # 10. Nobody else's bytes
    Mutant(
        10, "who looks writes into the journal's index", "_engine/catalog/connection.py",
        "mode=ro&readonly_shm=1", "mode=ro",
        "tests/cli/test_looking_changes_nothing.py::test_every_looking_verb[killed]",
    ),
    Mutant(
        10, "what is said shows secrets", "remote/urls.py",
        '    return re.sub(_SECRET, r"\\1...", re.sub(_URL_IN_TEXT, _redacted_url, text))\n', "    return text\n",
        "tests/cli/test_names.py::test_no_output_gives_a_secret_away[warning]",
    ),
    Mutant(
        10, "a password of netrc goes where its host redirects to", "remote/http/exchange.py",
        "        may_use_netrc = endpoint == first or _may_use_netrc(endpoint, first)\n", "        may_use_netrc = True\n",
        "tests/remote/test_http_secrets.py::test_netrc_does_not_go_in_clear",
    ),
    Mutant(
        10, "everybody may read the catalog", "_engine/catalog/connection.py",
        "self._root.files.create(draft, self._root.file_mode)", "self._root.files.create(draft, 0o644)",
        "tests/cache/test_shared_roots.py::test_files_have_the_modes_of_their_root[False-0]",
    ),
    Mutant(
        10, "foreign files are built upon", "_engine/files/root.py",
        "    if others:\n        actual = f", "    if others and directory is None:\n        actual = f",
        "tests/engine/files/test_root.py::test_s15_foreign_files_are_refused_and_left_alone",
    ),
    Mutant(
        10, "a symbolic link is followed", "_kernel/below.py",
        "        fd = _open_at_once(os.fspath(path), flags)\n",
        "        fd = os.open(path, flags & ~os.O_NOFOLLOW)\n",
        f"{FAULTS}test_s03_a_damaged_blob_is_never_served[a link elsewhere]",
    ),
    Mutant(
        10, "a symbolic link in the place of a directory is followed", "_kernel/below.py",
        "437, -100, 0x04", "437, -100, 0x00",
        "tests/kernel/test_below.py::test_what_lies_behind_a_link_is_not_removed",
    ),
    Mutant(
        10, "a group's root is taken by one that did not ask for it", "_engine/files/root.py",
        "    if root.shared and not shared:\n", "    if root.shared and shared is None:\n",
        "tests/cache/test_shared_roots.py::test_a_groups_root_is_opened_by_those_who_ask_for_one",
    ),
    Mutant(
        1, "what rotted in a partial is published", "_engine/files/stages.py",
        " and xxhash.xxh3_128_digest(data) == seen.sum_of(chunk):", ":",
        "tests/engine/files/test_stages.py::test_what_rotted_in_a_partial_is_fetched_again",
    ),
    Mutant(
        10, "a suffix of the catalog is believed", "_engine/catalog/checked.py",
        "        and (not row[12] or is_suffix(row[12]))\n", "",
        "tests/engine/catalog/test_forged_rows.py::test_a_forged_row_is_set_aside[a suffix that leads out]",
    ),
    Mutant(
        10, "the name of a file in a tree is believed", "_engine/catalog/entries.py",
        "    if not all(checked.is_member(row[-1]) for row in linked):\n", "    if not linked:\n",
        "tests/engine/catalog/test_forged_rows.py::test_the_name_of_a_file_in_a_tree_leads_not_out_of_it",
    ),
    Mutant(
        10, "another user's root is taken", "_engine/files/root.py",
        "    if status.st_uid == os.geteuid() or (", "    if status.st_uid >= 0 or (",
        "tests/engine/files/test_root.py::test_a_root_of_another_user_is_refused",
    ),
    Mutant(
        10, "a mark is written over whatever is there", "directories/uploading.py",
        'if_none_match="*" if self._marked is None else None, if_match=self._marked)', "if_match=None)",
        "tests/directories/test_uploading.py::test_two_uploads_at_once[local_folder]",
    ),
    Mutant(
        10, "an update of metadata writes over another's", "directories/metadata.py",
        "    if store.keeps:\n        yield", "    if not store.keeps:\n        yield",
        "tests/directories/test_metadata.py::test_no_update_is_lost_on_one_node",
    ),
    Mutant(
        10, "a private copy replaces the user's file", "directories/copying.py",
        'if check and (not self._overwrite or what == "a directory"):', 'if check and what == "a directory":',
        "tests/directories/test_copying.py::test_a_file_that_is_not_ours_is_not_overwritten[edited]",
    ),
    Mutant(
        10, "a private copy follows a link out of its directory", "directories/copying.py",
        "        return path.lstat()\n", "        return path.stat()\n",
        "tests/directories/test_copying.py::test_links_in_the_target_are_not_followed[link]",
    ),
    Mutant(
        10, "whatever a listing names is built", "directories/manifests.py",
        "        wrong = _wrong(name)\n", '        wrong = ""\n',
        "tests/directories/test_directories.py::test_a_hostile_name[arrow-up]",
    ),
    Mutant(
        10, "members of a tar may lead out of it", "sources/tar_index.py",
        'and b".." not in name.split(b"/")',
        "",
        "tests/remote/test_hostile_listings.py::test_members_that_lead_out",
    ),
    Mutant(
        10, "another's rollback journal is played back", "_engine/catalog/connection.py",
        "            got = guard.try_lock(_RESERVED, exclusive=False)", "            got = False",
        f"{STRANGE}test_nor_one_that_comes_a_moment_later",
    ),
    Mutant(
        10, "a lease of another root is linked by its number", "_engine/locks/leases.py",
        ' and lease.path == self._root.blob_name(lease.entry.id, lease.entry.suffix)\n', "\n",
        "tests/engine/write/test_reservations.py::test_what_is_leased_in_another_root_is_not_linked",
    ),
    Mutant(
        10, "the value of a header begins another one", "remote/http/handles.py",
        "    if not _NAME.fullmatch(name) or any(", "    if not _NAME.fullmatch(name) and any(",
        "tests/remote/test_curl_wire.py::test_a_header_that_would_begin_another_is_not_sent",
    ),
    Mutant(
        10, "a request goes through a proxy that was not chosen for it", "remote/http/handles.py",
        """        curl.setopt(pycurl.PROXY, proxy)  # "": none, not that of the environment\n""",
        "        curl.setopt(pycurl.PROXY, proxy or None)\n",
        "tests/remote/test_curl_wire.py::test_the_environment_names_no_proxy_here",
    ),
    # 11. Nobody waits in silence
    Mutant(
        11, "who waits for a directory does not say so", "directories/trees.py",
        "timeout=self._options.timeout, on_wait=self._options.on_wait):", "timeout=self._options.timeout):",
        "tests/directories/test_directories.py::test_who_waits_says_so",
    ),
    Mutant(
        11, "waiting is not said", "_kernel/waits.py",
        '            log.warning("waiting %.0f s', '            log.debug("waiting %.0f s',
        f"{FAULTS}test_s08_a_stopped_fetcher_is_named",
    ),
    Mutant(
        11, "a time-out is not kept", "_kernel/waits.py",
        "        if waited >= self.timeout:\n",
        "        if waited >= self.timeout * 1e6:\n",
        f"{FAULTS}test_s08_a_stopped_fetcher_is_named",
    ),
    # Packs: of invariants 1, 4, 5 and 7
    Mutant(
        1, "a slot is filled before its record is written", "_engine/packs/pack.py",
        "        host.pwritev(appender.fd, (pack_records",
        "        host.set_word(self._cells, slot, pack_records.word_of(appender.number, tail))\n"
        "        host.pwritev(appender.fd, (pack_records",
        "tests/crash/test_packs.py::test_the_first_put",
    ),
    Mutant(
        1, "a slot is filled without a second look", "_engine/packs/pack.py",
        "            if self._cells[slot]:\n                return False\n",
        "",
        "tests/engine/packs/test_pack.py::test_who_comes_second_between_the_look_and_the_store",
    ),
    Mutant(
        1, "a record of any slot is taken", "_engine/files/pack_records.py",
        "    if owner != slot or start + length > len(segment) or check",
        "    if start + length > len(segment) or check",
        "tests/engine/packs/test_pack.py::test_a_forged_word_leads_to_nothing",
    ),
    Mutant(
        1, "a record may end behind its segment", "_engine/files/pack_records.py",
        "or start + length > len(segment) or check",
        "or check",
        "tests/engine/packs/test_pack.py::test_no_flipped_bit_of_a_header_passes",
    ),
    Mutant(
        1, "what another boot wrote is believed", "_engine/files/pack_records.py",
        "    if (verify or boot != boot_tag()) and",
        "    if verify and",
        "tests/engine/packs/test_pack.py::test_what_another_boot_wrote_is_compared_with_its_checksum",
    ),
    Mutant(
        6, "a file of a policy is mapped though it is too short", "_engine/index/adaptive.py",
        "            if os.fstat(fd).st_size != _SIZE:", "            if fd < 0:",
        "tests/engine/space/test_adaptive.py::test_whatever_became_of_the_file_the_next_process_goes_on[make_short]",
    ),
    Mutant(
        6, "an entry that noise puts on trial breaks the call", "_engine/index/adaptive.py",
        "        except (CacheFault, OSError, IndexError, ValueError):", "        except KeyError:",
        "tests/engine/space/test_adaptive.py::test_what_noise_puts_on_trial_is_passed_by",
    ),
    Mutant(
        6, "an entry that was used again goes as if it were on trial", "_engine/index/adaptive.py",
        "words[base] == trial.id and words[base + 1] == trial.used", "words[base] == trial.id",
        "tests/engine/space/test_adaptive.py::test_what_was_used_again_is_no_longer_on_trial",
    ),
    Mutant(
        6, "a full space follows LRU until its ghosts differ", "_engine/index/ghosts.py",
        " or (words[_LEADER] == UNDECIDED and self.capacity and words[_COUNT] >= _ENOUGH)", "",
        "tests/engine/index/test_ghosts.py::test_a_scan_as_heavy_as_the_uses_of_the_hot_set_costs_two_percent_of_its_hits_at_most[200-1.2]",
    ),
    Mutant(
        6, "ghosts with damaged words never come round", "_engine/index/ghosts.py",
        "return shift > _MOST_SHIFT or not hash >> 64 - shift", "return not hash >> 64 - min(shift, _MOST_SHIFT)",
        "tests/engine/space/test_adaptive.py::test_words_of_noise_mislead_for_a_while_only",
    ),
    Mutant(
        1, "a hint of a length is believed though it proves nothing", "_engine/packs/segments.py",
        "                if hint >> bits != hash((key, word, length)) & proofs or end > limit:", "                if end > limit:",
        "tests/engine/packs/test_pack.py::test_a_hint_of_a_length_is_believed_only_where_it_proves_itself[one byte more]",
    ),
    Mutant(
        1, "a hint of a length leads out of its segment", "_engine/packs/segments.py",
        "                if hint >> bits != hash((key, word, length)) & proofs or end > limit:",
        "                if hint >> bits != hash((key, word, length)) & proofs:",
        "tests/engine/packs/test_pack.py::test_a_hint_of_a_length_is_believed_only_where_it_proves_itself[beyond the segment]",
    ),
    Mutant(
        1, "a hint of a length of another boot is believed", "_engine/files/pack_records.py",
        "    return boot_tag() << 32 | seed_of(pack)\n", "    return seed_of(pack)\n",
        "tests/engine/packs/test_pack.py::test_what_another_boot_wrote_is_compared_with_its_checksum",
    ),
    Mutant(
        4, "segments are not charged", "_engine/catalog/segments.py",
        "    _charge(txn, segment.pack, segment.number, segment.size)\n",
        "",
        "tests/engine/packs/test_pack.py::test_what_is_counted_is_what_is_there",
    ),
    Mutant(
        4, "the tails of the dead are not given back", "_engine/space/segment_tails.py",
        "        return any(self.is_left(segment) for segment in segments.owned(txn))",
        "        return False",
        "tests/crash/test_packs.py::test_a_writer_that_needs_what_stands_empty_behind_the_dead",
    ),
    Mutant(
        1, "a dead writer's segment is written over", "_engine/files/pack_files.py",
        "    last, slot = max(",
        "    last, slot = min(",
        "tests/crash/test_packs.py::test_the_next_writer_goes_on_where_the_dead_one_was",
    ),
    Mutant(
        1, "a living handle's segment is taken over", "_engine/space/segment_tails.py",
        "            return self._taken.get((segment.pack, segment.number)) not in self._in_use\n",
        "            return True\n",
        "tests/engine/packs/test_pack.py::test_two_handles_of_a_process_append_apart",
    ),
    # Loading ahead
    Mutant(
        4, "members of a shard that is kept are stored once more", "prefetch/loader.py",
        "        if not isinstance(data, Lease) and self._config.is_kept(ref.key):  # by this very read\n", "        if False:\n",
        "tests/sources/test_tars.py::test_members_of_a_shard_that_is_kept_are_not_stored_once_more",
    ),
    Mutant(
        3, "a shard is served in its old version for ever", "sources/shards.py",
        "origin is None or origin.offline or time.monotonic_ns() - known.at < origin.max_age", "True",
        "tests/sources/test_tars.py::test_a_shard_that_is_kept_is_served_until_its_period_ends",
    ),
    Mutant(
        11, "an order that is not kept stops the look-ahead", "prefetch/ahead.py",
        "                if self._ahead:\n                    self._pass(self._ahead[0])\n", "                pass\n",
        f"{AHEAD}test_an_order_that_is_not_kept_costs_only_the_look_ahead",
    ),
    Mutant(
        4, "what is not used soon is stored all the same", "prefetch/objects.py",
        "Wanted(target, options, self._number, leased=stores, spills=True, stores=load.stores,",
        "Wanted(target, options, self._number, leased=True, spills=True,",
        f"{KNOWN}test_what_is_not_used_soon_is_not_stored",
    ),
    Mutant(
        4, "a load that is not to be stored is, if its caller comes first", "prefetch/objects.py",
        "self.read(load.key, stores=load.stores)", "self.read(load.key)",
        f"{KNOWN}test_what_is_not_to_be_stored_is_not_if_its_caller_comes_first",
    ),
    Mutant(
        6, "what is dismissed goes only while bimodal insertion leads", "_engine/index/adaptive.py",
        "(ring is self._dismissed or self._is_a_trial_over())", "self._is_a_trial_over()",
        "tests/engine/space/test_adaptive.py::test_what_is_dismissed_goes_first_whatever_leads[lru]",
    ),
    Mutant(
        6, "what a dead look-ahead wanted is kept for it", "_engine/index/orders.py",
        "if locked and locks.locked_at(fd, 0, 1) is None:", "if locked and locks.locked_at(fd, 0, 1) is None and number > TABLES:",
        "tests/engine/index/test_orders.py::test_what_a_killed_process_wanted_is_wanted_no_more",
    ),
    Mutant(
        6, "a look-ahead that stands still keeps entries for ever", "_engine/index/orders.py",
        "if not 0 <= now - moved < STALE:", "if moved > now:",
        "tests/engine/index/test_orders.py::test_a_look_ahead_that_stands_still_wants_nothing_after_a_while",
    ),
    Mutant(
        4, "what another look-ahead uses next is not stored", "prefetch/ahead.py",
        "        return self._read + turns if turns < NEVER else NEVER\n", "        return NEVER\n",
        f"{KNOWN}test_two_look_aheads_keep_what_the_other_uses_next",
    ),
    Mutant(
        4, "a look-ahead knows no bounds", "prefetch/ahead.py",
        "            if (is_enough or self._in_memory >= _IN_MEMORY) and self._ahead:\n", "            if False:\n",
        f"{AHEAD}test_the_window_bounds_what_is_ahead",
    ),
    Mutant(
        5, "a loaded object is not held by its lazy", "prefetch/objects.py",
        "                ref.lease, lease = lease, None\n", "                pass\n",
        f"{OBJECTS}test_a_lazy_holds_its_object_until_it_is_read",
    ),
    Mutant(
        4, "objects without room fill the memory", "prefetch/objects.py",
        "len(self._under_way) - len(self._in_memory)", "len(self._under_way)",
        f"{OBJECTS}test_without_room_a_few_objects_wait_in_memory",
    ),
    Mutant(
        4, "an object that never fits occupies a place", "prefetch/objects.py",
        "self._store.keeps and size <= self._store.spaces.limits(URLS)[0]", "self._store.keeps",
        f"{OBJECTS}test_an_object_larger_than_the_cache_occupies_no_place",
    ),
    Mutant(
        4, "what never fits is fetched again at its turn", "prefetch/objects.py",
        "may_wait or (self._in_turn and request.data is not None)", "may_wait",
        f"{AHEAD}test_what_is_too_large_for_the_cache_waits_in_memory_for_its_turn",
    ),
    Mutant(
        2, "what another process fetches is not looked for again", "prefetch/objects.py",
        "            self._queued.extend(again)\n", "            self._queued.clear()\n",
        f"{OBJECTS}test_what_another_process_fetches_is_waited_for",
    ),
    Mutant(
        9, "a child keeps what its parent was fetching", "prefetch/objects.py",
        "            if not load.is_settled:\n                load.state = State.QUEUED\n",
        "            if False:\n                load.state = State.QUEUED\n",
        f"{OBJECTS}test_after_a_fork_both_processes_go_on",
    ),
    Mutant(
        3, "a stream takes an old object for a fresh one", "prefetch/__init__.py",
        "URLS, FOREVER if self._origin.offline else self._origin.max_age", "URLS, FOREVER",
        f"{OBJECTS}test_what_changed_is_noticed_once_in_a_period",
    ),
    Mutant(
        11, "objects of a bulk fetch that breaks are waited for", "prefetch/objects.py",
        "            for load in live(lost):\n", "            for load in live([]):\n",
        f"{OBJECTS}test_a_bulk_fetch_that_breaks_leaves_its_objects_to_the_callers",
    ),
    Mutant(
        2, "what another call fetches is not looked for again, to be linked", "prefetch/linked_objects.py",
        "            self._queue.look_elsewhere()\n", "            pass\n",
        f"{LINKED}test_what_another_call_fetches_is_waited_for_and_others_go_on",
    ),
    Mutant(
        3, "a copy from before a version was named is taken for that version", "prefetch/loads.py",
        "options._replace(since=self._since)", "options._replace(since=1)",
        "tests/scenarios/test_linked_items.py::test_what_changed_is_fetched",
    ),
    Mutant(
        4, "an object does not make way for its own second name", "prefetch/writer.py",
        "                return self._copy(item) and self._reserve(item)\n", "                pass\n",
        "tests/scenarios/test_linked_items.py::test_where_two_names_have_no_room_the_bytes_are_taken",
    ),
    Mutant(
        2, "what is not kept in the prefetcher's space is fetched past `urls`", "prefetch/loads.py",
        "return self.origin.direct(target, options) if self.origin.closed else", "return self.origin.direct(target, options) if True else",
        f"{LINKED}test_what_a_frozen_prefetcher_does_not_admit_is_fetched_once",
    ),
    Mutant(
        11, "a load whose process died waits for room that nobody asks for", "prefetch/load_queue.py",
        "                elif need is not None:\n", "                elif need is not None or load.busy_since is not None:\n",
        f"{LINKED}test_a_killed_process_leaves_its_objects_to_the_others",
    ),
    Mutant(
        2, "who waited for another's read reads again", "prefetch/loader.py",
        "        try:\n            lease = self._store.take(space, name)\n",
        "        try:\n            lease = None\n",
        "tests/scenarios/test_prefetch.py::test_s06_thirty_two_want_one_item",
    ),
    Mutant(
        2, "a failed load is told to nobody else", "prefetch/loader.py",
        "            self._store.locks.note_failure(self._config.space, ref.name, error)\n", "",
        "tests/scenarios/test_prefetch.py::test_s06_a_failure_reaches_all_who_wait",
    ),
    Mutant(
        1, "a stream believes that what it looked for is still there", "prefetch/__init__.py",
        "        if data is None and not self.closed:\n            return self.get_lazy(key).get()\n", "        data = data or b\"\"\n",
        "tests/prefetch/test_prefetch.py::test_what_goes_between_the_look_ahead_and_its_turn_is_read_from_the_source[evicted]",
    ),
    Mutant(
        4, "a pool that keeps nothing streams without leases", "prefetch/__init__.py",
        "        if not self._options[\"keep\"]:  # such", "        if False:  # such",
        "tests/prefetch/test_prefetch.py::test_a_stream_of_a_pool_that_keeps_nothing_removes_what_others_kept",
    ),
    Mutant(
        3, "items without a version outlive those who use them", "prefetch/__init__.py",
        "        bound = version is None and self._bound is not self._digest\n", "        bound = False\n",
        "tests/prefetch/test_prefetch.py::test_without_a_version_items_go_with_the_processes_that_use_them",
    ),
    Mutant(
        4, "a size that is told is not reserved", "prefetch/loads.py",
        "        return self.need_of(self.largest if load.size is None else load.size)\n", "        return self.need_of(self.largest)\n",
        "tests/prefetch/test_prefetch.py::test_a_size_that_is_told_is_reserved_before_the_read",
    ),
    Mutant(
        4, "bytes that are left of a promise are lost", "_engine/write/reservations.py",
        "        if left == NOTHING:", "        if not left.entries:",
        "tests/prefetch/test_prefetch.py::test_items_of_many_sizes_are_all_kept",
    ),
    Mutant(
        9, "a child waits for what its parent was reading", "prefetch/load_queue.py",
        "            elif not load.is_settled:\n                load.state",
        "            elif load.is_waiting:\n                load.state",
        "tests/scenarios/test_prefetch.py::test_s17_forked_while_loads_are_pending",
    ),
    Mutant(
        9, "a child that only gets keeps nothing", "prefetch/loader.py",
        "        self._start_threads()  # in a child of a fork there are none, and what is read is to be stored\n", "",
        "tests/scenarios/test_prefetch.py::test_s17_forked_while_loads_are_pending",
    ),
    Mutant(
        11, "nobody is told that a load is done", "prefetch/load_queue.py",
        "        if state is not State.LOADING and load.waiters:\n            self._settled.notify_all()\n", "",
        "tests/prefetch/test_prefetch.py::test_running_it_is_waited_for",
    ),
    Mutant(
        2, "what is to be read is not looked for under its key's lock", "prefetch/writer.py",
        "[load.name for load in lookup.loads])", "[load.name for load in lookup.loads if load not in lookup.needs])",
        "tests/prefetch/test_prefetch.py::test_each_item_is_read_once_by_two_pools",
    ),
    Mutant(
        4, "what is promised ahead does not count against a quota", "_engine/write/reservations.py",
        "return SpaceRequest(self._space.id, key, 0, need.size, charged", "return SpaceRequest(self._space.id, key, 0, 0, charged",
        "tests/engine/write/test_reservations.py::test_a_promise_counts_against_the_limits_of_its_space",
    ),
    Mutant(
        4, "an older promise grows beside a younger one unseen", "_engine/catalog/reservations.py",
        "AND (granted OR ?2 = 0 OR id < ?2)", "AND (?2 = 0 OR id < ?2)",
        "tests/engine/write/test_reservations.py::test_a_promise_counts_against_the_limits_of_its_space",
    ),
    Mutant(
        5, "a small value goes though it is leased", "_engine/space/eviction.py",
        "            if not free or not entries.drop_value(txn, id):\n", "            if not entries.drop_value(txn, id):\n",
        "tests/engine/write/test_reservations.py::test_a_small_value_that_is_leased_makes_no_way",
    ),
    Mutant(
        7, "what a dead process was promised stays promised", "_engine/catalog/reservations.py",
        "AND (granted = 0 OR keyhash = 0)", "AND granted = 0",
        "tests/engine/write/test_reservations.py::test_a_dead_process_has_no_promise",
    ),
    Mutant(
        7, "items outlive their session", "_engine/catalog/entries.py",
        "SET life = 'held' WHERE validator", "SET life = 'cached' WHERE validator",
        "tests/engine/write/test_reservations.py::test_a_session_takes_its_entries_along",
    ),
    Mutant(
        4, "the room of what is read and not kept is lost", "prefetch/load_queue.py",
        "            self._room.release(item)\n            if load is not None and", "            if load is not None and",
        "tests/scenarios/test_prefetch.py::test_s30_lazies_dropped_at_random_moments[scratch-hasty-4]",
    ),
    Mutant(
        11, "who waits until an item is stored is not told that it will not be", "prefetch/load_queue.py",
        "                    self._drop(load, fault, item.data)\n", "                    continue\n",
        "tests/prefetch/test_prefetch.py::test_warm_ends_though_the_cache_fails_while_it_stores",
    ),
    Mutant(
        11, "a head that comes byte by byte has no end", "remote/http/handles.py",
        "        self.connected = self.answered = True\n",
        "        self.connected, self.answered, self.heard = True, True, time.monotonic()\n",
        "tests/remote/test_time_limits.py::test_a_head_has_the_read_timeout_in_all[continue]",
    ),
    Mutant(
        11, "a wait for a connection is not logged", "_engine/index/limits.py",
        "        if now >= self._say_at:\n", "        if now < 0:\n",
        f"{LIMITS}test_a_wait_is_logged",
    ),
    # 12. A call gets its own output
    Mutant(
        12, "a hit is not asked of which arguments it is", "tasks/cached.py",
        "hit = self._values.look(key, digest, ", "hit = self._values.look(key, None, ",
        "tests/tasks/test_cached.py::test_what_was_stored_under_other_arguments_is_a_miss",
    ),
    Mutant(
        12, "calls that share a tag share a failure", "tasks/values.py",
        'self.call = key if digest is None or key.endswith(digest) else f"{key} {digest}"', "self.call = key",
        "tests/tasks/test_cached.py::test_what_another_call_of_the_same_tag_raises_is_its_own",
    ),
    Mutant(
        12, "values are written without their length", "tasks/hashing.py",
        'return b"%b%x:%b" % (mark, length, data)', "return mark + bytes(data)",
        "tests/tasks/test_hashing.py::test_values_do_not_run_into_each_other",
    ),
    Mutant(
        12, "sets and dicts are written as they come", "tasks/hashing.py",
        "ordered = sorted(parts)", "ordered = list(parts)",
        "tests/tasks/test_hashing.py::test_s35_digests_agree_in_every_process",
    ),
    Mutant(
        12, "the names of parameters do not count", "tasks/binding.py",
        'self._head = "\\0".join(self._names).encode("utf-8", "surrogatepass") + b"\\0\\0"', 'self._head = b""',
        "tests/tasks/test_naming.py::test_a_digest_is_of_names_too",
    ),
    Mutant(
        12, "what a function closes over does not count", "tasks/hashing.py",
        "    if function.__closure__:\n", "    if not function:\n",
        "tests/tasks/test_cached.py::test_functions_of_one_name_stay_apart",
    ),
    Mutant(
        12, "the code of a lambda does not count", "tasks/hashing.py",
        'out = b"" if function.__name__ != "<lambda>" else _code(function, by_source)', 'out = b""',
        "tests/tasks/test_hashing.py::test_what_tells_functions_of_one_name_apart",
    ),
    Mutant(
        12, "a function is known by its name alone", "tasks/binding.py",
        "prefix = prefix_of(self.identity, None, code.digest)", "prefix = prefix_of(self.identity, None)",
        f"{IDENTITY}test_two_scripts_of_one_name_have_results_of_their_own[]",
    ),
    Mutant(
        12, "the functions that a function uses do not count", "tasks/identity.py",
        'return b"".join((*code, ', 'return b"".join((*(part[:0] for part in code), ',
        f"{IDENTITY}test_what_makes_another_function[return x + 1-return x + 2]",
    ),
    Mutant(
        12, "the constants that a function uses do not count", "tasks/identity.py",
        "        return _lasting(value, by_source)\n", '        return b""\n',
        f"{IDENTITY}test_what_makes_another_function[SCALE = 2-SCALE = 3]",
    ),
    Mutant(
        12, "a list that names another one does not count", "tasks/identity.py",
        " or _as_written(literals, lived_in, one, known)}", "}",
        f"{IDENTITY}test_what_a_function_reaches_by_a_name_counts",
    ),
    Mutant(
        12, "a file that was edited since is believed", "tasks/code.py",
        "if shape_of(function.code) == shape_of(code)]", "if function]",
        f"{IDENTITY}test_a_file_that_was_edited_since_is_not_believed",
    ),
    Mutant(
        12, "who sends a function is believed whatever runs here", "tasks/identity.py",
        "if _mark(functions, uses, sent.names) == sent.mark:", "if sent.mark:",
        f"{IDENTITY}test_who_sends_a_function_tells_its_code",
    ),
    Mutant(
        12, "who sends a function is believed where a list differs", "tasks/identity.py",
        "(content or _lasting(value, False, lasting_within))", "content",
        f"{IDENTITY}test_who_sends_a_function_is_not_believed_where_a_list_differs",
    ),
    Mutant(
        12, "what an inner decorator is given does not count", "tasks/hashing.py",
        'if function.__closure__ or "<" in function.__code__.co_qualname:', 'if "<" in function.__qualname__:',
        f"{IDENTITY}test_what_an_inner_decorator_is_given_counts",
    ),
    Mutant(
        12, "what a helper brings does not count", "tasks/identity.py",
        "*(brought(one, by_source) for one in chain)", "*()",
        f"{IDENTITY}test_what_the_decorators_of_a_helper_are_given_counts",
    ),
    Mutant(
        12, "who computes gets what he made", "tasks/values.py",
        "            self.result = hit\n", "            pass\n",
        "tests/tasks/test_cached.py::test_who_computes_gets_what_a_hit_gives[False-10]",
    ),
    Mutant(
        12, "versions share a key", "tasks/binding.py",
        "prefix_of(self.identity, self.version)", "prefix_of(self.identity, None)",
        "tests/tasks/test_cached.py::test_versions_are_kept_apart",
    ),
    Mutant(
        12, "a script is __main__ to its children, too", "tasks/naming.py",
        "    if module not in SCRIPT:\n", "    if module:\n",
        "tests/tasks/test_naming.py::test_s35_a_script_and_its_children_agree",
    ),
    Mutant(
        12, "a tag that matches in part is replayed", "tasks/config.py",
        "pattern.fullmatch(tag)", "pattern.match(tag)",
        "tests/tasks/test_config.py::test_what_is_replayed",
    ),
    # What calls keep, by the invariants above
    Mutant(
        7, "an undecodable value stays", "tasks/values.py",
        "                self._discard(store, key, hit)\n        except", "                pass\n        except",
        f"{TASKS}test_a_damaged_row_is_a_miss_and_cleared_away[True]",
    ),
    Mutant(
        10, "a class that is not there is damage", "tasks/values.py",
        "        except (AttributeError, ImportError) as error:\n", "        except KeyboardInterrupt as error:\n",
        f"{TASKS}test_a_class_that_is_not_there_is_a_miss_and_stays",
    ),
    Mutant(
        10, "any codec reads what is there", "tasks/values.py",
        "        if codec != self.codec.name:\n", "        if codec is None:\n",
        f"{TASKS}test_what_another_codec_stored_is_a_miss_and_stays",
    ),
    Mutant(
        10, "what others can write is unpickled by default", "codecs/__init__.py",
        '"pytree" if others_can_write else "pickle"', '"pickle"',
        "tests/cache/test_shared_roots.py::test_a_pickle_of_anothers_is_a_miss",
    ),
    Mutant(
        10, "a cluster's tasks are pickled in a root that others can write to", "adapters/ray/tasks.py",
        "default_codec(others_can_write=origin_of(cache).others_can_write)", "default_codec(others_can_write=False)",
        "tests/adapters/ray/test_ray_shared.py::test_tasks_of_a_cluster",
    ),
    Mutant(
        10, "copies of pickles are left where others can write", "adapters/ray/sessions.py",
        'if location.codec == "pickle" and origin_of(cache).others_can_write:', "if False:",
        "tests/adapters/ray/test_ray_shared.py::test_a_node_whose_own_cache_is_a_groups_copies_no_pickles[pickle]",
    ),
    Mutant(
        10, "a spilled object is taken back whatever it has become", "prefetch/__init__.py",
        "(seal and _seal(data) != seal)", "seal is None",
        "tests/cache/test_shared_roots.py::test_a_spilled_object_is_known_again_by_who_spilled_it[10]",
    ),
    Mutant(
        12, "a tag may show where an object lies", "tasks/binding.py",
        "        if _ADDRESS.search(text):\n", "        if not text:\n",
        "tests/tasks/test_naming.py::test_the_address_of_what_lies_within_is_refused_too",
    ),
    Mutant(
        10, "every pickle of a directory is taken over", "tasks/__init__.py",
        "if _NAME.fullmatch(item.name) and item", "if item.name and item",
        f"{TASKS}test_a_directory_of_chia_is_taken_over",
    ),
    Mutant(
        6, "those who wait make in turns what cannot be kept", "tasks/values.py",
        "            values.origin.store.locks.note_failure(values.space, self.call, errors.CacheFault(NOT_KEPT, key=self._key))\n",
        "            pass\n",
        f"{TASKS}test_where_it_cannot_be_kept_those_who_waited_make_it_side_by_side",
    ),
    Mutant(
        12, "a value comes without its digest", "tasks/values.py",
        'life="pinned" if pin else "cached", meta=self._meta(digest))', 'life="pinned" if pin else "cached", meta=self._meta(""))',
        "tests/crash/test_tasks.py::test_a_failed_replacement_keeps_the_old_value[row-row]",
    ),
    Mutant(
        4, "a quota gives up ahead", "_engine/space/inline_eviction.py",
        "(short.quota, short.here) if of_space", "(short.quota + self._ahead(request, short), short.here) if of_space",
        f"{TASKS}test_the_least_recently_used_goes_first_also_after_a_restart",
    ),
    Mutant(
        4, "what the dead left fills a quota", "_engine/space/budget.py",
        "            self._take_partials(txn, need, freed, partials, only=space.id)\n", "",
        "tests/crash/test_tasks.py::test_values_make_way_under_a_budget",
    ),
    Mutant(
        4, "who may wait for others' writes does not", "_engine/space/budget.py",
        "        if not attempt.contended or time", "        if attempt.contended or time",
        f"{TASKS}test_writers_take_turns_where_the_budget_holds_few",
    ),
    # 13. A directory has one job
    Mutant(
        13, "two programs of one step are one job", "claims/jobs.py",
        "(_launched(world) if world.ranks_per_node > 1 else None)", "_launched(world)",
        f"{JOBS}test_a_rank_alone_is_its_process",
    ),
    Mutant(
        13, "whoever started the ranks' launcher names their job", "claims/jobs.py",
        " and info.num_ranks == world.num_ranks:", ":",
        f"{JOBS}test_a_launcher_of_something_else_does_not_name_the_job",
    ),
    Mutant(
        13, "a restart is taken for those who are being killed", "world/launchers.py",
        " restart {restart}\" if run else None", "\" if run else None",
        f"{JOBS}test_another_run_is_another_job",
    ),
    Mutant(
        13, "a directory that another job has is not looked at", "claims/registry.py",
        "records.may_overlap(data, queried)", "False",
        f"{REGISTRY}test_the_error_has_both_claims_as_values",
    ),
    Mutant(
        13, "who only reads shares what comes from elsewhere", "claims/conflicts.py",
        "ours.shared and ours.remote == theirs.remote", "ours.shared",
        "tests/scenarios/test_claims.py::test_s07_who_only_reads_may_share",
    ),
    Mutant(
        13, "marks forget what lies above", "claims/records.py",
        "frozenset(own | above)", "frozenset(own)",
        "tests/claims/test_claimed_paths.py::test_marks_miss_nothing",
    ),
    Mutant(
        13, "a number that was used again is still the old directory", "claims/conflicts.py",
        "if meets(mine.directory, _current(theirs, other.directory)):", "if True:",
        f"{REGISTRY}test_a_directory_that_was_removed_and_its_number_given_away_is_no_conflict",
    ),
    Mutant(
        10, "a claim that another user planted is joined", "claims/claim_files.py",
        "if os.fstat(fd).st_uid != os.geteuid():", "if False:",
        f"{REGISTRY}test_a_file_of_another_users_in_a_claim_is_not_opened",
    ),
    Mutant(
        13, "who is being killed is in the way", "claims/inspect.py",
        "if not self.led or self._is_leader_dying():", "if False:",
        f"{REGISTRY}test_a_killed_leader_is_waited_for_until_the_last_of_it_is_gone",
    ),
    Mutant(
        13, "ranks wait for a leader that was refused", "claims/registry.py",
        "locked.refuse(request, obstructed.error)", "pass",
        f"{REGISTRY}test_the_other_ranks_are_told_of_a_conflict_at_once",
    ),
    Mutant(
        13, "a child goes on as its parent", "claims/members.py",
        "os.close(parents_fd)  # never unlocked: that lock is the parent's", "pass",
        f"{MEMBERS}test_a_child_holds_nothing_of_its_parents",
    ),
    Mutant(
        13, "a child forked in between keeps a lock", "claims/processes.py",
        "            self.close(fd)  # never unlocked: the locks are the parent's", "            pass",
        "tests/crash/test_claims.py::test_a_child_forked_at_each_step_holds_nothing",
    ),
    Mutant(
        13, "an exit is taken for a death", "claims/members.py",
        "self._table.set_state(self.slot, LEFT)", "pass",
        f"{MEMBERS}test_an_exit_is_told_from_a_death",
    ),
    Mutant(
        13, "what is beside a claim stays", "claims/registry.py",
        "claim_files.remove_external(directory)", "pass",
        "tests/crash/test_claims.py::test_what_is_beside_a_claim_goes_with_it",
    ),
    Mutant(
        13, "a worker that ends gives up the directories of its job", "adapters/streaming/prefix.py",
        "private=not is_leader", "private=False",
        f"{STREAMING}test_a_copy_that_came_by_pickle",
    ),
    Mutant(
        13, "a clean-up removes what a job of Streaming has", "adapters/streaming/names.py",
        "return False  # it is in use; or", "return True  # it is in use; or",
        f"{STREAMING}test_the_directory_of_a_plain_job",
    ),
    Mutant(
        13, "a number is taken that a job of Streaming has", "adapters/streaming/names.py",
        "return not any(map(os.path.lexists, paths_of(prefix)))", "return not os.path.lexists(paths_of(prefix)[0])",
        f"{STREAMING}test_a_number_of_which_anything_is_there_is_not_taken",
    ),
    Mutant(
        13, "a barrier lets through who waits with the dead", "claims/barriers.py",
        "if 0 not in seats and self._all_live(seats):", "if 0 not in seats:",
        f"{BARRIERS}test_ranks_that_join_later_are_told_of_no_earlier_death",
    ),
    Mutant(
        13, "seats of the round before the last are taken", "claims/barriers.py",
        "        self._clear_locked(after)\n", "",
        f"{BARRIERS}test_nobody_is_a_round_ahead",
    ),
    Mutant(
        13, "who died on his way to a barrier is waited for", "claims/barriers.py",
        "missed = [*dead, *snapshot.occupants(seat for seat in previous if not seat & DEAD)]", "missed = [*dead]",
        f"{BARRIERS}test_a_rank_that_crossed_a_barrier_is_killed_on_its_way",
    ),
    Mutant(
        13, "a barrier breaks at a time of the wall clock", "claims/barriers.py",
        "host.set_word(self._words, _BROKEN_AT, time.monotonic_ns())", "host.set_word(self._words, _BROKEN_AT, 1)",
        f"{BARRIERS}test_a_clock_that_is_set_back_leaves_no_late_one_untold",
    ),
    Mutant(
        13, "a barrier is usable before all know that it was broken", "claims/barriers.py",
        " and not self._latecomers(snapshot):\n            state.next_round_locked()", ":\n            state.next_round_locked()",
        f"{BARRIERS}test_the_late_are_told_and_then_it_is_usable",
    ),
    Mutant(
        13, "who gives up is counted", "claims/barriers.py",
        "if arrival is None and self._seat >= 0:", "if False:",
        f"{BARRIERS}test_a_timeout_names_who_has_not_come_and_disturbs_nobody",
    ),
    Mutant(
        13, "who is interrupted is counted", "claims/barriers.py",
        "        except BaseException:\n            visit.take_back()\n            raise",
        "        except BaseException:\n            raise",
        f"{BARRIERS}test_ctrl_c_takes_the_arrival_back",
    ),
    Mutant(
        13, "a thread waits for itself", "claims/shared.py",
        "if claim_locks.threads.get(offset) == me:", "if False:",
        "tests/claims/test_locks.py::test_a_thread_cannot_enter_twice",
    ),
    Mutant(
        13, "shared memory has holes", "claims/shared.py",
        "host.allocate(fd, 0, size)", "host.truncate(fd, size)",
        "tests/claims/test_memory.py::test_memory_is_there_before_it_is_used",
    ),
    Mutant(
        13, "who comes to shared memory believes what it asked for", "claims/shared.py",
        "if stored != header:", "if False:",
        "tests/claims/test_memory.py::test_another_says_something_else",
    ),
)  # fmt: skip


def misfits(root: Path = ROOT) -> list[str]:
    """Mutants whose old text does not occur exactly once, and invariants that have none."""
    found = []
    for mutant in MUTANTS:
        count = (root / "src/forebay" / mutant.file).read_text().count(mutant.old)
        if count != 1:
            found.append(f"{mutant.name}: its old text occurs {count} times in {mutant.file}")
        file, _, test = mutant.test.partition("[")[0].partition("::")
        if not (root / file).exists() or f"def {test}(" not in (root / file).read_text():
            found.append(f"{mutant.name}: there is no {mutant.test}")
    missing = set(range(1, 14)) - {mutant.invariant for mutant in MUTANTS}
    return found + [f"invariant {number} has no mutant" for number in sorted(missing)]


def invariants_page(page: Path = ROOT / "docs/reference/invariants.md") -> str:
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


def run(place: Path, test: str) -> tuple[int, float, str]:
    """pytest's exit status in the copy, seconds, and what it said. What hangs is red."""
    began = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=--import-mode=importlib",
        "--timeout",
        "100",
        test,
    ]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
    with tempfile.TemporaryFile() as said:  # no pipe: a child that outlives its test would keep it open
        try:
            status = subprocess.run(command, cwd=place, env=environment, stdout=said, stderr=said, timeout=SECONDS, check=False).returncode
        except subprocess.TimeoutExpired:
            status = 1
        said.seek(0)
        return status, time.monotonic() - began, said.read().decode(errors="replace")


def rewrite(file: Path, text: str) -> None:
    """Compiled files are recognised by size and whole seconds: each content gets a time of its own."""
    file.write_text(text)
    stamp = next(STAMPS)
    os.utime(file, (stamp, stamp))


def judge(place: Path, mutant: Mutant) -> tuple[str, float]:
    """``killed`` if the test is red on the breach, ``survived`` if it is green, else what went wrong."""
    file = place / "src/forebay" / mutant.file
    whole = file.read_text()
    rewrite(file, whole.replace(mutant.old, mutant.new))
    try:
        status, seconds, _ = run(place, mutant.test)
    finally:
        rewrite(file, whole)
    return {0: "SURVIVED", 1: "killed"}.get(status, f"pytest ended with {status}"), seconds


def judge_all(test: str, mutants: list[Mutant], places: queue.SimpleQueue[Path]) -> int:
    """Judge the mutants of one test, in one copy of the tree; return how many were not killed."""
    place = places.get()
    try:
        status, _, said = run(place, test)
        if status:
            print(said[-3000:], file=sys.stderr)
        bad = 0
        for mutant in mutants:
            verdict, seconds = ("its test is red without it", 0.0) if status else judge(place, mutant)
            bad += verdict != "killed"
            print(f"{mutant.invariant:>2}  {mutant.name:<50} {verdict:<10} {seconds:6.1f} s  {test}", flush=True)
        return bad
    finally:
        places.put(place)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mutants whose name or test contains one of these")
    parser.add_argument("--list", action="store_true", help="list them and end")
    parser.add_argument("--jobs", type=int, default=2, help="how many tests run at once (default: %(default)s)")
    parser.add_argument("--page", action="store_true", help="write them into docs/reference/invariants.md and end")
    arguments = parser.parse_args()
    if arguments.page:
        (ROOT / "docs/reference/invariants.md").write_text(invariants_page())
        return 0
    chosen = [m for m in MUTANTS if not arguments.words or any(word in m.name or word in m.test for word in arguments.words)]
    if arguments.list:
        for mutant in chosen:
            print(f"{mutant.invariant:>2}  {mutant.name:<50} {mutant.test}")
        return 0
    if wrong := misfits():
        print("\n".join(wrong), file=sys.stderr)
        return 2
    by_test: dict[str, list[Mutant]] = {}
    for mutant in chosen:
        by_test.setdefault(mutant.test, []).append(mutant)
    places: queue.SimpleQueue[Path] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="forebay-mutants-") as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        for number in range(arguments.jobs):
            copy_tree(Path(folder, str(number)))
            places.put(Path(folder, str(number)))
        bad = sum(pool.map(lambda test: judge_all(test, by_test[test], places), by_test))
    print(f"{len(chosen) - bad} of {len(chosen)} killed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
