"""Data positions, hangs, numbers that are not finite, and the step that a fault interrupts."""

from __future__ import annotations

from mutants.table import Mutant, Source

POSITIONS = Source("hyperpod_ext.runtime.data.positions", ("tests/runtime/data/test_positions.py",))
SAVED = Source("hyperpod_ext.runtime.data.saved", ("tests/runtime/data/test_sampler.py",))
HANGS = Source("hyperpod_ext.runtime.detection.hangs", ("tests/runtime/detection/test_hangs.py",))
FINISH_STEP = Source(
    "hyperpod_ext.runtime.control_plane.finish_step", ("tests/runtime/control_plane/test_finish_step.py",)
)
GUARDS = Source("hyperpod_ext.runtime.training.step_guards", ("tests/runtime/training/test_run.py",))
NAN_GUARD = Source("hyperpod_ext.runtime.state.nan_guard", ("tests/runtime/state/test_nan_guard.py",))
ENVIRONMENT = Source("hyperpod_ext.runtime.ipc.environment", ("tests/runtime/detection/test_preflight.py",))
DEVICE = Source("hyperpod_ext.runtime.state.device_steps", ("tests/runtime/state/test_device_steps.py",))
GRADIENTS = Source("hyperpod_ext.runtime.state.gradients", ("tests/runtime/state/test_gradients.py",))

MUTANTS: list[Mutant] = [
    GRADIENTS.mutant(
        "gradients.none_for_zero",
        "A step is made again with the gradients that existed when the one before was committed.",
        "for low, high, *sparse in ranges for p",
        "for low, high, *sparse in ranges[1:] for p",
    ),
    GRADIENTS.mutant(
        "gradients.sum_over_steps",
        "A step is not committed while gradients of one of several optimizers add up.",
        "return known() is gradient and",
        "return known() is not gradient and",
    ),
    DEVICE.mutant(
        "device.no_query",
        "A step that a device has in its queue is not done.",
        "if self._device is None:\n                self._finished = step",
        "if True:\n                self._finished = step",
    ),
    DEVICE.mutant(
        "device.query_after_abort",
        "What a device reaches after the abort ran on garbage.",
        "while self._queued and not self._frozen and",
        "while self._queued and",
    ),
    DEVICE.mutant(
        "device.changes_after_abort",
        "Once collectives were aborted, no optimizer may change the state.",
        "return self._device is None or not self._frozen",
        "return True",
    ),
    POSITIONS.mutant(
        "sampler.last_sample_is_lost",
        "An epoch ends when no sample of it is left, not one before.",
        "if length is not None and length - place < (batch if drop_last else 1):",
        "if length is not None and length - place <= (batch if drop_last else 1):",
    ),
    POSITIONS.mutant(
        "sampler.slots_without_a_rank",
        "Every slot of a step belongs to exactly one rank, whatever the number of ranks.",
        "return range(rank * slots // world_size, (rank + 1) * slots // world_size)",
        "return range(rank * (slots // world_size), (rank + 1) * (slots // world_size))",
    ),
    SAVED.mutant(
        "sampler.begins_its_epoch_again",
        "A run goes on at the sample where it was, in the middle of an epoch.",
        'cursor=Cursor(_number(state, "epoch"), _number(state, "place"), _number(state, "step")),',
        'cursor=Cursor(_number(state, "epoch"), 0, _number(state, "step")),',
    ),
    HANGS.mutant(
        "hang.blames_who_is_ahead",
        "The rank that is furthest behind holds the others up; those ahead wait for it.",
        "least = min(heartbeat.position for heartbeat in heartbeats.values())",
        "least = max(heartbeat.position for heartbeat in heartbeats.values())",
    ),
    GUARDS.mutant(
        "guards.swallowed_collective",
        "A step is not committed in which a collective has failed, whatever the script makes of the error.",
        "if why := broken_waits.first():",
        'if why := "":',
    ),
    FINISH_STEP.mutant(
        "finish_step.after_a_collective",
        "A step in which a collective was begun after the end was heard of does not count.",
        "return self._begun is not None and self._begun == collectives_begun()",
        "return self._begun is not None",
    ),
    NAN_GUARD.mutant(
        "nan.skips_for_ever",
        "After max_skips skipped steps in a row, the next one that is not finite is a fault.",
        "self._in_a_row >= self._policy.max_skips:",
        "self._in_a_row > self._policy.max_skips:",
    ),
    ENVIRONMENT.mutant(
        "secret.empty_is_accepted",
        "A secret that is too short to keep anybody out is refused.",
        "if len(secret) < 16:",
        "if not secret:",
    ),
    ENVIRONMENT.mutant(
        "secret.group_may_read_it",
        "A secret that other users may read is refused.",
        "allowed = 0o740 if of_pod else 0o700",
        "allowed = 0o740",
    ),
]
