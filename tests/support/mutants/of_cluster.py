"""Who coordinates, who is told what, and when: wrong changes that only whole clusters show."""

from __future__ import annotations

from mutants.table import Mutant, Source

_TESTS = ("tests/faults/test_cluster_in_one_process.py",)
COORDINATOR = Source("hyperpod_ext.runtime.coordinator.coordinator", _TESTS)
ADMISSION = Source("hyperpod_ext.runtime.coordinator.admission", _TESTS)
MEMBERSHIP = Source("hyperpod_ext.runtime.membership.membership", _TESTS)

MUTANTS: list[Mutant] = [
    COORDINATOR.mutant(
        "cluster.two_coordinators_in_a_term",
        "Each coordinator has a term of its own.",
        "for job_state in job_states) + 1",
        "for job_state in job_states)",
    ),
    COORDINATOR.mutant(
        "cluster.losses_before_majority",
        "A coordinator that is cut off counts no loss: it stands down.",
        "if overdue and self._formation.job_has_begun and not (self.end.final_save.begun or waits):",
        "if False:",
    ),
    COORDINATOR.mutant(
        "cluster.restarted_node_is_refused",
        "A node that was started again before its silence is noticed is taken again.",
        "await former.doubted()",
        "pass",
    ),
    ADMISSION.mutant(
        "cluster.returned_node_hears_no_abort",
        "A node that comes to another coordinator is told that its generation is over.",
        "if handshake.generation < membership.generation:",
        "if False:",
    ),
    ADMISSION.mutant(
        "cluster.returned_node_starts_no_worker",
        "A node that comes to another coordinator starts the workers that it should have and has not.",
        "for rank in sorted(here - there):",
        "for rank in ():",
    ),
    MEMBERSHIP.mutant(
        "cluster.generation_stays",
        "After a fault all ranks leave for another generation.",
        "        self.generation += 1\n        self.phase, self.done",
        "        self.phase, self.done",
    ),
    MEMBERSHIP.mutant(
        "cluster.begins_with_one_missing",
        "A generation begins when all ranks have joined.",
        "len(self.restoring.joined) == len(self.nodes)",
        "len(self.restoring.joined) >= len(self.nodes) - 1",
    ),
    MEMBERSHIP.mutant(
        "cluster.spare_starts_nothing",
        "A spare that takes the place of a lost node starts its workers.",
        "return [TakeOver(spare, ranks), *(Replace(rank) for rank in ranks)]",
        "return [TakeOver(spare, ranks)]",
    ),
    MEMBERSHIP.mutant(
        "cluster.newcomer_takes_no_ranks",
        "A node that comes takes the ranks that wait for one.",
        "        if waiting:\n",
        "        if False:\n",
    ),
]
