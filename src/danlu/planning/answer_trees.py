"""The trees of a rollout's prompts and answers that a step trains on, and their micro-batches. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from danlu.planning.batch_shape import Document, DocumentRun
from danlu.planning.rollout_lengths import AskedPrompt, RolloutLengths
from danlu.planning.workload import Workload
from danlu.recipe.policy_scores import trains_on_pairs


def trained_trees(workload: Workload, data: int = 1) -> list[Document]:
    """The trees that one of `data` ranks trains on: of all answers, or of the two that pairs are made of.

    The best and the worst answer to a prompt are of any length; two of middle length stand for them.
    """
    recipe = workload.recipe
    lengths = workload.rollout_lengths or RolloutLengths.longest(recipe)
    prompts: Sequence[AskedPrompt] = lengths.prompts[::data]
    if recipe.stage == "rl" and trains_on_pairs(recipe):
        prompts = [AskedPrompt(each.tokens, _middle(each.answers)) for each in prompts]
    return trees_of(prompts, shared=recipe.data.share_stem)


def trees_of(prompts: Sequence[AskedPrompt], *, shared: bool) -> list[Document]:
    """The trees of prompts with all of their answers. shared: whether the answers to a prompt share it."""
    return [document for prompt in prompts for document in _tree(prompt, shared=shared)]


def micro_batches(documents: Sequence[Document], most: int) -> list[list[Document]]:
    """Divides trees into micro-batches of up to so many tokens; one that is longer has a micro-batch of its own."""
    batches: list[list[Document]] = []
    room = 0
    for document in documents:
        if (tokens := tokens_of([document])) > room:
            batches.append([])
            room = most
        batches[-1].append(document)
        room -= tokens
    return batches


def tokens_of(documents: Sequence[Document]) -> int:
    """The tokens of some trees."""
    return sum(run.tokens for document in documents for run in document)


def largest_micro_batch(workload: Workload, micro: int, data: int) -> int:
    """The sequences of `data.max_length` tokens that have as many tokens as the largest micro-batch of drawn answers.

    micro: sequences that a micro-batch may have tokens of; data: ranks that share prompts.
    """
    length = workload.recipe.data.max_length
    batches = micro_batches(trained_trees(workload, data), micro * length)
    return -(-max(map(tokens_of, batches), default=length) // length)


def _tree(prompt: AskedPrompt, *, shared: bool) -> Iterator[Document]:
    """A prompt with its answers as they go through the model: a tree, or a document for each answer."""
    if shared:
        yield (DocumentRun(prompt.tokens), *(DocumentRun(tokens, prompt.tokens) for tokens in prompt.answers))
        return
    for tokens in prompt.answers:
        yield (DocumentRun(prompt.tokens), DocumentRun(tokens, prompt.tokens))


def _middle(answers: Sequence[int]) -> tuple[int, ...]:
    """Two lengths a third of the way from the shortest and from the longest."""
    ordered = sorted(answers)
    third = len(ordered) // 3
    return ordered[third], ordered[-1 - third]
