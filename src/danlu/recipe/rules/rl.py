"""Rules about stage `rl`: its rewards, the answers that it draws, and the settings of its policy gradient."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from danlu.recipe.rules.paths import sources_of
from danlu.recipe.rules.refusals import address_problem, path_problem
from danlu.recipe.sections import (
    BatchSize,
    CodeReward,
    Data,
    ExactReward,
    FormatReward,
    FunctionReward,
    JudgeReward,
    LengthReward,
    MathReward,
    NumericReward,
    PolicyGradientSection,
    Recipe,
    RewardSection,
    Rollout,
)
from danlu.recipe.yaml_tree import Problem

_FILTERS = ("top_p", "top_k", "min_p")


def prompt_template_is_valid(prompt: str | None, rewards: Sequence[RewardSection]) -> Iterator[Problem]:
    """Braces of templates go together and name something."""
    templates = {"data.prompt": prompt}
    for index, reward in enumerate(rewards):
        if isinstance(reward, JudgeReward):
            templates[f"rewards.{index}.prompt"] = reward.prompt
    for key, template in templates.items():
        if template is None:
            continue
        from danlu.core.prompt_template import PromptTemplate, PromptTemplateError

        try:
            columns = PromptTemplate.parse(template).columns
        except PromptTemplateError as error:
            yield Problem(key, str(error))
            continue
        if not columns:
            message = "names no column, so every prompt would be the same. Name one, as in {question}"
            if key != "data.prompt":
                message = "names nothing, so every answer would get the same mark. Name {completion}"
            yield Problem(key, message)


def rows_hold_prompts(data: Data) -> Iterator[Problem]:
    """The format of a source has prompts, and is read: a template names columns of its own."""
    for key, source in sources_of(data):
        if source.format == "auto":
            continue
        key = key.removesuffix("path") + "format"
        if data.prompt is not None:
            message = "not read with data.prompt, which says what prompts are made of. Leave it out"
            yield Problem(key, message, reads=("data.prompt",))
        elif source.format in ("text", "tokenized"):
            message = f"rows of format {source.format} have no prompt. Say what it is made of with data.prompt"
            yield Problem(key, message, reads=("data.prompt", "stage"))


def rewards_are_given(recipe: Recipe) -> Iterator[Problem]:
    """Stage rl has rewards, each with a name of its own, and some count."""
    rewards = recipe.rewards
    if not rewards and recipe.environment is not None and recipe.environment.gives_reward:
        if recipe.environment.weight == 0 and recipe.divergence is None:
            message = "0, and there are no other rewards: nothing would be learnt. Give it another, or give rewards"
            yield Problem("environment.weight", message, reads=("rewards",))
        return
    if not rewards:
        state = "missing" if rewards is None else "the list is empty"
        message = f"{state}: stage rl learns from them. Give one, such as {{kind: math, column: answer}}"
        yield Problem("rewards", message, reads=("stage",))
        return
    if not any(recipe.reward_weights.values()) and recipe.divergence is None:
        yield Problem("rewards", "every weight is 0: nothing would be learnt. Give one reward another weight")
    seen: dict[str, int] = {}
    for index, reward in enumerate(rewards):
        if not reward.label.strip():
            yield Problem(f"rewards.{index}.name", "empty: metrics are called by it. Give one, or leave it out")
        elif reward.label in seen:
            message = f"called {reward.label} as rewards.{seen[reward.label]} is. Give one of both a name of its own"
            yield Problem(f"rewards.{index}", message, reads=("rewards",))
        seen.setdefault(reward.label, index)
        yield from _reward_problems(f"rewards.{index}", reward)


def _reward_problems(key: str, reward: RewardSection) -> Iterator[Problem]:
    match reward:
        case FormatReward() | JudgeReward():
            try:
                groups = re.compile(reward.pattern or "()", re.DOTALL).groups
            except re.error as error:
                yield Problem(f"{key}.pattern", f"{reward.pattern!r} is no regular expression: {error}")
                return
            if isinstance(reward, FormatReward):
                return
            if not groups:
                message = f"{reward.pattern!r} has no group that is the mark. Put it in parentheses, as in (\\d+)/10"
                yield Problem(f"{key}.pattern", message)
            if (problem := address_problem(reward.url)) is not None:
                yield Problem(f"{key}.url", problem)
            if reward.bounds is not None and not reward.bounds[0] < reward.bounds[1]:
                message = f"{list(reward.bounds)}: the lowest mark comes first, and is below the highest"
                yield Problem(f"{key}.bounds", message)
        case LengthReward():
            if reward.most is None and not reward.fewest:
                yield Problem(key, "every length is within bounds, so it is always 0. Give most, fewest or both")
            elif reward.most is not None and reward.fewest > reward.most:
                message = f"no answer has {reward.fewest} tokens or more and {reward.most} or less. Lower it"
                yield Problem(f"{key}.fewest", message, reads=(f"{key}.most",))
        case FunctionReward():
            if (problem := path_problem(reward.path, "function", "my_rewards.py:short")) is not None:
                yield Problem(f"{key}.path", problem)


def format_is_one(recipe: Recipe) -> Iterator[Problem]:
    """The form of answers is given in one way, and answers are made in one turn."""
    form = recipe.rollout.format
    if form is None:
        return
    if len(form.kinds) != 1:
        state = "empty" if not form.kinds else f"{' and '.join(form.kinds)} are given together"
        yield Problem("rollout.format", f"{state}. Give one of json_schema, regex, choice and grammar")
    if form.choice is not None and not form.choice:
        yield Problem("rollout.format.choice", "the list is empty: no answer is left. Give the texts to choose from")
    if recipe.environment is not None:
        message = "an answer in several turns has no form as a whole. Leave out rollout.format or environment"
        yield Problem("rollout.format", message, reads=("environment",))


def rollout_can_be_trained_on(recipe: Recipe) -> Iterator[Problem]:
    """Checks that answers are drawn as the objective needs them, and in a way that the trainer can recompute."""
    objective, rollout, data = recipe.policy_gradient, recipe.rollout, recipe.data
    if rollout.staleness > 0 and rollout.engine != "embedded" and rollout.server.hand_over == "group":
        message = (
            "group: with rollout.staleness above 0 a process next to the trainer hands weights on, which is in no "
            "group with the server. Use folder or adapter"
        )
        yield Problem("rollout.server.hand_over", message, reads=("rollout.staleness",))
    if rollout.temperature == 0:
        message = "0 takes the likeliest token each time, so all answers to a prompt are one. Use 1, or some above 0"
        yield Problem("rollout.temperature", message, reads=("stage",))
    if rollout.max_new_tokens >= data.max_length:
        message = (
            f"{rollout.max_new_tokens} leaves no room for a prompt in data.max_length {data.max_length}, which both "
            "share. Lower it, or raise data.max_length"
        )
        yield Problem("rollout.max_new_tokens", message, reads=("data.max_length",))
    if "" in rollout.stop_strings:
        message = "an empty text ends every answer before it begins. Leave it out"
        yield Problem("rollout.stop_strings", message)
    filters = [key for key in _FILTERS if getattr(rollout, key) != getattr(Rollout(), key)]
    if filters and rollout.engine == "vllm" and objective is not None:
        message = (
            "vllm does not say which tokens a filter left to choose from, and the policy that is trained has to have "
            "the same ones. Leave it out, or use engine: embedded or sglang"
        )
        yield Problem(f"rollout.{filters[0]}", message, reads=("rollout.engine",))
    if objective is not None:
        yield from _answers_can_be_compared(objective, rollout)
    elif rollout.samples == 1 and recipe.objective:
        message = "1, and a pair is the best and the worst of a prompt's answers. Use 2 or more"
        yield Problem("rollout.samples", message, reads=("objective",))


def _answers_can_be_compared(objective: PolicyGradientSection, rollout: Rollout) -> Iterator[Problem]:
    key, reads = "rollout.samples", ("objective",)
    groups = objective.baseline in ("group", "leave-one-out")
    if rollout.samples == 1 and (groups or objective.scale == "group" or objective.resample):
        setting = f"baseline: {objective.baseline}"
        if not groups:
            setting = "scale: group" if objective.scale == "group" else f"resample: {objective.resample}"
        message = f"1, and objective.{setting} compares the answers to a prompt with each other. Use 2 or more"
        yield Problem(key, message, reads=reads)
    overlong = objective.overlong
    if overlong is not None and overlong.margin > rollout.max_new_tokens:
        message = f"{overlong.margin} is more than the {rollout.max_new_tokens} tokens of rollout.max_new_tokens"
        yield Problem("objective.0.overlong.margin", message, reads=("rollout.max_new_tokens",))


def policy_gradient_reads_its_keys(recipe: Recipe) -> Iterator[Problem]:
    """Keys of the objective of stage rl go together."""
    objective = recipe.policy_gradient
    if objective is None:
        if recipe.value is not None:
            message = "pairs of answers are compared without values, only ppo has any"
            yield Problem("value", message, reads=("objective",))
        return
    if not objective.needs_value:
        if recipe.value is not None:
            message = f"{objective.kind} has no values, only ppo has. Leave it out, or set objective: ppo"
            yield Problem("value", message, reads=("objective",))
    else:
        for name, default in (("baseline", "none"), ("scale", "none"), ("rewards_apart", False)):
            if getattr(objective, name) != default:
                message = "ppo has the value of each token in place of a baseline. Leave it out, or set objective: grpo"
                yield Problem(f"objective.0.{name}", message, reads=("objective.0.kind",))
    divides_by_mean = objective.scale == "mean" and not objective.process_supervision
    if divides_by_mean and (problem := _no_mean_to_divide_by(recipe)) is not None:
        message = f"mean: {problem}, and a negative mean turns the signs of advantages. Use group, batch or none"
        yield Problem("objective.0.scale", message, reads=("rewards", "objective.0.scale"))
    if objective.rewards_apart and len(recipe.reward_weights) == 1:
        message = "there is one reward, and nothing to keep it apart from. Leave it out"
        yield Problem("objective.0.rewards_apart", message, reads=("rewards",))
    if objective.rewards_apart and _kl_in_reward(objective) and objective.needs_reference:
        message = "reward: subtracted from the sum of rewards, and rewards_apart has none. Use in: loss"
        yield Problem("objective.0.kl.in", message, reads=("objective.0.rewards_apart",))
    yield from _process_supervision_problems(objective)
    yield from _kl_problems(objective)
    yield from _clip_problems(objective)
    yield from _vespo_problems(objective)
    importance = objective.importance
    if importance is not None and importance.low is not None and importance.low >= importance.high:
        message = f"{importance.low} is not below high, which is {importance.high}: nothing would be trained"
        yield Problem("objective.0.importance.low", message, reads=("objective.0.importance.high",))


def _no_mean_to_divide_by(recipe: Recipe) -> str | None:
    """Names the reward, or the penalty on rewards, that may be negative; None where an answer's sum never is."""
    objective, environment = recipe.policy_gradient, recipe.environment
    assert objective is not None, "the scale is that of a policy gradient"
    if environment is not None and environment.gives_reward:
        return "the environment's reward may be negative"
    for reward in recipe.rewards or ():
        if not isinstance(reward, ExactReward | NumericReward | MathReward | CodeReward | FormatReward):
            return f"reward {reward.label} may be negative"
        if reward.weight < 0:
            return f"reward {reward.label} has the weight {reward.weight:g}"
    if objective.overlong is not None:
        return "overlong is negative"
    return "a KL is taken from rewards" if objective.needs_reference and _kl_in_reward(objective) else None


