"""Who coordinates, who is told what, and when: wrong changes that only whole clusters show."""

from __future__ import annotations

from mutants.table import Mutant, Source

_TESTS = ("tests/faults/test_cluster_in_one_process.py",)
COORDINATOR = Source("hyperpod_ext.runtime.coordinator.coordinator", _TESTS)
LOST_NODES = Source("hyperpod_ext.runtime.coordinator.lost_nodes", _TESTS)
ADMISSION = Source("hyperpod_ext.runtime.coordinator.admission", _TESTS)
MEMBERSHIP = Source("hyperpod_ext.runtime.membership.membership", _TESTS)
MEMBERS = Source("hyperpod_ext.runtime.coordinator.members", _TESTS)
OUTBOX = Source("hyperpod_ext.runtime.coordinator.outbox", _TESTS)
ELECTION = Source("hyperpod_ext.runtime.agent.election", _TESTS)
RESTORING = Source("hyperpod_ext.runtime.membership.restoring", _TESTS)

MUTANTS: list[Mutant] = [
    COORDINATOR.mutant(
        "cluster.two_coordinators_in_a_term",
        "Each coordinator has a term of its own.",
        "for job_state in job_states) + 1",
        "for job_state in job_states)",
    ),
    LOST_NODES.mutant(
        "cluster.losses_before_majority",
        "A coordinator that is cut off counts no loss: it stands down.",
        "if overdue and self._formation.job_has_begun and not self._others_wait:",
        "if False:",
    ),
    COORDINATOR.mutant(
        "cluster.restarted_node_is_refused",
        "A node that is restarted before the loss of the old one is detected is accepted.",
        "former agent is detected\n                await former.confirmed()",
        "former agent is detected\n                pass",
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
    Source(LOST_NODES.where, ("tests/runtime/coordinator/test_coordinator.py",)).mutant(
        "cluster.cut_off_ends_the_job",
        "A coordinator whose connections end does not end the job before it knows that it is not cut off.",
        "if counts and self._members.others_may_go_on and in_doubt:",
        "if False:",
    ),
    Source(MEMBERSHIP.where, ("tests/runtime/membership/test_scenarios.py",)).mutant(
        "cluster.returned_node_goes_on",
        "A node that was cut off has all ranks meet anew: what it said, or was told, may be lost.",
        "if dropped or (has_ranks and not joins) else []",
        "if dropped else []",
    ),
    Source(LOST_NODES.where, ("tests/runtime/coordinator/test_coordinator.py",)).mutant(
        "cluster.woken_coordinator_is_sure",
        "A coordinator that stood still acts on nothing before enough others have shown that they have no other.",
        "self._members.others_may_go_on and not (self.is_over or self._others_wait):",
        "False:",
    ),
    LOST_NODES.mutant(
        "cluster.loss_recorded_late",
        "Whoever may take over knows of a loss when it is acted on, not with the next change.",
        "self._actions.carry_out(actions)\n        self._outbox.share_job_state()\n        if not",
        "for action in actions:\n            self._actions._do(action)\n        if not",
    ),
    COORDINATOR.mutant(
        "cluster.lost_coordinator_keeps_ranks",
        "The next coordinator gives the ranks of the lost one to another node.",
        "        if lost in members.members:\n",
        "        if False:\n",
    ),
    MEMBERS.mutant(
        "cluster.successor_expects_nobody",
        "A member that does not come to the next coordinator is given up.",
        "self.expected = {node: until for node in members if node not in {self.node, lost, *gone}}",
        "self.expected = {}",
    ),
    ELECTION.mutant(
        "cluster.own_vote_counts_twice",
        "Each vote counts once.",
        "return may_take_over(set(members) - set(gone()), {*self.votes, me})",
        "return 2 * (len({*self.votes, me}) + 1) > len(members)",
    ),
    OUTBOX.mutant(
        "cluster.assignment_is_not_told",
        "A node is told which ranks it has.",
        "if agent.assignment is not assignment and agent.assignment != assignment:",
        "if False:",
    ),
    MEMBERSHIP.mutant(
        "cluster.old_joins_count",
        "What ranks reported in an older generation does not count in a new one.",
        "self.phase, self.done, self.restoring = JobPhase.FORMING, {}, self._negotiation()",
        "self.phase, self.done = JobPhase.FORMING, {}",
    ),
    MEMBERSHIP.mutant(
        "cluster.old_attempt_counts",
        "That a rank has restored what was decided before does not count for the next decision.",
        "if generation != self.generation or attempt != self.attempt or",
        "if generation != self.generation or attempt > self.attempt or",
    ),
    MEMBERSHIP.mutant(
        "cluster.fault_without_abort",
        "When a rank dies, the others are told to leave the generation.",
        "if not left_already and self.phase is not JobPhase.FORMING:",
        "if False:",
    ),
    MEMBERSHIP.mutant(
        "cluster.survivors_told_nothing",
        "The next coordinator has all ranks leave the generation of the lost one.",
        "return membership, [membership._leave(), *waiting]",
        "return membership, waiting",
    ),
    MEMBERSHIP.mutant(
        "cluster.restarted_node_was_not_lost",
        "A node whose agent has begun anew has lost what it had.",
        'lost = [] if gone else self.node_lost(node, "its agent was restarted", at)',
        "lost = list[Action]()",
    ),
    RESTORING.mutant(
        "cluster.goes_on_before_the_last",
        "Ranks go on when all have restored, not most of them.",
        "return len(self._restored) == len(self.decision.sources)",
        "return 2 * len(self._restored) > len(self.decision.sources)",
    ),
]
