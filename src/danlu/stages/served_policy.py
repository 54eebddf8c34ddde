"""The policy on rollout servers: all processes give them the weights, the first one asks, a canary looks at answers."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor

from danlu.assembly.parallelize import Placed
from danlu.core.errors import DanluError
from danlu.core.shard_box import ShardBox
from danlu.core.terminal import print_status
from danlu.inference.engine_adapters import BASE
from danlu.inference.grammar import Grammars, form_grammar
from danlu.inference.rank_status import gather_answers
from danlu.inference.ranks import in_order, longest_first
from danlu.inference.request import Completion, Request
from danlu.inference.stopping import Decode
from danlu.inference.support import Support
from danlu.numerics.dtypes import DTYPES
from danlu.parallel.process_group import untimed_barrier
from danlu.recipe import Recipe
from danlu.recipe.routing_replay import replays_routes
from danlu.recipe.rules.rollout import resolved_hand_over
from danlu.remote_engines.canary import Canary, check_form, compare_with_servers
from danlu.remote_engines.detect import Demands, detect_server, without_routes
from danlu.remote_engines.fleet import Connect, ServerFleet
from danlu.remote_engines.hand_over import AdapterHandOver, FolderHandOver, GroupHandOver, HandOver
from danlu.remote_engines.http_engine import HTTPEngine
from danlu.remote_engines.server_interface import ServerOptions
from danlu.remote_engines.sglang import SGLangServer
from danlu.remote_engines.vllm import VLLMServer
from danlu.stages.export import write
from danlu.stages.policy_logprobs import policy_logprobs
from danlu.stages.rollout import policy_parameters
from danlu.training.checkpoints.gathering import Gathering

ADAPTER = "policy"
"""The trained adapter's name on the server."""
HAND_OVER_FOLDER = "hand-over"
CANARY_PROMPTS, CANARY_TOKENS = 2, 40


_barriers = itertools.count()