def _kl_in_reward(objective: PolicyGradientSection) -> bool:
    return objective.kl is not None and objective.kl.in_reward


def _process_supervision_problems(objective: PolicyGradientSection) -> Iterator[Problem]:
    if not objective.process_supervision:
        return
    reads = ("objective.0.process_supervision",)
    if objective.needs_value:
        message = "ppo takes rewards where steps end by itself. Leave it out"
        yield Problem("objective.0.process_supervision", message, reads=("objective.0.kind",))
        return
    if objective.baseline not in ("group", "batch", "none"):
        message = (
            f"{objective.baseline} compares whole answers, and process_supervision steps. Use group, batch or none"
        )
        yield Problem("objective.0.baseline", message, reads=reads)
    if objective.scale == "mean":
        message = "mean is of whole answers, and process_supervision compares steps. Use group, batch or none"
        yield Problem("objective.0.scale", message, reads=reads)
    if objective.rewards_apart:
        message = "process_supervision keeps rewards apart by itself. Leave it out"
        yield Problem("objective.0.rewards_apart", message, reads=reads)
    if objective.overlong is not None:
        message = "one number for an answer, and process_supervision compares steps. Leave it out"
        yield Problem("objective.0.overlong", message, reads=reads)
    if _kl_in_reward(objective) and objective.needs_reference:
        message = "reward: one number for an answer, and process_supervision compares steps. Use in: loss"
        yield Problem("objective.0.kl.in", message, reads=reads)


