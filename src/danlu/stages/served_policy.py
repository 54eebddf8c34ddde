"""The policy on a rollout server: all processes give it the weights, the first one asks it, a canary looks at it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from torch import Tensor

from danlu.assembly.parallelize import Placed
from danlu.core.shard_box import ShardBox
from danlu.core.terminal import print_status
from danlu.inference.engine import RolloutEngine
from danlu.inference.engine_adapters import BASE
from danlu.inference.ranks import ParallelEngine
from danlu.inference.stopping import Decode
from danlu.models.config import ModelConfig
from danlu.planning.precision import DTYPES
from danlu.recipe import Recipe
from danlu.recipe.routing_replay import replays_routes
from danlu.recipe.rules.rollout import resolved_hand_over
from danlu.remote_engines.canary import Canary, compare_with_server
from danlu.remote_engines.detect import Demands, detect_server, without_routes
from danlu.remote_engines.fleet import ServerFleet
from danlu.remote_engines.hand_over import AdapterHandOver, FolderHandOver, GroupHandOver, HandOver
from danlu.remote_engines.http_engine import HTTPEngine
from danlu.remote_engines.server_interface import RolloutServer, ServerOptions
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


class ServedPolicy:
    """The policy of a recipe as a server needs it: weights, options and checks.

    step_s: how long a step of the engine waits for an answer; None: until one is there.
    """

    def __init__(self, recipe: Recipe, placed: Placed, *, step_s: float | None = None) -> None:
        self.recipe, self.placed, self.step_s = recipe, placed, step_s
        self.route = resolved_hand_over(recipe)
        self._spoken_to: RolloutServer | None = None  # on the first process
        self._adapter_folder: Path | None = None  # where all processes have written the adapter, on the first

    def engine(self, decode: Decode | None) -> ParallelEngine:
        """Makes an engine on all processes, of which the first speaks to the server.

        Raises on all processes ResourceError where there is no server, ModelError where its answers could not be
        trusted.
        """
        ranks = self.placed.parallel.ranks
        connected: list[HTTPEngine] = []

        def connect() -> None:
            options = self._server_options()
            config = self.placed.subject.model.config
            server, hand_over = self._server(options), self._hand_over(options, config)
            try:
                engine = HTTPEngine(server, options, config, hand_over=hand_over, decode=decode, step_s=self.step_s)
            except BaseException:
                server.close()
                raise
            connected.append(engine)

        ranks.world.from_first(connect)
        engine = connected[0] if connected else None
        self._spoken_to = None if engine is None else engine.server
        return ParallelEngine.remote(engine, ranks, offer=self.offer, check=self.check)

    @property
    def connections(self) -> int:
        """Requests that are under way at a time, at all servers."""
        return self._server_options().connections

    def offer(self) -> Iterator[tuple[str, Tensor]] | None:
        """The weights that the server is handed, on the first process; all processes go through them together.

        Of an adapter none: it is written as a folder, now.
        """
        if self.route != "adapter":
            return self._whole_weights()
        parallel = self.placed.parallel
        parameters = parallel.all_parameters
        with Gathering(parallel.ranks.world) as gathering:

            def value(name: str, box: ShardBox | None = None) -> Tensor | None:
                return gathering.part(name, parameters[name].local, parameters[name].box, box)

            if gathering.first:
                self._adapter_folder = Path(tempfile.mkdtemp(prefix="danlu-adapter-")) / "adapter"
            target = self._adapter_folder or Path(ADAPTER)  # nothing is written on other processes
            write(self.placed.subject, self.recipe, target, value if parameters else None, writes=gathering.first)
        return None

    def check(self, engine: RolloutEngine) -> None:
        """Raises TrainingError where the server does not answer with the policy's weights."""
        config = self.placed.subject.model.config
        random = np.random.default_rng(0)
        length = max(1, min(CANARY_TOKENS, config.context_length // 2))
        prompts = [tuple(random.integers(0, config.vocab_size, length).tolist()) for _ in range(CANARY_PROMPTS)]
        new_tokens = self._canary_tokens(length)
        tolerance = 0.0 if self.recipe.numerics == "exact" else self.recipe.rollout.server.canary_tolerance
        adapter = ADAPTER if self.route == "adapter" else None
        differing = None
        if adapter is None:  # else the base is the server's own
            from_first = self.placed.parallel.ranks.world.from_first
            differing = compare_with_server(self._spoken_to, config, self._whole, from_first)
        report = Canary(prompts, self._score, tolerance, new_tokens, adapter, differing).check(engine)

        def accept() -> None:
            if isinstance(self._spoken_to, ServerFleet):
                self._spoken_to.accept(report.answers)

        self.placed.parallel.ranks.world.from_first(accept)

    def _score(
        self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], adapter: str | None
    ) -> list[list[float]]:
        adapters = self.placed.subject.adapters
        with adapters.disabled() if adapters is not None and adapter == BASE else nullcontext():
            return policy_logprobs(
                self.recipe,
                self.placed,
                sequences,
                prompt_lengths,
                max_new_tokens=self._canary_tokens(prompt_lengths[0]),
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
        folder = Path(self.recipe.output) / HAND_OVER_FOLDER
        return ServerOptions(
            tuple(urls),
            api_key_variable=server.api_key_variable,
            connections=server.connections * len(urls),
            timeout_s=server.timeout_s,
            reconnect_s=server.reconnect_s,
            hand_over=self.route,
            exchange_folder=Path(server.exchange_folder).expanduser() if server.exchange_folder else folder.absolute(),
            bucket_mib=server.bucket_mib,
            group_address=server.group_address,
            canary_tolerance=server.canary_tolerance,
        )

    def _server(self, options: ServerOptions) -> RolloutServer:
        routes = replays_routes(self.recipe) and self.placed.subject.model.config.has_experts
        if self.recipe.rollout.engine == "http":
            exact = None
            if self.recipe.numerics == "exact":
                exact = str(DTYPES[self.recipe.precision]).removeprefix("torch.")
            required = routes and self.recipe.rollout.routing_replay is True
            demands = Demands(exact, self.recipe.rollout.server.push, options.bucket_mib << 20, routes, required)
            return ServerFleet(options.clients, lambda client: detect_server(client, demands), exact=exact is not None)
        if routes:
            print_status(without_routes("SGLang" if self.recipe.rollout.engine == "sglang" else "vLLM"))
        if self.recipe.rollout.engine == "sglang":
            return SGLangServer(options.client)
        return VLLMServer(options.client, bucket_bytes=options.bucket_mib << 20)

    def _hand_over(self, options: ServerOptions, config: ModelConfig) -> HandOver:
        # Training multiplies by weights of this type; norms it computes with the trained weights as they are.
        dtype = None if self.recipe.numerics == "exact" else DTYPES[self.recipe.precision]
        assert options.exchange_folder is not None
        if self.route == "adapter":
            return AdapterHandOver(ADAPTER, options.exchange_folder, self._copy_adapter)
        if self.route == "group":
            return GroupHandOver(config, options.group_address, options.bucket_mib, dtype)
        return FolderHandOver(config, options.exchange_folder, options.bucket_mib, dtype)

    def _copy_adapter(self, folder: Path) -> None:
        assert self._adapter_folder is not None, "the adapter is written before it is handed over"
        shutil.copytree(self._adapter_folder, folder, dirs_exist_ok=True)
        shutil.rmtree(self._adapter_folder.parent)
        self._adapter_folder = None
