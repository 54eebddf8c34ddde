"""Rules about the rollout engine, and about numerics that training and rollout share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from danlu.recipe.rules.refusals import address_problem
from danlu.recipe.sections import Recipe, Rollout, Server
from danlu.recipe.yaml_tree import Problem

KEY_BLOCK = 64
"""Keys that the attention routine of `numerics: exact` looks at together."""


def engine_is_used(recipe: Recipe) -> Iterator[Problem]:
    """An engine that is configured has something to answer."""
    is_default = recipe.rollout == Recipe.model_fields["rollout"].default
    if recipe.stage == "rl" or recipe.on_policy or is_default or recipe.evaluation.samples is not None:
        return
    message = f"nothing is sampled: stage {recipe.stage} draws no answers, and there are no evaluation.samples. "
    yield Problem("rollout", f"{message}Leave it out, or add samples", reads=("stage", "evaluation.samples"))


def engine_is_possible(recipe: Recipe) -> Iterator[Problem]:
    """An engine on a server has an address and a way for weights, and other engines have none."""
    section = recipe.rollout
    if section.engine == "embedded":
        if section.url is not None:
            message = "the embedded engine is no server. Leave it out, or choose engine: vllm or sglang"
            yield Problem("rollout.url", message, reads=("rollout.engine",))
        if section.urls:
            message = "the embedded engine is no server. Leave them out, or choose engine: http"
            yield Problem("rollout.urls", message, reads=("rollout.engine",))
        if section.gather != "auto" and recipe.parallel.shard != "zero3":
            message = "only read with parallel.shard: zero3, which alone has layers with a part of their weights"
            yield Problem("rollout.gather", message, reads=("parallel.shard",))
        return
    name = section.engine
    yield from _servers_take_rows(recipe)
    yield from _servers_have_addresses(section)
    if section.routing_replay and name in ("vllm", "sglang"):
        message = (
            f"{name} does not say which experts tokens went to. Use engine: embedded, or http with danlu serve "
            "--rollouts, or leave it out: then routers choose again, and `gap` says how far that is from the rollout"
        )
        yield Problem("rollout.routing_replay", message, reads=("rollout.engine",))
    yield from _hand_over_is_possible(recipe)


def _servers_take_rows(recipe: Recipe) -> Iterator[Problem]:
    """Rows of new tokens are handed over with all weights, or in an adapter to danlu's own server."""
    name, adapter = recipe.rollout.engine, recipe.adapter
    named = [*(token.text for token in recipe.model.tokens), *getattr(adapter, "trainable_tokens", ())]
    if name == "sglang" and recipe.model.tokens:
        message = (
            "sglang draws from rows that no token has, as a base with rows for model.tokens may. Use engine: embedded, "
            "vllm (without an adapter) or http with danlu serve --rollouts"
        )
        yield Problem("rollout.engine", message, reads=("model.tokens",))
    elif name in ("vllm", "sglang") and adapter is not None and named:
        key = "model.tokens" if recipe.model.tokens else "adapter.trainable_tokens"
        message = (
            f"{name} takes the factors of an adapter, and no rows of single tokens, which {key} trains. Use engine: "
            "embedded, or http with danlu serve --rollouts; or train the tokens first (stage sft), merge the adapter "
            "(danlu merge), and serve and train the result without them"
        )
        yield Problem("rollout.engine", message, reads=(key, "adapter.kind"))


def _servers_have_addresses(section: Rollout) -> Iterator[Problem]:
    """It is said where servers listen: `urls` of engine http, `url` of the others."""
    name, reads = section.engine, ("rollout.engine",)
    if name == "http":
        if section.url is not None:
            message = f"engine: http reads urls, for there may be several. Write urls: [{section.url}]"
            yield Problem("rollout.url", message, reads=reads)
        elif not section.urls:
            message = "missing: say where servers listen, such as [http://node1:8000, http://node2:8000]"
            yield Problem("rollout.urls", message, reads=reads)
        for index, url in enumerate(section.urls):
            if (problem := address_problem(url)) is not None:
                yield Problem(f"rollout.urls.{index}", problem)
            elif url.rstrip("/") in [other.rstrip("/") for other in section.urls[:index]]:
                yield Problem(f"rollout.urls.{index}", f"{url} is there twice. Name each server once")
        return
    if section.urls:
        message = f"only read with engine: http. Write url for the one server of {name}, or choose engine: http"
        yield Problem("rollout.urls", message, reads=reads)
    if section.url is None:
        message = f"missing: {name} runs as a server of its own. Say where it listens, such as http://localhost:8000"
        yield Problem("rollout.url", message, reads=("rollout.engine",))
    elif (problem := address_problem(section.url)) is not None:
        yield Problem("rollout.url", problem)


