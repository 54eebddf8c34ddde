"""Seconds of rollouts and of the phases around them, on machines with speeds that can be added up by hand."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.small_config import small_config

from danlu.core.errors import DataError
from danlu.inference.fused_decoder import FusedDecoder
from danlu.models.config import ModelConfig, parameter_shapes
from danlu.models.decoder import Decoder
from danlu.models.layer_spec import Experts
from danlu.models.mixer_spec import Factorized, Latent
from danlu.models.packed_weights import PackedWeights
from danlu.parallel.layout import Layout
from danlu.planning.answer_trees import largest_micro_batch
from danlu.planning.cache_memory import EngineBounds, PoolSize
from danlu.planning.cards import find_card
from danlu.planning.cluster import Cluster
from danlu.planning.flops import DecoderFlops, attention_pairs
from danlu.planning.layer_graph import LayerTraining, LowRankAdapter
from danlu.planning.machine_profile import Result
from danlu.planning.measured_table import Seconds
from danlu.planning.model_tensors import ModelTensor, ModelTensors
from danlu.planning.rl_phases import RlPlace, rl_phases
from danlu.planning.rollout_lengths import AskedPrompt, RolloutLengths
from danlu.planning.rollout_passes import PassRun, RolloutPasses
from danlu.planning.rollout_seconds import EngineModel, EngineSeconds, Precision, is_plain
from danlu.planning.speeds import CardSpeeds, Efficiency
from danlu.planning.step import plan_step
from danlu.planning.step_plan import Phase, StepPlan
from danlu.planning.target import Target
from danlu.planning.workload import FrozenModel, Workload
from danlu.recipe.sections import (
    BatchSize,
    Data,
    ExactReward,
    Grpo,
    Kl,
    Model,
    ModelReward,
    Recipe,
    Rollout,
    Sigmoid,
    Source,
)

CONFIG = small_config()
BOUNDS = EngineBounds(sequences=256, batch_tokens=1024, block=16, cache_gib=1.0)
POOL = PoolSize(blocks=10_000, slots=0, running=256, host_blocks=0)


@dataclass(frozen=True)
class CountedSpeeds:
    """Speeds by which some operations take a second for each unit of work, and the others take no time."""

    flops: float = 0.0
    bytes: float = 0.0
    calls: float = 0.0
    elements: float = 0.0

    def product(self, m: float, n: float, k: float, precision: str, result: Result = "output") -> Seconds:
        return Seconds(self.flops * 2 * m * n * k)

    def grouped(
        self, groups: float, rows: float, n: float, k: float, precision: str, result: Result = "output"
    ) -> Seconds:
        return Seconds(self.flops * 2 * groups * rows * n * k)

    def attention(
        self, length: float, heads: float, width: float, precision: str, *, backward: bool = False
    ) -> Seconds:
        return Seconds(self.flops * 4 * heads * width * length * (length + 1) / 2 * (2 if backward else 1))

    def moved(self, count: float, kind: str = "copy", precision: str = "fp32") -> Seconds:
        return Seconds(self.bytes * count)

    def update(self, elements: float) -> Seconds:
        return Seconds(self.elements * elements)

    def dequantize(self, elements: float) -> Seconds:
        return Seconds(self.elements * elements)

    def call(self) -> Seconds:
        return Seconds(self.calls)

    def host(self, calls: int, moved_bytes: float) -> Seconds:
        return Seconds(0.0)


FLOPS, BYTES, CALLS, ELEMENTS = (CountedSpeeds(**{name: 1.0}) for name in ("flops", "bytes", "calls", "elements"))


def with_experts(config: ModelConfig) -> ModelConfig:
    return config.with_layers(lambda layer: replace(layer, feed=Experts(4, 2, 16)))


@pytest.mark.parametrize("config", [CONFIG, small_config(windows=(9, None)), with_experts(CONFIG)])
def test_products_of_a_rollout_are_those_of_its_tokens(config: ModelConfig) -> None:
    prompts = [AskedPrompt(30, (7, 1, 12)), AskedPrompt(1, (20,))]
    seconds = EngineSeconds(EngineModel(config, "bf16", "cuda"), FLOPS)
    counted = DecoderFlops(config)
    computed = seconds.of_passes(RolloutPasses(prompts, BOUNDS, POOL).runs())
    read = counted.forward([prompt.tokens for prompt in prompts], 0)
    grown = sum(tokens - 1 for prompt in prompts for tokens in prompt.answers)
    drawn = sum(sum(prompt.answers) for prompt in prompts)
    of_token = 2 * counted.weights
    head = 2 * drawn * config.hidden_size * config.vocab_size
    assert computed == pytest.approx(read + grown * of_token + head)
    assert computed != pytest.approx(read + drawn * of_token + head)  # control: the last tokens are not computed


def test_attention_reads_the_cache_of_each_answer() -> None:
    model = EngineModel(CONFIG, "fp32", "cuda")
    seconds = EngineSeconds(model, BYTES)
    of_token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, bytes
    few, many = (PassRun(1, 2, keys, keys // 2, draws=2) for keys in (400_000, 500_000))
    scores = 3 * 4 * 4 * 100_000 * 2  # of four heads in two layers
    assert seconds.of_run(many) - seconds.of_run(few) == pytest.approx(100_000 * of_token + scores)
    uneven = PassRun(1, 2, 400_000, 399_999, draws=2)  # copied together first
    assert seconds.of_run(uneven) > seconds.of_run(few)
    windowed = EngineSeconds(EngineModel(small_config(windows=(100, 100)), "fp32", "cuda"), BYTES)
    assert windowed.of_run(many) == windowed.of_run(few) < seconds.of_run(few)


def test_a_run_of_passes_takes_as_long_as_its_passes() -> None:
    seconds = EngineSeconds(EngineModel(CONFIG, "fp32", "cuda"), BYTES)
    together = seconds.of_run(PassRun(40, 8, 8 * 30_000, 30_000, draws=8))
    alone = [PassRun(1, 8, 8 * (30_000 + number), 30_000 + number, draws=8) for number in range(40)]
    assert together == pytest.approx(sum(map(seconds.of_run, alone)))


def test_quantized_weights_are_made_dense_in_each_pass_and_adapters_are_multiplied() -> None:
    adapted = LayerTraining(False, (("attention.q_proj", LowRankAdapter(3)),), quantized=True)
    model = EngineModel(CONFIG, "bf16", "cuda", adapted)
    run = PassRun(5, 2, 100, 50, draws=2)
    assert EngineSeconds(model, ELEMENTS).of_run(run) == 5 * DecoderFlops(CONFIG).weights
    plain, own = (EngineSeconds(replace(model, training=each), FLOPS) for each in (LayerTraining(), adapted))
    assert own.of_run(run) - plain.of_run(run) == pytest.approx(5 * 2 * 2 * 2 * 3 * (32 + 32))
    assert EngineSeconds(replace(model, training=LayerTraining()), ELEMENTS).of_run(run) == 0


def test_products_with_few_rows_are_bound_by_reading_packed_weights() -> None:
    for rows, is_faster in ((1, False), (8, True), (600, False)):
        run = PassRun(1, rows, 10 * rows, 10, draws=rows)

        class Slow(CountedSpeeds):
            """A product of few rows takes as long as one of 64."""

            def product(self, m: float, n: float, k: float, precision: str, result: Result = "output") -> Seconds:
                return Seconds(1e-9 * 2 * max(m, 64) * n * k)

        packed, exact = (EngineModel(CONFIG, "fp32", exact=exact) for exact in (False, True))
        seconds = [EngineSeconds(model, Slow(bytes=1e-12)).of_run(run) for model in (packed, exact)]
        assert (seconds[0] < 0.5 * seconds[1]) is is_faster, rows


VARIANTS: list[dict[str, Any]] = [
    {},
    {"qk_norm": "head"},
    {"qk_norm": "full"},
    {"windows": (9, 9)},
    {"windows": (9, None)},
    {"softcap": 3.0},
    {"norms": "sandwich"},
    {"qkv_bias": True},
    {"activation": "gelu_tanh"},
    {"activation": "gelu"},
    {"gated": False},
    {"sinks": True},
    {"output_gate": True},
    {"residual_multiplier": 0.5},
    {"mixer": Latent, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "v_head_dim": 7},
    {"mixer": Factorized, "query_rank": 8},
    {"deltas": (1,)},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_models_that_the_fused_decoder_takes_are_known_from_their_configs(changes: dict[str, Any]) -> None:
    config = small_config(**changes)
    model = Decoder(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    built = FusedDecoder.of(model, PackedWeights(1 << 30), torch.float32)
    assert is_plain(config) == (built is not None)


def recipe_of(objective: object = None, rollout: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    """A recipe of stage rl of 4 prompts, each with 2 answers of up to 10 tokens."""
    values: dict[str, Any] = {
        "stage": "rl",
        "model": Model(path="base"),
        "data": Data(train=[Source(path="rows.json")], max_length=64),
        "objective": [Grpo() if objective is None else objective],
        "rollout": Rollout(**{"samples": 2, "max_new_tokens": 10, **(rollout or {})}),
        "batch": BatchSize(prompts=4),
        "gradient_clipping": None,
        "precision": "fp32",
        "output": "runs/x",
    }
    return Recipe(**{**values, **changes})


def workload_of(recipe: Recipe) -> Workload:
    tensors = [ModelTensor(name, shape, 4, trained=True) for name, shape in parameter_shapes(CONFIG).items()]
    return Workload(recipe, CONFIG, ModelTensors(tuple(tensors)))


LENGTHS = RolloutLengths((AskedPrompt(20, (5, 10)), AskedPrompt(7, (1, 3)), AskedPrompt(9, (9, 9))), "as said")


def phases_of(recipe: Recipe, speeds: CountedSpeeds = FLOPS, **place: Any) -> dict[str, Phase]:
    """The phases by name on CUDA, where weights are multiplied as they are."""
    own = RlPlace(speeds, "cuda", "flash", **place)
    return {phase.name: phase for phase in rl_phases(workload_of(recipe), LENGTHS, BOUNDS, own).phases}


def test_an_update_computes_the_trees_that_it_trains_on() -> None:
    phases = phases_of(recipe_of())
    assert [*phases] == ["hand_over", "rollout", "reward", "update"]
    counted, targets = DecoderFlops(CONFIG), 37
    assert phases["rollout"].assumption == "as said"
    tokens = 36 + targets
    pairs = sum(
        attention_pairs((prompt.tokens + answer,)) - attention_pairs((prompt.tokens,))
        for prompt in LENGTHS.prompts
        for answer in prompt.answers
    ) + attention_pairs([prompt.tokens for prompt in LENGTHS.prompts])
    mixing = 2 * 4 * 8 * 4 * pairs  # layers; scores and sums of values of four heads of width 8
    head = 2 * targets * CONFIG.hidden_size * CONFIG.vocab_size
    of_weights = 2 * tokens * counted.weights
    assert phases["update"].seconds == pytest.approx(3 * of_weights + 3 * mixing + 4 * head)  # logits are made twice
    apart = Data(train=[Source(path="rows.json")], max_length=64, share_stem=False)
    copied = phases_of(recipe_of(data=apart))["update"].seconds
    assert copied == pytest.approx(3 * 2 * (2 * 36 + targets) * counted.weights + 3 * mixing + 4 * head + _stems())


def _stems() -> float:
    """The attention of one more copy of each prompt."""
    return 3 * 2 * 4 * 8 * 4 * attention_pairs([prompt.tokens for prompt in LENGTHS.prompts])


def test_scores_are_asked_of_the_models_that_the_recipe_needs() -> None:
    assert "scoring" not in phases_of(recipe_of())
    several = phases_of(recipe_of(batch=BatchSize(prompts=4, updates=2)))
    once = phases_of(recipe_of())
    update, head = once["update"].seconds, 2 * 37 * CONFIG.hidden_size * CONFIG.vocab_size
    assert several["scoring"].seconds == pytest.approx((update - 4 * head) / 3 + head)
    again = phases_of(recipe_of(batch=BatchSize(prompts=4, passes=3)))
    assert again["update"].seconds == pytest.approx(3 * update)
    of_optimizer = phases_of(recipe_of(batch=BatchSize(prompts=4, updates=2, passes=3)), ELEMENTS)
    count = sum(math.prod(shape) for shape in parameter_shapes(CONFIG).values())
    assert of_optimizer["update"].seconds == 6 * count


def test_a_reference_is_asked_once_where_its_score_is_in_the_reward() -> None:
    place, head = RlPlace(FLOPS, "cuda", "flash"), 2 * 37 * CONFIG.hidden_size * CONFIG.vocab_size
    plain = phases_of(recipe_of())["update"].seconds or 0.0
    forward = (plain - 4 * head) / 3 + head
    for where, scoring, update in (("reward", 2 * forward, plain), ("loss", None, plain + forward)):
        recipe = recipe_of(Grpo(kl=Kl(coefficient=0.1, **{"in": where})))
        workload = replace(workload_of(recipe), frozen=(FrozenModel("reference", CONFIG, ()),))
        phases = {phase.name: phase.seconds for phase in rl_phases(workload, LENGTHS, BOUNDS, place).phases}
        assert phases.get("scoring") == (None if scoring is None else pytest.approx(scoring))
        assert phases["update"] == pytest.approx(update), where


def test_phases_that_nobody_knows_say_so() -> None:
    rewards = [ExactReward(column="a"), ModelReward(path="judge")]
    reward = phases_of(recipe_of(rewards=rewards))["reward"]
    assert reward.seconds is None and reward.assumption == "the reward model of rewards.1 is not read"
    workload = replace(workload_of(recipe_of(rewards=rewards)), reward_models=(("rewards.1", CONFIG),))
    judged = rl_phases(workload, LENGTHS, BOUNDS, RlPlace(FLOPS, "cuda", "flash")).phases[2]
    lengths = [prompt.tokens + answer for prompt in LENGTHS.prompts for answer in prompt.answers]
    assert judged.seconds == pytest.approx(DecoderFlops(CONFIG).forward(lengths, 0))
    assert judged.assumption.startswith("1 other rewards take no time")
    served = recipe_of(rollout={"engine": "vllm", "url": "http://localhost:1"})
    assert phases_of(served)["rollout"].seconds is None is phases_of(served)["hand_over"].seconds
    linked = phases_of(served, link=lambda size: size / 4)["hand_over"].seconds
    assert linked == len(parameter_shapes(CONFIG))


def test_of_asynchronous_rollouts_the_slower_side_counts() -> None:
    recipe = recipe_of(rollout={"staleness": 1})
    place = RlPlace(FLOPS, "cuda", "flash")
    by_update = [rl_phases(workload_of(recipe), LENGTHS, BOUNDS, place, update_s) for update_s in (1.0, 1e12)]
    rollout = next(phase.seconds for phase in by_update[0].phases if phase.name == "rollout")
    assert [each.slower for each in by_update] == ["rollouts", "trainer"]
    assert by_update[0].total == rollout and by_update[1].total == pytest.approx(1e12)
    in_turns = rl_phases(workload_of(recipe_of()), LENGTHS, BOUNDS, place, 1e12)
    assert in_turns.slower is None and in_turns.total == pytest.approx(1e12 + (rollout or 0))
    halves = recipe_of(rollout={"staleness": 1, "processes": 2})
    shared = rl_phases(workload_of(halves), LENGTHS, BOUNDS, place, 1.0)
    assert shared.total < by_update[0].total


def test_lengths_are_those_of_a_file(tmp_path: Path) -> None:
    recipe, file = recipe_of(), tmp_path / "lengths.jsonl"
    longest = RolloutLengths.longest(recipe)
    assert longest.prompts == (AskedPrompt(54, (10, 10)),) * 4 and "data.max_length" in longest.assumption
    lines = [{"prompt_tokens": 3 + number, "answer_tokens": [number + 1, 20]} for number in range(8)]
    file.write_text("\n".join(map(json.dumps, lines)))
    found = RolloutLengths.of_file(recipe, file)
    assert found.prompts == tuple(AskedPrompt(3 + number, (number + 1, 10)) for number in (0, 2, 4, 6))
    assert found.assumption == "answers are as long as in lengths.jsonl, and prompts too"
    answers = [{"text": "ab" * 6, "tokens": [1] * 4}, {"text": "a" * 24, "tokens": [2] * 8}]
    file.write_text(json.dumps({"prompt": [{"role": "user", "content": "x" * 30}], "answers": answers}))
    of_run = RolloutLengths.of_file(recipe, file)
    assert of_run.prompts == (AskedPrompt(10, (4, 8)),) * 4
    assert "a token for each 3.0 characters" in of_run.assumption
    file.write_text("3\n7\n\n5")
    assert RolloutLengths.of_file(recipe, file).prompts[1] == AskedPrompt(54, (7, 5))
    for content, message in (
        ("", "lengths.jsonl: no line with lengths. Each line is"),
        ('{"a": 1}\n{', "lengths.jsonl:1: no answer_tokens and no answers. Each line is"),
        ('{"answer_tokens": 3}\n{', "lengths.jsonl:2: not JSON (Expecting property name"),
        ('{"answer_tokens": [3, 0]}', "lengths.jsonl:1: answer 2: 0 is no number of tokens, which is 1 or more"),
        ('{"prompt_tokens": "9", "answer_tokens": 3}', "lengths.jsonl:1: prompt_tokens: '9' is no number of tokens"),
        ("[]", "lengths.jsonl:1: not a mapping"),
        ("3\n0", "lengths.jsonl:2: 0 is no number of tokens"),
    ):
        file.write_text(content)
        with pytest.raises(DataError) as error:
            RolloutLengths.of_file(recipe, file)
        assert message in str(error.value)
    with pytest.raises(DataError, match=r"gone.jsonl: cannot be read \(No such file"):
        RolloutLengths.of_file(recipe, tmp_path / "gone.jsonl")


def test_a_plan_has_the_cache_of_rollouts_where_these_take_most() -> None:
    target, layout = Target(Cluster.of("H100-80G")), Layout()

    def planned(prompts: int, **rollout: Any) -> StepPlan:
        recipe, lengths = recipe_of(rollout=rollout), RolloutLengths((AskedPrompt(20, (10, 10)),) * prompts, "")
        return plan_step(replace(workload_of(recipe), rollout_lengths=lengths), layout, target)

    several, one, aside = planned(400), planned(1), planned(400, staleness=1)
    for plan in (several, one, aside):
        assert plan.rollout is not None and plan.rollout.total > 0
    answering, training, beside = (plan.worst.memory for plan in (several, one, aside))
    assert answering.kv_cache >= 800 * 30 * 2 * 2 * 16 * 4  # texts, tokens, layers, keys and values, width, bytes
    assert answering.parts.gradients == 0 < answering.parts.optimizer
    assert (training.kv_cache, beside.kv_cache) == (0, 0)
    assert answering.kv_cache > training.allocated and beside.allocated > training.allocated


def test_the_largest_micro_batch_has_whole_trees() -> None:
    recipe = recipe_of()  # of 64 tokens a sequence
    for prompts, micro, largest in (
        ([AskedPrompt(20, (5, 10))] * 4, 1, 1),
        ([AskedPrompt(20, (5, 10))] * 4, 2, 2),  # three trees of 35 tokens fit into 128
        ([AskedPrompt(20, (100, 100))], 1, 4),
        ([], 3, 1),
    ):
        workload = replace(workload_of(recipe), rollout_lengths=RolloutLengths(tuple(prompts), ""))
        assert largest_micro_batch(workload, micro, 1) == largest, prompts
    longest = workload_of(recipe)
    assert largest_micro_batch(longest, 1, 1) == 2  # of 54 + 2 x 10 tokens
    pairs = workload_of(recipe_of(Sigmoid(), rollout={"samples": 8}))
    assert largest_micro_batch(pairs, 1, 1) == 2
    assert largest_micro_batch(workload_of(recipe_of(rollout={"samples": 8})), 1, 1) == 3


def test_tokens_a_second_of_published_runs_are_met() -> None:
    """Greedy decoding of 8 layers of 8B, 64 tokens behind 64: benchmarks/RESULTS.md, two GPUs on two hosts."""
    config = small_config(
        layers=8, hidden_size=4096, intermediate_size=14336, heads=32, kv_heads=8, head_dim=128, vocab_size=128_256
    )
    runs = {("fp32", 1): 166, ("fp32", 16): 1270, ("bf16", 1): 149, ("bf16", 16): 2233}
    speeds = CardSpeeds(find_card("H200"), Efficiency(product=0.87, narrow=200.0, memory=0.75, call_s=2e-5))
    precisions: dict[str, Precision] = {"fp32": "fp32", "bf16": "bf16"}
    for (precision, answers), measured in runs.items():
        seconds = EngineSeconds(EngineModel(config, precisions[precision], "cuda"), speeds)
        passes = RolloutPasses([AskedPrompt(64, (64,))] * answers, BOUNDS, POOL)
        assert answers * 64 / seconds.of_passes(passes.runs()) == pytest.approx(measured, rel=0.26), precision