class ServedPolicy:
    """A `RolloutEngine`: the policy of a recipe on rollout servers. The first process speaks to them.

    Args:
        decode: token ids to text without special tokens; None: answers have no text.
        grammars: see `stages.rollout.grammars_of`.
        step_s: how long a step of the servers' engine waits for an answer; None: until one is there.

    Raises on all processes ResourceError where there is no server, ModelError where its answers could not be trusted.
    """

    def __init__(
        self,
        recipe: Recipe,
        placed: Placed,
        decode: Decode | None,
        grammars: Grammars | None = None,
        *,
        step_s: float | None = None,
    ) -> None:
        self.recipe, self.placed, self.grammars = recipe, placed, grammars
        self.route = resolved_hand_over(recipe)
        self.engine: HTTPEngine | None = None
        """The servers' engine, on the first process."""
        self.version = 0
        self._world = placed.parallel.ranks.world
        self._adapter_folder: Path | None = None  # where all processes have written the adapter, on the first
        self._is_unchecked = False  # since an update

        def connect() -> None:
            options = self._server_options()
            config, hand_over = placed.subject.model.config, self._hand_over()
            servers = self._servers(options)
            try:
                self.engine = HTTPEngine(
                    servers, options, config, hand_over=hand_over, decode=decode, grammars=grammars, step_s=step_s
                )
            except BaseException:
                servers.close()
                raise

        self._world.from_first(connect)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Returns all answers to the requests, in their order and by sample, on all processes.

        Raises TrainingError where servers do not answer with the policy's weights, and on all processes the errors of
        `HTTPEngine.generate`.
        """
        self.check_weights()
        dealt = longest_first(requests)
        return in_order(requests, self.together(lambda engine: engine.generate(dealt)))

    def update(self, version: int) -> None:
        """Hands the servers the policy's weights; those of an adapter are written as a folder by all processes."""
        weights = None if self.route == "adapter" else self._whole_weights()
        if weights is None:
            self._write_adapter()

        def hand_over(engine: HTTPEngine) -> list[Completion]:
            engine.update(version, weights)
            return []

        self.together(hand_over, weights or ())
        self.version = version
        self._is_unchecked = True

    def sleep(self) -> None:
        """Has the servers give their caches' memory back until `wake`."""
        if self.engine is not None:
            self.engine.sleep()

    def wake(self) -> None:
        """Has the servers take the memory again."""
        if self.engine is not None:
            self.engine.wake()

    def close(self) -> None:
        """Closes the connections. The servers go on."""
        if self.engine is not None:
            self.engine.close()

    def together(
        self, work: Callable[[HTTPEngine], list[Completion]], made_by_all: Iterable[object] = ()
    ) -> list[Completion]:
        """Has the first process speak to the servers; returns its answers on all. Raises an error of any on all.

        made_by_all: gone through to its end on every process.
        """
        answers: list[Completion] = []
        error: Exception | None = None
        try:
            try:
                if self.engine is not None:
                    answers = work(self.engine)
            finally:
                for _ in made_by_all:
                    pass
        except Exception as problem:
            error = problem
        untimed_barrier(f"rollout-{next(_barriers)}")  # a server may take longer than a collective may
        return gather_answers(self._world, answers, error)

    def check_weights(self) -> None:
        """Checks once after each update whether answers are by its weights. Raises TrainingError on all processes."""
        if not self._is_unchecked:
            return
        self._is_unchecked = False  # the check asks for answers
        error: DanluError | None = None
        try:
            self._check()
        except DanluError as problem:
            error = problem
        gather_answers(self._world, [], error)

    def _write_adapter(self) -> None:
        parallel = self.placed.parallel
        parameters = parallel.all_parameters
        with Gathering(self._world) as gathering:

            def value(name: str, box: ShardBox | None = None) -> Tensor | None:
                return gathering.part(name, parameters[name].local, parameters[name].box, box)

            if gathering.first:
                self._adapter_folder = Path(tempfile.mkdtemp(prefix="danlu-adapter-")) / "adapter"
            target = self._adapter_folder or Path(ADAPTER)  # nothing is written on other processes
            write(self.placed.subject, self.recipe, target, value if parameters else None, writes=gathering.first)

    def _check(self) -> None:
        """Raises TrainingError where a server does not answer with the policy's weights."""
        config = self.placed.subject.model.config
        random = np.random.default_rng(0)
        length = max(1, min(CANARY_TOKENS, config.context_length // 2))
        prompts = [tuple(random.integers(0, config.vocab_size, length).tolist()) for _ in range(CANARY_PROMPTS)]
        new_tokens = self._canary_tokens(length)
        tolerance = 0.0 if self.recipe.numerics == "exact" else self.recipe.rollout.server.canary_tolerance
        adapter = ADAPTER if self.route == "adapter" else None
        servers = None if self.engine is None else self.engine.servers
        differing = None
        if adapter is None:  # else the base is the server's own
            differing = compare_with_servers(servers, config, self._whole, self._world.from_first)
        canary = Canary(prompts, self._score, tolerance, new_tokens, adapter, differing)
        report = canary.check(self)

        def accept() -> None:
            if servers is not None and servers.reloads:
                servers.accept(report.answers)

        self._world.from_first(accept)
        if self._world.from_first(self._recomputes_supports):
            check_form(self, self._in_form(canary.requests(adapter)), partial(self._score_within, prompts), tolerance)

    def _recomputes_supports(self) -> bool:
        return self.grammars is not None and self.engine is not None and self.engine.recomputes_supports

    def _in_form(self, requests: Sequence[Request]) -> list[Request]:
        """Requests for answers in the recipe's form."""
        grammars, form = self.grammars, self.recipe.rollout.format
        assert grammars is not None and form is not None, "grammars are those of the form"
        grammar = form_grammar(form.kinds)
        return [replace(request, grammar=grammar, stop_ids=grammars.end_ids) for request in requests]

    def _score_within(self, prompts: Sequence[Sequence[int]], answers: Sequence[Completion]) -> list[list[float]]:
        sequences = [(*prompt, *answer.tokens) for prompt, answer in zip(prompts, answers, strict=True)]
        supports = [answer.support or () for answer in answers]
        return self._score(sequences, [len(prompt) for prompt in prompts], None, supports)

    def _score(
        self,
        sequences: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        adapter: str | None,
        supports: Sequence[Sequence[Support | None]] = (),
    ) -> list[list[float]]:
        adapters = self.placed.subject.adapters
        with adapters.disabled() if adapters is not None and adapter == BASE else nullcontext():
            return policy_logprobs(
                self.recipe,
                self.placed,
                sequences,
                prompt_lengths,
                max_new_tokens=self._canary_tokens(prompt_lengths[0]),
                supports=supports,
            )

    def _canary_tokens(self, prompt_length: int) -> int:
        """The most tokens of a canary's answer."""
        return max(1, min(16, self.placed.subject.model.config.context_length - prompt_length - 1))

    def _whole(self, name: str) -> Tensor | None:
        """A parameter, whole, on the first process; all processes call it."""
        parallel = self.placed.parallel
        if not parallel.local_parameters:
            return self.placed.subject.model.get_parameter(name)
        parallel.reshard()
        parameter = parallel.all_parameters[name]
        with Gathering(parallel.ranks.world) as gathering:
            return gathering.whole(name, parameter.local, parameter.box)

    def _whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        model, parallel = self.placed.subject.model, self.placed.parallel
        if parallel.alone:
            yield from model.named_parameters()
            return
        with Gathering(parallel.ranks.world) as gathering:
            for name, parameter in policy_parameters(self.placed).items():
                if (whole := gathering.whole(name, parameter.local, parameter.box)) is not None:
                    yield name, whole

    def _server_options(self) -> ServerOptions:
        section, server = self.recipe.rollout, self.recipe.rollout.server
        urls = section.urls if section.engine == "http" else [section.url or ""]
        assert all(urls), "the recipe's rules ask for them"
        return ServerOptions(
            tuple(urls),
            api_key_variable=server.api_key_variable,
            connections=server.connections * len(urls),
            timeout_s=server.timeout_s,
            reconnect_s=server.reconnect_s,
        )

    def _servers(self, options: ServerOptions) -> ServerFleet:
        section = self.recipe.rollout
        bucket_bytes = section.server.bucket_mib << 20
        routes = replays_routes(self.recipe) and self.placed.subject.model.config.has_experts
        connect: Connect
        match section.engine:
            case "http":
                exact = None
                if self.recipe.numerics == "exact":
                    exact = str(DTYPES[self.recipe.activations]).removeprefix("torch.")
                required = routes and section.routing_replay is True
                demands = Demands(exact, section.server.push, bucket_bytes, routes, required)
                return ServerFleet(options.clients, lambda client: detect_server(client, demands))
            case "sglang":
                kind, connect = SGLangServer.name, SGLangServer
            case "vllm":
                kind, connect = VLLMServer.name, partial(VLLMServer, bucket_bytes=bucket_bytes)
            case unknown:
                raise AssertionError(f"rollout.engine: no server is of the kind {unknown}")
        if routes:
            print_status(without_routes(kind))
        return ServerFleet(options.clients, connect, reloads=False)

    def _hand_over(self) -> HandOver:
        server, config = self.recipe.rollout.server, self.placed.subject.model.config
        # Training multiplies by weights of this type; norms it computes with the trained weights as they are.
        dtype = None if self.recipe.numerics == "exact" else DTYPES[self.recipe.activations]
        if self.route == "group":
            return GroupHandOver(config, server.group_address, server.bucket_mib, dtype)
        given = server.exchange_folder
        folder = Path(given).expanduser() if given else (Path(self.recipe.output) / HAND_OVER_FOLDER).absolute()
        if self.route == "adapter":
            return AdapterHandOver(ADAPTER, folder, self._copy_adapter)
        return FolderHandOver(config, folder, server.bucket_mib, dtype)

    def _copy_adapter(self, folder: Path) -> None:
        assert self._adapter_folder is not None, "the adapter is written before it is handed over"
        shutil.copytree(self._adapter_folder, folder, dirs_exist_ok=True)
        shutil.rmtree(self._adapter_folder.parent)
        self._adapter_folder = None
