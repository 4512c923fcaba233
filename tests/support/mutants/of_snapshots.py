"""Snapshots in memory: signed, fenced, sealed, sent to other nodes, and handed to the slower tiers."""

from __future__ import annotations

from mutants.table import Mutant, Source

MANIFEST = Source("hyperpod_ext.runtime.snapshot.manifest", ("tests/runtime/snapshot/test_manifest.py",))
CHECKPOINTER = Source(
    "hyperpod_ext.runtime.checkpoint.checkpointer", ("tests/runtime/checkpoint/test_checkpointer.py",)
)
SLOTS = Source("hyperpod_ext.runtime.memory_server.slots.slots", ("tests/runtime/memory_server/slots/test_slots.py",))
REGIONS = Source(
    "hyperpod_ext.runtime.memory_server.slots.regions", ("tests/runtime/memory_server/slots/test_regions.py",)
)
UPLOAD_QUEUE = Source(
    "hyperpod_ext.runtime.memory_server.upload_queue", ("tests/runtime/memory_server/test_upload_queue.py",)
)
UPLOAD = Source("hyperpod_ext.runtime.memory_server.upload", ("tests/runtime/memory_server/test_upload.py",))
FINAL_SAVE = Source("hyperpod_ext.runtime.coordinator.final_save", ("tests/runtime/coordinator/test_final_save.py",))
PEER_SERVER = Source(
    "hyperpod_ext.runtime.memory_server.replication.receiver",
    ("tests/runtime/memory_server/replication/test_peer_server.py",),
)
INCOMING = Source(
    "hyperpod_ext.runtime.memory_server.replication.incoming",
    ("tests/runtime/memory_server/replication/test_peer_server.py",),
)
REPLICATE = Source(
    "hyperpod_ext.runtime.memory_server.replication.replicator",
    ("tests/runtime/memory_server/replication/test_replicate.py",),
)
PARITY = Source(
    "hyperpod_ext.runtime.memory_server.replication.incoming_parts",
    ("tests/runtime/memory_server/replication/test_parity.py",),
)
WIRE = Source("hyperpod_ext.runtime.ipc.messages", ("tests/runtime/process_group/test_wire_and_store.py",))
KEYS = Source("hyperpod_ext.runtime.process_group.store_keys", ("tests/runtime/process_group/test_wire_and_store.py",))
COPY = Source("hyperpod_ext.runtime.snapshot.fast_copy", ("tests/runtime/checkpoint/test_overlapped_copy.py",))

