"""Mutations of data that a model makes: requests, novelty, judges and pairs."""

from __future__ import annotations

from mutation.table import Mutation

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "production/synthesis/endpoint.py",
        '                    if completion.finish == "refused" and not self.has_answered:',
        "                    if False:",
        "production/synthesis/test_asking.py",
        only="refuses_all",
    ),
    Mutation(
        "production/synthesis/endpoint.py",
        '        finish = "length" if choice.get("finish_reason") == "length" else "stop"',
        '        finish = "stop"',
        "production/synthesis/test_asking.py",
        only="faults_are_asked_again",
    ),
    Mutation(
        "production/synthesis/endpoint.py",
        "        if most < top_logprobs:",
        "        if not most:",
        "production/synthesis/test_asking.py",
        only="said_before",
    ),
    Mutation(
        "production/synthesis/journal.py",
        "        return completion if completion is not None and question == request.digest(model) else None",
        "        return completion",
        "production/synthesis/test_asking.py",
        only="faults_are_asked_again",
    ),
    Mutation(
        "production/synthesis/asking.py",
        "            if self.budget.is_spent(self.journal.spent):",
        "            if False:",
        "production/synthesis/test_asking.py",
        only="budget_ends",
    ),
    Mutation(
        "production/synthesis/requests.py",
        "    content = json.dumps([*key, count]).encode()",
        "    content = json.dumps([*key[:3], count]).encode()",
        "production/synthesis/test_asking.py",
        only="key_alone",
    ),
    Mutation(
        "production/synthesis/novelty.py",
        "        reaching: list[int] = np.flatnonzero(2.0 * shared >= (self._threshold - 1e-9) * totals).tolist()",
        "        reaching: list[int] = np.flatnonzero(2.0 * shared > (self._threshold + 1e-9) * totals).tolist()",
        "production/synthesis/test_novelty.py",
        only="all_comparisons",
    ),
    Mutation(
        "production/synthesis/novelty.py",
        "        totals = np.frombuffer(self._lengths, np.int32) + len(split)",
        "        totals = np.frombuffer(self._lengths, np.int32) + 2 * len(split)",
        "production/synthesis/test_novelty.py",
        only="all_comparisons",
    ),
    Mutation(
        "production/synthesis/generators/self_instruct.py",
        "                is_torn = is_cut and number == len(tasks)",
        "                is_torn = False",
        "production/synthesis/test_generators.py",
        only="tasks_of_an_answer",
    ),
    Mutation(
        "production/synthesis/generators/self_instruct.py",
        "        if int(item[1]) != expected:",
        "        if False:",
        "production/synthesis/test_generators.py",
        only="tasks_of_an_answer",
    ),
    Mutation(
        "production/synthesis/generators/judge.py",
        "            if first_order.marks is None or other.marks is None:",
        "            if first_order.marks is None and other.marks is None:",
        "production/synthesis/test_generators.py",
        only="both_orders",
    ),
    Mutation(
        "production/synthesis/generators/judge.py",
        '    match = (_SINGLE_MARK if count == 1 else _BOTH_MARKS).fullmatch("\\n".join(lines))',
        '    match = (_SINGLE_MARK if count == 1 else _BOTH_MARKS).search("\\n".join(lines))',
        "production/synthesis/test_generators.py",
        only="marks_are_read",
    ),
    Mutation(
        "production/synthesis/generators/judge.py",
        "    return marks if marks and all(LOWEST <= mark <= HIGHEST for mark in marks) else None",
        "    return marks or None",
        "production/synthesis/test_generators.py",
        only="marks_are_read",
    ),
    Mutation(
        "production/synthesis/choosing.py",
        "            elif difference < margin or worst.answer == best.answer:",
        "            elif difference < margin:",
        "production/synthesis/test_generators.py",
        only="pairs_and_best",
    ),
    Mutation(
        "production/synthesis/steps.py",
        "            generator = SelfInstruct(seeds, tuple(accepted), shots, step.per_request, request, self.types)",
        "            generator = SelfInstruct(seeds, accepted, shots, step.per_request, request)",
        "production/synthesis/test_stage.py",
        only="pairs_from_seeds",
    ),
)