def _kl_problems(objective: PolicyGradientSection) -> Iterator[Problem]:
    key, kl = "objective.0.kl", objective.kl
    if kl is None:
        return
    if kl.ratio and kl.in_reward:
        message = "rewards are computed at the policy that drew the answers, where the ratio is 1. Leave it out"
        yield Problem(f"{key}.ratio", message, reads=(f"{key}.in",))
    if kl.estimator == "k1" and kl.coefficient and not (kl.in_reward or kl.ratio):
        message = (
            "k1: the mean of its gradient in the loss is 0, so nothing would hold the policy to the reference. Use k2 "
            "or k3, set ratio: true, or set in: reward"
        )
        yield Problem(f"{key}.estimator", message, reads=(f"{key}.in", f"{key}.ratio"))
    if kl.target is not None and not kl.in_reward:
        message = "the coefficient is adapted from rollout to rollout, so it is for in: reward. Leave it out"
        yield Problem(f"{key}.target", message, reads=(f"{key}.in",))
    elif kl.target is not None and kl.coefficient == 0:
        message = "0 stays 0, for it is adapted by factors. Give what it starts from, such as 0.05"
        yield Problem(f"{key}.coefficient", message, reads=(f"{key}.target",))


def _clip_problems(objective: PolicyGradientSection) -> Iterator[Problem]:
    (low, high), loss = objective.clip_bounds, objective.loss
    key, reads = "objective.0.clip", ("objective.0.loss",)
    if loss == "clip" and low > 1:
        yield Problem(key, f"{low} below 1 is a negative ratio, which there is none of. Use 1 or less", reads=reads)
    if loss == "cispo" and (isinstance(objective.clip, tuple) or high <= 1):
        given = list(objective.clip) if isinstance(objective.clip, tuple) else high
        message = f"{given}: cispo takes one number above 1, the largest ratio itself. Give 5, for example"
        yield Problem(key, message, reads=reads)
    if objective.dual_clip is not None and loss == "clip" and objective.dual_clip <= 1 + high:
        message = f"{objective.dual_clip} is not above 1 + {high}, the upper bound of clip. Use 3, for example"
        yield Problem("objective.0.dual_clip", message, reads=(key,))


def _vespo_problems(objective: PolicyGradientSection) -> Iterator[Problem]:
    if objective.loss != "vespo":
        return
    reads = ("objective.0.loss",)
    if objective.ratio != type(objective).model_fields["ratio"].get_default():
        message = "not read with loss: vespo, which multiplies the ratios of an answer. Leave it out"
        yield Problem("objective.0.ratio", message, reads=reads)
    if objective.importance is not None and objective.importance.level == "sequence":
        message = "sequence: loss: vespo multiplies the weights of an answer's tokens itself. Use token"
        yield Problem("objective.0.importance.level", message, reads=reads)


def batch_of_prompts_is_divisible(batch: BatchSize) -> Iterator[Problem]:
    """Each update of a rollout has the same number of prompts."""
    prompts, updates = batch.prompts, batch.updates
    if prompts is None or prompts % updates == 0:
        return
    below = next(count for count in range(min(updates, prompts), 0, -1) if prompts % count == 0)
    above = next((count for count in range(updates, prompts + 1) if prompts % count == 0), None)
    nearest = f"{below}" if above is None else f"{below} or {above}"
    message = f"{updates} does not divide the {prompts} prompts of a rollout. Use {nearest}"
    yield Problem("batch.updates", message, reads=("batch.prompts",))