MUTANTS: list[Mutant] = [
    COPY.mutant(
        "copy.length_of_a_piece",
        "What is restored onto a GPU is verified as a whole.",
        "(each.result(), len(piece)) for",
        "(each.result(), len(image)) for",
    ),
    PARITY.mutant(
        "parity.a_piece_counts_too_soon",
        "A parity piece of a step counts only when the parts of all other nodes of the group have come.",
        "if piece.ended != set(piece.stripe.others(piece.holder)):",
        "if not piece.ended:",
    ),
    REPLICATE.mutant(
        "replicator.one_step_is_kept",
        "A step with replicas stays until the one after the next is copied: other nodes may be slower.",
        "            self._kept_before[owner] = before\n",
        "            before.held.close()\n",
    ),
    Source("hyperpod_ext.runtime.memory_server.replication.replicator", PARITY.tests).mutant(
        "parity.ranks_of_a_node_let_go_apart",
        "A node keeps what was whole before until all of its ranks have parity of the next step.",
        "if ranks and set(ranks) <= self._done.keys():",
        "if ranks:",
    ),
    PARITY.mutant(
        "parity.old_bytes_in_a_piece",
        "A piece begins with zeros, not with the bytes of the step that was in its slot before.",
        "        fill_with_zeros(data)\n",
        "",
    ),
    MANIFEST.mutant(
        "manifest.prefix_of_the_signature",
        "The whole signature must be right.",
        "if not hmac.compare_digest(signature, _signature(manifest, secret).encode()):",
        "if not hmac.compare_digest(signature[:8], _signature(manifest, secret).encode()[:8]):",
    ),
    MANIFEST.mutant(
        "manifest.step_is_not_signed",
        "The signature covers every field, the step among them.",
        'if key != "signature"}',
        'if key not in ("signature", "step")}',
    ),
    MANIFEST.mutant(
        "manifest.another_jobs_is_read",
        "A snapshot of another job is refused, even where both jobs have one secret.",
        'if manifest.get("job") != job:',
        'if not manifest.get("job"):',
    ),
    MANIFEST.mutant(
        "manifest.checksum_is_passed_over",
        "Bytes whose checksum is not that of the manifest are refused, whatever their length.",
        'if crc_text(checksum) != manifest["crc64nvme"]:',
        'if nbytes != manifest["nbytes"] and crc_text(checksum) != manifest["crc64nvme"]:',
    ),
    CHECKPOINTER.mutant(
        "checkpointer.torn_copy_is_kept",
        "A snapshot whose state changed while it was copied is taken back.",
        "self._client.resolve(self._rank, staged.save_id, keep=changed is None)",
        "self._client.resolve(self._rank, staged.save_id, keep=True)",
    ),
    SLOTS.mutant(
        "slots.newest_is_overwritten",
        "The newest whole snapshot is never the one that is overwritten.",
        "if index != newest and not slot.pins]",
        "if not slot.pins]",
    ),
    REGIONS.mutant(
        "regions.older_generation_writes",
        "Once a generation has begun, writers of the one before are refused.",
        "if generation < self._generation:",
        "if generation < self._generation - 1:",
    ),
    REGIONS.mutant(
        "regions.sealed_after_it_was_given_up",
        "What was being written when its step was given up never becomes a snapshot.",
        'if slot.state is not s.State.WRITING or slot.save_id != manifest["save_id"]:',
        'if slot.save_id != manifest["save_id"]:',
    ),
    UPLOAD_QUEUE.mutant(
        "upload.waiting_ones_are_superseded",
        "Only with when_busy: supersede does a newer checkpoint take the place of one in line.",
        'if self._when_busy == "supersede":',
        'if self._when_busy != "skip":',
    ),
    UPLOAD.mutant(
        "upload.commits_before_all_parts",
        "The manifest of a checkpoint is written when every node has brought its part.",
        "if not nodes <= progress.done:",
        "if not nodes <= progress.announced:",
    ),
    UPLOAD.mutant(
        "upload.commits_after_another_run",
        "A run that another one has followed while it copied commits nothing any more.",
        "if task.generation in self.entered:  # another run may have begun during the upload",
        "if task.generation in self.entered and task.nodes > 1:  # another run may have begun during the upload",
    ),
    UPLOAD.mutant(
        "upload.commits_without_ranks_that_left",
        "A checkpoint that lacks ranks of nodes that have left is not committed.",
        "if len(everyone) < of and not self._of_node:",
        "if not everyone:",
        ("tests/runtime/memory_server/test_uploader.py",),
    ),
    FINAL_SAVE.mutant(
        "final_save.some_ranks_are_enough",
        "At the end a snapshot is named that every rank of its world has.",
        "if len(owners) == one.world_size:",
        "if having:",
    ),
    PEER_SERVER.mutant(
        "peers.unsigned_manifest_is_taken",
        "A node takes a copy only under a manifest that is signed with the job's secret.",
        "check_manifest(manifest, self._secret, job=self._job, where=",
        "dict(where=",
    ),
    INCOMING.mutant(
        "peers.bytes_are_not_checked",
        "A copy exists on another node only once its bytes are those of the manifest.",
        '            check_crc(replica.manifest, *_received(replica), where=f"replica of rank {owner}")\n',
        "            _received(replica)\n",
    ),
    REPLICATE.mutant(
        "peers.one_rank_is_ahead",
        "No copy of a step begins while a rank of the node still writes an earlier one.",
        "return None if any(number < first.number for number in self._writing.values()) else first",
        "return first",
    ),
    WIRE.mutant(
        "wire.role_is_not_proved",
        "A client's proof is not a server's: nobody is let in with the answer that he was given himself.",
        'f"{role}:{first}:{second}".encode',
        'f"{first}:{second}".encode',
    ),
    WIRE.mutant(
        "wire.proof_can_be_replayed",
        "A proof holds for one connection: it covers the number that the other side has just drawn.",
        'f"{role}:{first}:{second}".encode',
        'f"{role}:{second}".encode',
    ),
    KEYS.mutant(
        "keys.generation_that_is_over",
        "Keys of a generation that is over are refused, also those of the one just before.",
        "        if key[0] < self.generation:\n            reply(self._over(key))",
        "        if key[0] < self.generation - 1:\n            reply(self._over(key))",
    ),
]