def resolved_hand_over(recipe: Recipe) -> Literal["group", "folder", "adapter"]:
    """How weights get to the server of a recipe, where it leaves that open."""
    chosen = recipe.rollout.server.hand_over
    if chosen == "auto":
        return "folder" if recipe.adapter is None else "adapter"
    return chosen


def _hand_over_is_possible(recipe: Recipe) -> Iterator[Problem]:
    """Checks that weights sent to a server are trained, and that keys of other ways of weight sync keep their
    defaults.
    """
    server, route = recipe.rollout.server, resolved_hand_over(recipe)
    if route == "adapter" and recipe.adapter is None:
        message = "adapter: the whole model is trained here, and there is no adapter to hand over. Use folder or group"
        yield Problem("rollout.server.hand_over", message, reads=("adapter",))
    if route != "adapter" and recipe.adapter is not None:
        message = f"{route}: an adapter is trained here, and the server has the base already. Use adapter"
        yield Problem("rollout.server.hand_over", message, reads=("adapter",))
    if route == "group" and recipe.rollout.engine == "http":
        message = (
            "group: with engine: http weights travel as files, which a server that comes back is given again. Use "
            "folder, with push: true where servers do not see the trainer's disk"
        )
        yield Problem("rollout.server.hand_over", message, reads=("rollout.engine",))
    unread = {"group": ("exchange_folder",), "folder": ("group_address",), "adapter": ("bucket_mib", "group_address")}
    for key in unread[route]:
        if getattr(server, key) != getattr(Server(), key):
            message = f"not read with hand_over: {route}"
            yield Problem(f"rollout.server.{key}", message, reads=("rollout.server.hand_over",))


def precision_is_possible(recipe: Recipe) -> Iterator[Problem]:
    """Rollouts that encode weights have whole dense ones."""
    section = recipe.rollout
    if section.precision == "auto":
        return
    if recipe.quantization is not None:
        message = (
            f"{section.precision}: the base is quantized already, and is multiplied in the type of activations. Leave "
            "out one of the two"
        )
        yield Problem("rollout.precision", message, reads=("quantization",))
    if recipe.parallel.shard == "zero3" and section.gather != "all":
        message = (
            f"{section.precision}: weights that are gathered layer by layer would be encoded in each pass. Add "
            "rollout.gather: all, or use parallel.shard: zero2"
        )
        yield Problem("rollout.precision", message, reads=("parallel.shard", "rollout.gather"))


def exact_is_possible(recipe: Recipe) -> Iterator[Problem]:
    """Training and rollout can give the same bits: every kernel is danlu's choice, and blocks fit its routine."""
    if recipe.numerics != "exact":
        return
    section = recipe.rollout
    if recipe.compile:
        message = "compiled code rounds by the shapes it is made for, so numerics: exact cannot hold. Leave one out"
        yield Problem("compile", message, reads=("numerics",))
    if recipe.parallel.tensor > 1:
        message = "tensor ranks add their sums in an order of their own. Use parallel.tensor: 1, or numerics: fast"
        yield Problem("parallel.tensor", message, reads=("numerics",))
    if section.cache != "auto":
        message = (
            f"{section.cache} rounds the keys and values that training attends to as they are. Leave it out, or use "
            "numerics: fast"
        )
        yield Problem("rollout.cache", message, reads=("numerics",))
    if section.precision != "auto":
        message = (
            f"{section.precision} rounds weights and activations that training multiplies as they are. Leave it out, "
            "or use numerics: fast"
        )
        yield Problem("rollout.precision", message, reads=("numerics",))
    if section.engine in ("vllm", "sglang"):
        message = (
            f"{section.engine} has kernels of its own, which do not round as the trainer's do. "
            "Use engine: embedded, or http with danlu serve, or numerics: fast"
        )
        yield Problem("rollout.engine", message, reads=("numerics",))
    if KEY_BLOCK % section.block:
        divisors = ", ".join(str(size) for size in range(1, KEY_BLOCK) if KEY_BLOCK % size == 0)
        message = (
            f"{section.block} does not divide the {KEY_BLOCK} keys that numerics: exact looks at together. "
            f"Use {divisors} or {KEY_BLOCK}"
        )
        yield Problem("rollout.block", message, reads=("numerics",))
