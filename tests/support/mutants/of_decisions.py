"""Which step, who may go on, how far up a fault is taken, and who is in the job."""

from __future__ import annotations

from mutants.table import Mutant, Source

CHOOSE = Source("hyperpod_ext.runtime.snapshot.select", ("tests/runtime/snapshot/test_choose.py",))
QUORUM = Source("hyperpod_ext.runtime.membership.quorum", ("tests/runtime/membership/test_quorum_and_escalation.py",))
MEMBERS = Source(
    "hyperpod_ext.runtime.coordinator.members", ("tests/runtime/membership/test_quorum_and_escalation.py",)
)
ESCALATION = Source(
    "hyperpod_ext.runtime.membership.escalation", ("tests/runtime/membership/test_quorum_and_escalation.py",)
)
RESTORING = Source(
    "hyperpod_ext.runtime.membership.restoring",
    ("tests/runtime/membership/test_scenarios.py", "tests/runtime/membership/test_restoring.py"),
)
MEMBERSHIP = Source("hyperpod_ext.runtime.membership.membership", ("tests/runtime/membership/test_scenarios.py",))
PLACING = Source(
    "hyperpod_ext.runtime.membership.rank_assignment",
    ("tests/runtime/membership/test_placing.py", "tests/runtime/membership/test_scenarios.py"),
)
STATES = Source("hyperpod_ext.runtime.membership.node_states", ("tests/runtime/membership/test_node_states.py",))
RESCALING = Source("hyperpod_ext.runtime.membership.rescaling", ("tests/runtime/membership/test_scenarios.py",))
STOP = Source("hyperpod_ext.runtime.membership.stop_agreement", ("tests/runtime/membership/test_scenarios.py",))
OPERATOR = Source("hyperpod_ext.runtime.operator_api.states", ("tests/runtime/operator_api/test_states.py",))

ACTIONS = Source("hyperpod_ext.runtime.membership.actions", ("tests/runtime/membership/test_scenarios.py",))
NCCL = Source(
    "hyperpod_ext.runtime.process_group.nccl.environment", ("tests/runtime/process_group/nccl/test_environment.py",)
)

