"""Checkpoints in a directory or in S3: what is kept, what is fenced, and what a crash leaves."""

from __future__ import annotations

from mutants.table import Mutant, Source

RETENTION = Source("hyperpod_ext.runtime.storage.retention", ("tests/runtime/storage/test_durable.py",))
DURABLE = Source("hyperpod_ext.runtime.storage.checkpoints", ("tests/runtime/storage/test_durable.py",))
MAC = Source("hyperpod_ext.runtime.storage.mac", ("tests/runtime/storage/test_mac.py",))
FILE = Source("hyperpod_ext.runtime.storage.file", ("tests/runtime/storage/test_file_store.py",))
S3 = Source("hyperpod_ext.runtime.storage.s3", ("tests/runtime/storage/test_s3_requests.py",))
MULTIPART = Source("hyperpod_ext.runtime.storage.s3_multipart", ("tests/runtime/storage/test_s3_requests.py",))
OBJECT_STORE = Source("hyperpod_ext.runtime.storage.object_store", ("tests/runtime/storage/test_object_store.py",))

MUTANTS: list[Mutant] = [
    RETENTION.mutant(
        "retention.one_too_few",
        "As many of the newest checkpoints are kept as `keep` says.",
        "[: max(keep, 1)]",
        "[: max(keep - 1, 1)]",
    ),
    RETENTION.mutant(
        "retention.deletes_the_newest",
        "Retention keeps the newest and deletes the oldest.",
        "newest = sorted(found, reverse=True)[",
        "newest = sorted(found)[",
    ),
    RETENTION.mutant(
        "retention.manifest_goes_last",
        "A checkpoint that is deleted loses its manifest first, so that half of one never looks whole.",
        '    store.delete([name for name in ours if name.endswith(f"/{MANIFEST}")])\n    store.delete(ours)',
        "    store.delete(sorted(ours, key=lambda name: name.endswith(MANIFEST)))",
    ),
    DURABLE.mutant(
        "durable.followed_by_one",
        "A run ends its writing as soon as another run has claimed the very next generation.",
        "            if later <= generation:\n                continue",
        "            if later <= generation + 1:\n                continue",
    ),
    DURABLE.mutant(
        "durable.manifest_of_another_generation",
        "A manifest that was moved to the folder of another generation is refused.",
        'if (manifest.get("step"), manifest.get("generation")) != (found.step, found.generation):',
        'if manifest.get("step") != found.step:',
    ),
    MAC.mutant(
        "mac.damage_alone_is_refused",
        "Bytes with the right CRC that nobody with the secret has written are refused.",
        "reading = Reading(self, secret, crc=False)",
        "reading = Reading(self, None)",
    ),
    FILE.mutant(
        "file.named_before_it_is_synced",
        "The bytes of a blob are on the disk before it gets its name.",
        "            os.fsync(descriptor)\n            if cancelled():",
        "            if cancelled():",
    ),
    FILE.mutant(
        "file.links_are_followed",
        "No symbolic link below a tier is followed.",
        "os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC",
        "os.O_DIRECTORY | os.O_CLOEXEC",
    ),
    DURABLE.mutant(
        "durable.unsigned_checkpoints_count",
        "Retention counts and deletes only checkpoints that the job has signed.",
        "good = [one for one in found if self._is_ours(one)]",
        "good = [*found]",
    ),
    FILE.mutant(
        "file.create_only_replaces",
        "A create-only blob is never replaced by a second writer.",
        "os.link(partial, last, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)",
        "os.replace(partial, last, src_dir_fd=folder, dst_dir_fd=folder)",
    ),
    S3.mutant(
        "s3.create_only_is_not_asked_for",
        "A create-only put asks S3 to refuse a name that is taken.",
        'IfNoneMatch="*", ',
        "",
    ),
    MULTIPART.mutant(
        "s3.lost_answer_is_a_failure",
        "An upload whose completion arrived, and whose answer was lost, is not sent again.",
        "if not self._is_there(upload.key, upload.nbytes, upload.crc, call):",
        "if self._is_there(upload.key, upload.nbytes, upload.crc, call):",
    ),
    OBJECT_STORE.mutant(
        "store.path_climbs_out",
        "No name of a blob leaves the place of the checkpoints.",
        'any(part in ("", ".", "..") for part in parts)',
        'any(part in ("", ".") for part in parts)',
    ),
]