MUTANTS: list[Mutant] = [
    MEMBERSHIP.mutant(
        "membership.no_stop_is_followed",
        "A job that continues without lost ranks is not stopped for that fault; while none is missing it is.",
        "(for_fault and self.continuing.is_short)",
        "for_fault",
    ),
    MEMBERSHIP.mutant(
        "membership.hold_before_loss_remains",
        "A hold for a fault ends when a job that continues loses ranks.",
        "held = self.held - self.held_for_fault",
        "held = self.held",
    ),
    OPERATOR.mutant(
        "operator.job_is_begun_anew",
        "A job that has come to its end while its pods were stopped is not begun anew.",
        "    if pod.succeeded:\n",
        "    if pod.succeeded and pod.agent_rank is not None:\n",
    ),
    ACTIONS.mutant(
        "escalation.each_death_of_a_moment",
        "Processes that die at one moment are one fault of the budgets.",
        'return self.late or self.kind == "stuck"',
        'return self.kind == "stuck"',
    ),
    NCCL.mutant(
        "nccl.groups_that_cannot_be_aborted",
        "Groups that are not reconfigured are of the implementation that can abort several.",
        'return "nccl-legacy" if has_name and engine_of(torch, given) == "nccl2" else "nccl"',
        'return "nccl"',
    ),
    OPERATOR.mutant(
        "operator.nobody_hears_of_another_first_pod",
        "A pod that goes on hears which pods are none of the job's nodes any more.",
        "gone = pod.agent_peers - peers if peers and order is Order.RESUME else frozenset()",
        "gone = frozenset()",
    ),
    OPERATOR.mutant(
        "operator.anybody_may_order",
        "While the operator calls, nobody else gives orders.",
        "silent_s >= OPERATOR_SILENT_S",
        "silent_s >= 0",
    ),
    CHOOSE.mutant(
        "choose_step.oldest",
        "Of the steps that every rank can have, the newest is restored.",
        "for key in sorted(commits, reverse=True):",
        "for key in sorted(commits):",
    ),
    CHOOSE.mutant(
        "choose_step.rank_left_out",
        "A step counts only when every rank can have it.",
        "        if not all(found):\n            return None",
        "        if not all(found):\n            continue",
    ),
    CHOOSE.mutant(
        "choose_step.mixes_commits",
        "What ranks restore together is of one commit: the same step of another generation is another history.",
        "commits.setdefault(commit_of(offer), [])",
        'commits.setdefault((offer.step, 0, ""), [])',
    ),
    CHOOSE.mutant(
        "choose_step.mixes_world_sizes",
        "Snapshots of ranks of one world size do not fill gaps in those of another.",
        "[offer for offer in usable if (offer.world_size or len(nodes)) == world_size]",
        "list(usable)",
    ),
    CHOOSE.mutant(
        "choose_step.gives_up_the_first",
        "A generation gives up what comes after the step that it went on from, not that step.",
        "return any(later > generation and first < step for",
        "return any(later > generation and first <= step for",
    ),
    CHOOSE.mutant(
        "choose_step.two_lost_of_a_group",
        "Parity makes up for one node of a group: a step of which two are lost is not taken.",
        "if len(sources) == len(stripe) - 1:",
        "if len(sources) >= len(stripe) - 2:",
    ),
    QUORUM.mutant(
        "quorum.half_takes_over",
        "A new coordinator needs more than half of the members, so that of two halves one at most trains.",
        "return 2 * len(members & votes) > len(members)",
        "return 2 * len(members & votes) >= len(members)",
    ),
    QUORUM.mutant(
        "quorum.counts_strangers",
        "Spares and newcomers that are no members yet do not count towards who may go on.",
        "return 2 * len(members & (reached | {coordinator})) >= len(members)",
        "return 2 * len(reached | {coordinator}) >= len(members)",
    ),
    MEMBERS.mutant(
        "members.any_membership_will_do",
        "A coordinator goes on only if it speaks for every membership that some member may still go by.",
        "return all(may_go_on(",
        "return any(may_go_on(",
    ),
    ESCALATION.mutant(
        "escalation.one_in_process_too_few",
        "A rank is mended in process as often as max_in_process says before its process is replaced.",
        "return EscalationLevel.IN_PROCESS if own <= budgets.max_in_process else EscalationLevel.PROCESS",
        "return EscalationLevel.IN_PROCESS if own < budgets.max_in_process else EscalationLevel.PROCESS",
    ),
    ESCALATION.mutant(
        "escalation.one_restart_too_many",
        "The job ends with the first fault after max_restarts.",
        "count = len(earlier) + 1\n    if count > budgets.max_restarts:",
        "count = len(earlier)\n    if count > budgets.max_restarts:",
    ),
    ESCALATION.mutant(
        "escalation.calm_from_the_last",
        "Faults count together while fewer than calm_steps lie between each and the next one.",
        "count, step = count + 1, other.step",
        "count += 1",
    ),
    RESTORING.mutant(
        "restoring.tries_refused_again",
        "A source that a rank has refused is not tried again.",
        "if offer.key not in self._refused and self.step",
        "if self.step",
    ),
    RESTORING.mutant(
        "restoring.goes_without_the_last",
        "Training goes on when all ranks have restored and verified, not before.",
        "return len(self._restored) == len(self.decision.sources)",
        "return len(self._restored) >= len(self.decision.sources) - 1",
    ),
    MEMBERSHIP.mutant(
        "membership.hears_older_attempts",
        "What a rank says of an attempt that was given up does not count for the next one.",
        "if generation != self.generation or attempt != self.attempt or",
        "if generation != self.generation or",
    ),
    MEMBERSHIP.mutant(
        "membership.forgets_late_deaths",
        "A process that dies on its way out of an older generation is replaced like any other.",
        "if self.phase is JobPhase.ENDED or (left_already and not fault.died):",
        "if self.phase is JobPhase.ENDED or left_already:",
    ),
    MEMBERSHIP.mutant(
        "membership.spare_takes_all_ranks",
        "A spare takes the ranks of one lost node, and leaves those of another to the next one.",
        "ranks = tuple(sorted(rank for rank in self.unassigned if self.nodes[rank] == lost))",
        "ranks = tuple(sorted(self.unassigned))",
    ),
    MEMBERSHIP.mutant(
        "membership.older_generation_revived",
        "Another coordinator goes on after the newest generation that any member has heard of.",
        'generation=max(generation, int(data["generation"])),',
        'generation=int(data["generation"]),',
    ),
    MEMBERSHIP.mutant(
        "membership.finished_in_another_generation",
        "A rank that finished in a generation that was left has not finished the job.",
        "if generation != self.generation or self.phase is not JobPhase.RUNNING:",
        "if self.phase is not JobPhase.RUNNING:",
    ),
    PLACING.mutant(
        "placing.size_that_is_not_allowed",
        "An elastic job goes on only with numbers of nodes that its spec allows.",
        "return max((size for size in self.sizes if size <= nodes), default=None)",
        "return min(nodes, max(self.sizes))",
    ),
    STATES.mutant(
        "node_states.any_transition",
        "A node becomes only what the table of states allows.",
        "if state not in TRANSITIONS[before := self[node]]:",
        "if state not in TRANSITIONS.keys() | {before := self[node]}:",
    ),
    STOP.mutant(
        "elastic.switches_before_all_agree",
        "Ranks stand still for a resize only at a step that all of them can stop at.",
        "if number != self.number or not self.agreed:",
        "if number != self.number:",
    ),
    RESCALING.mutant(
        "rescaling.move_unanswered",
        "An order to move ranks is answered when the last spare is lost on the way.",
        "(has_ranks and states.spares)",
        "has_ranks",
    ),
]
