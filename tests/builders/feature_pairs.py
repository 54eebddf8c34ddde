"""The table of pairs of features: which tests run them together, or the message that refuses them.

A feature is what it changes of a recipe; layer kinds and what happens to a run change nothing there. Each line names a
feature, those that it meets, and the test (`FILE::TEST[CASE]`, below tests/) in which they meet; `{0}` and `{1}` in it
stand for the two names.
"""

from __future__ import annotations

from typing import Any, NamedTuple

KINDS = "window, softcap, sinks, latent, factorized, key-reuse, linear, experts"
"""Of layers, which a model's config tells of."""
FEATURES: dict[str, dict[str, Any]] = {
    # -- adapters
    "lora": {"adapter": {"kind": "lora"}},
    "dora": {"adapter": {"kind": "dora"}},
    "vera": {"adapter": {"kind": "vera"}},
    "mora": {"adapter": {"kind": "mora"}},
    "ia3": {"adapter": {"kind": "ia3"}},
    "bottleneck": {"adapter": {"kind": "bottleneck"}},
    "prefix": {"adapter": {"kind": "prefix"}},
    "prompt": {"adapter": {"kind": "prompt"}},
    "adapter": {"adapter": {"kind": "lora"}},
    # -- layer kinds
    **{name: {} for name in KINDS.split(", ")},
    # -- layouts
    "context": {"parallel": {"context": 2}},
    "tensor": {"parallel": {"tensor": 2}},
    "pipeline": {"parallel": {"pipeline": {"stages": 2}}},
    "pipedream": {"parallel": {"pipeline": {"stages": 2, "schedule": "pipedream"}}},
    "zero3": {"parallel": {"shard": "zero3"}},
    "expert axis": {"parallel": {"expert": 2}},
    "device map": {"parallel": {"device_map": "balanced"}},
    "threads": {"parallel": {"workers": "threads"}},
    # -- stages and objectives
    "sft": {"stage": "sft"},
    "pretrain": {"stage": "pretrain"},
    "dpo": {"stage": "dpo", "batch": {"rows": 4}},
    "reward": {"stage": "reward", "batch": {"rows": 4}},
    "distill": {"stage": "distill", "teacher": ["base"]},
    "grpo": {"stage": "grpo", "rewards": ["my.py:short"]},
    "ppo": {"stage": "ppo", "rewards": ["my.py:short"]},
    "online-dpo": {"stage": "online-dpo", "rewards": ["my.py:short"]},
    # -- what a step or a run has besides
    "recompute": {"memory": {"recompute": {"kind": "full"}}},
    "planned recompute": {"memory": {"recompute": {"kind": "planned", "budget": 1}}, "batch": {"micro": 1}},
    "offload of parameters": {"memory": {"offload": ["parameters"]}},
    "ema": {"ema": 0.9},
    "compile": {"compile": True},
    "exact numerics": {"numerics": "exact"},
    "balanced router": {"router": {"balance": "bias"}},
    "capacity": {"router": {"balance": "step", "capacity": 2.0}},
    "packing": {"data": {"packing": "best-fit"}},
    "joined documents": {"data": {"packing": "concatenate"}},
    "quantization": {"quantization": "nf4", "adapter": {"kind": "lora"}},
    "galore": {"optimizer": {"kind": "galore"}},
    "muon": {"optimizer": {"kind": "muon"}},
    # -- rollouts
    "asynchronous": {"rollout": {"staleness": 2}},
    "passes": {"batch": {"passes": 2}},
    "environment": {"environment": {"kind": "tools", "tools": ["my.py:short"]}},
    "agent": {"environment": {"kind": "agent", "path": "my.py:short"}},
    "lengths rewarded": {"objective": [{"kind": "grpo", "overlong": {"margin": 8}}]},
    **{name: {} for name in ("micro-batches", "rewind", "resumed", "replay", "killed", "rewritten history")},
}


class Pair(NamedTuple):
    """Two features; a test that runs them together, or, with `message`, what refuses them."""

    one: str
    other: str
    test: str
    message: str


def run(one: str, others: str, test: str) -> list[Pair]:
    """others: separated by commas."""
    return [Pair(one, other, test.format(one, other), "") for other in others.split(", ")]


def refused(one: str, others: str, message: str, test: str = "") -> list[Pair]:
    """The recipe alone is refused; where it takes the model to tell, by the test."""
    return [Pair(one, other, test.format(one, other), message) for other in others.split(", ")]


UPON = "inference/test_adapter_pairs.py::test_an_adapter_upon_an_attention[{0}-{1}]"
NO_PLACE = "inference/test_adapter_pairs.py::test_an_adapter_that_an_attention_has_no_place_for[{0}-{1}]"
CONTEXT = "parallel/test_context.py::test_context_ranks_are_one_process"
ATTENDED = "parallel/test_context_attention.py::test_context_ranks_are_one_process"
PIPELINE = "parallel/test_pipeline.py::test_stages_are_one_process"
STAGES = "parallel/test_pipeline_stages.py::test_stages_are_one_process"
TENSOR = "parallel/test_tensor.py::test_a_cut_model_computes_what_the_whole_one_does"
CUT_ADAPTERS = "parallel/test_tensor.py::test_adapters_of_every_kind_are_cut_with_their_layers"
SHARDED = "parallel/test_sharded_adapters.py::test_a_sharded_adapter_learns_as_on_one_process"
EXPERT = "parallel/test_expert.py::test_distributed_experts_are_one_process"
COMPOSED = "verification/test_compositions.py::test_a_layout_of_several_axes_is_one_process"
MAPPED = "parallel/test_device_map.py::test_the_bits_are_those_of_one_device"
LENGTHS = "parallel/test_device_map.py::test_micro_batches_of_other_lengths_add_up_as_on_one_device"
MAPPED_RUN = "test_device_map_runs.py::test_a_run_on_several_devices_equals_the_one_on_one_device"
ADAPTER_RUN = "test_adapter_runs.py::test_interrupted_and_resumed_equals_uninterrupted"
REMADE = "memory/test_recompute.py::test_the_bits_are_those_of_a_step_that_keeps_everything"

ADAPTERS_ON_ATTENTION = [
    *run("lora", KINDS, UPON),
    *run("dora", KINDS, UPON),
    *run("vera", KINDS, UPON),
    *run("mora", KINDS, UPON),
    *run("bottleneck", KINDS, UPON),
    *run("prompt", KINDS, UPON),
    *run("ia3", "window, softcap, sinks, factorized, linear, experts", UPON),
    *refused("ia3", "latent", "'k_proj' matches no layer of this model", NO_PLACE),
    *refused("ia3", "key-reuse", "'v_proj' matches no layer of this model", NO_PLACE),
    *run("prefix", "window, softcap, sinks, experts", UPON),
    *refused("prefix", "latent, factorized, key-reuse", "a prefix takes the place of keys and values", NO_PLACE),
    *refused("prefix", "linear", "linear attention do not keep", NO_PLACE),
]
ATTENTION_IN_LAYOUTS = [
    *run("window", "context, zero3", CONTEXT + "[windows, zero3]"),
    *run("window", "pipeline", PIPELINE + "[windows, interleaved]"),
    *run("window", "tensor", TENSOR + "[gemma2]"),
    *run("window", "device map", LENGTHS + "[windows]"),
    *run("softcap", "context, zero3", CONTEXT + "[windows, zero3]"),
    *run("softcap", "pipeline", PIPELINE + "[windows, interleaved]"),
    *run("softcap", "tensor", TENSOR + "[gemma2]"),
    *run("sinks", "context", ATTENDED + "[softcap and sinks]"),
    *run("sinks", "tensor", TENSOR + "[sinks and gates]"),
    *run("latent", "context", CONTEXT + "[latent]"),
    *run("latent", "pipeline", PIPELINE + "[latent, by hand, zb-h1]"),
    *run("latent", "tensor", TENSOR + "[latents, full recompute]"),
    *run("latent", "zero3", COMPOSED + "[context x shard]"),
    *run("latent", "expert axis", COMPOSED + "[expert x shard]"),
    *run("latent", "device map", LENGTHS + "[latent]"),
    *run("key-reuse", "tensor", TENSOR + "[key reuse, selective recompute]"),
    *run("linear", "context", CONTEXT + "[linear attention]"),
    *run("linear", "zero3", CONTEXT + "[linear attention, zero3, recompute]"),
    *run("linear", "tensor", CONTEXT + "[linear attention x tensor, sequence]"),
    *run("linear", "pipeline", PIPELINE + "[linear attention, zbv]"),
    *run("linear", "device map", LENGTHS + "[linear attention]"),
    *run("experts", "tensor", EXPERT + "[tensor 2, sequence]"),
    *run("experts", "zero3, expert axis", EXPERT + "[zero3, expert 2]"),
    *run("experts", "context", EXPERT + "[expert 2 x context 2]"),
    *run("experts", "pipeline", COMPOSED + "[expert x pipeline]"),
    *run("experts", "device map", MAPPED + "[experts]"),
]
ADAPTERS_IN_LAYOUTS = [
    *run("lora", "context", CONTEXT + "[windows, lora]"),
    *refused("context", "prefix, prompt", "adapter.kind: virtual tokens are kept where a document begins"),
    *run("lora", "tensor", CUT_ADAPTERS + "[lora on latents]"),
    *run("dora", "tensor", CUT_ADAPTERS + "[dora on factors]"),
    *run("vera", "tensor", CUT_ADAPTERS + "[vera, linear attention]"),
    *run("mora", "tensor", CUT_ADAPTERS + "[mora, rotation]"),
    *run("ia3", "tensor", CUT_ADAPTERS + "[ia3, other sides]"),
    *run("bottleneck", "tensor", CUT_ADAPTERS + "[bottleneck]"),
    *run("prefix", "tensor", CUT_ADAPTERS + "[prefix, projection]"),
    *run("prompt", "tensor", CUT_ADAPTERS + "[prompt, gemma2]"),
    *run("lora", "pipeline", PIPELINE + "[lora on another, zbv]"),
    *run("vera", "pipeline", PIPELINE + "[x zero3, vera]"),
    *run("prefix", "pipeline", PIPELINE + "[prefix, interleaved]"),
    *refused("pipeline", "prompt", "adapter.kind: a soft prompt is at the embedding alone"),
    *run("zero3", "lora, dora, vera, mora, ia3, bottleneck, prefix, prompt", SHARDED + "[{1}]"),
    *refused("threads", "adapter", "adapter: threads are for looking at how whole models are trained"),
]
DEVICE_MAPS = [
    *run("device map", "micro-batches", LENGTHS + "[recomputed in parts]"),
    *run("device map", "lora", MAPPED_RUN + "[lora]"),
    *run("device map", "vera", MAPPED_RUN + "[vera]"),
    *run("device map", "prefix", LENGTHS + "[prefix]"),
    *run("device map", "prompt", MAPPED + "[prompt]"),
    *run("device map", "quantization", MAPPED_RUN + "[qlora]"),
    *run("device map", "recompute", MAPPED + "[recomputed segments]"),
    *run("device map", "ema", MAPPED_RUN + "[whole]"),
    *run("device map", "capacity", MAPPED_RUN + "[experts]"),
    *run("device map", "dpo", "test_device_map_runs.py::test_a_reference_lies_on_the_devices_of_the_policy"),
    *run("device map", "reward", "test_device_map_runs.py::test_a_head_that_scores_is_where_the_last_norm_is"),
    *run("device map", "distill", "test_device_map_runs.py::test_teachers_of_other_shapes_are_dealt_their_own_layers"),
    *refused("device map", "grpo, ppo", "stage: rewards, values and routes of answers are those of a model on one"),
    *refused("device map", "zero3", "parallel.shard: a model is sharded among processes"),
    *refused("device map", "tensor", "parallel.tensor: a device map divides the layers within one process"),
    *refused("device map", "context", "parallel.context: a device map divides the layers within one process"),
    *refused("device map", "exact numerics", "numerics: whether bits are those of a rollout is checked on one"),
    *refused("device map", "compile", "compile: what is compiled is the forward pass on one device"),
    *refused("device map", "planned recompute", "memory.recompute.kind: a plan is measured on one device"),
    *refused("device map", "offload of parameters", "memory.offload: parameters are offloaded from one device"),
    *refused("device map", "threads", "parallel.workers: threads each have a copy of the model on one device"),
]
STAGES_AND_STEPS = [
    *run("adapter", "sft, micro-batches", "test_adapter_runs.py::test_dropout_does_not_depend_on_micro_batches"),
    *run("adapter", "ema", ADAPTER_RUN + "[olora, averaged]"),
    *run("adapter", "recompute", REMADE + "[lora-dropout]"),
    *run("adapter", "compile", "test_adapter_runs.py::test_a_compiled_run_is_the_same_but_for_rounding"),
    *run("adapter", "distill", "stages/test_distillation.py::test_it_trains_adapters_fp16_and_plain_text"),
    *run("adapter", "reward", "test_reward_runs.py::test_an_adapter_is_scored_alike_by_peft_and_merged"),
    *run("adapter", "dpo", "stages/test_reference_layouts.py::test_every_kind_is_the_same_in_every_layout"),
    *run("adapter", "grpo", "test_rl_equal_runs.py::test_adapters_leave_no_gap_in_exact_numerics"),
    *run("adapter", "ppo", "test_reward_on_base.py::test_policy_reference_reward_and_values_are_adapters_on_one_base"),
    *refused("adapter", "galore", "optimizer.kind: galore projects gradients of whole matrices"),
    *refused("adapter", "balanced router", "router.balance: bias changes what experts of the base are chosen by"),
    *run("micro-batches", "dpo", "objectives/test_preference_steps.py::test_micro_batches_change_nothing"),
    *run("micro-batches", "reward", "test_reward_runs.py::test_micro_batches_change_nothing"),
    *run("micro-batches", "grpo", "objectives/test_policy.py::test_micro_batches_change_nothing"),
    *run("micro-batches", "ppo", "stages/test_critic.py::test_each_model_has_the_gradient_that_it_has_alone"),
    *run("pipeline", "dpo, reward, distill", STAGES),
    *run("pipeline", "ema", "test_parallel_runs.py::test_a_run_on_several_processes_ends_where_one_does"),
    *run("context", "dpo", "objectives/test_preference_steps.py::test_context_ranks_change_nothing"),
    *run("context", "grpo", "objectives/test_policy.py::test_context_ranks_change_nothing"),
    *run("context", "ppo", "test_critic_layouts.py::test_every_layout_learns_the_same[ulysses, zero3]"),
    *run("joined documents", "pretrain", "test_resume.py::test_interrupted_and_resumed_equals_uninterrupted"),
    *refused("sft", "joined documents", "data.packing.kind: a conversation must stay whole"),
    *refused("dpo", "packing", "data.packing.kind: a step of stage preference counts rows"),
    *refused("grpo", "packing", "data.packing.kind: a step of stage rl counts rows"),
    *refused("grpo", "capacity", "router.capacity: full experts would drop tokens in training"),
    *refused("context", "exact numerics", "numerics: context ranks add up attention in another order"),
    *refused("context", "compile", "compile: torch.compile does not follow the collectives of context"),
    *refused("context", "planned recompute", "memory.recompute.kind: a plan is measured on whole packed sequences"),
    *refused("context", "capacity", "router.capacity: which rows an expert has no room for"),
    *refused("tensor", "exact numerics", "parallel.tensor: tensor ranks add their sums in an order of their own"),
    *refused("tensor", "compile", "compile: torch.compile does not follow the collectives of tensor"),
    *refused("tensor", "muon", "optimizer.kind: muon works on whole matrices"),
    *refused("zero3", "muon", "optimizer.kind: muon works on whole matrices"),
    *refused("pipeline", "exact numerics", "numerics: whether bits are those of a rollout is checked on a whole model"),
    *refused("compile", "recompute", "compile: compiled code decides itself what it keeps"),
    *refused("compile", "exact numerics", "compile: compiled code rounds by the shapes it is made for"),
    *refused("pipedream", "dpo, grpo", "stage: pipedream begins steps before the weights are there"),
    *refused("pipedream", "zero3", "parallel.shard: FSDP2 gathers the newest parameters in a backward pass"),
    *refused("pipedream", "ema", "ema: an average is of whole models after each step"),
]
ROLLOUTS = [
    *run("grpo", "passes", "test_rl_runs.py::test_a_run_stopped_in_a_rollout_goes_on_as_if_it_had_not_been"),
    *run("grpo", "asynchronous", "test_rl_asynchronous.py::test_it_learns_from_answers_of_bounded_age"),
    *run("grpo", "killed", "test_rl_equal_runs.py::test_killed_in_the_middle_of_rollouts[{0}]"),
    *run("ppo", "killed", "test_rl_equal_runs.py::test_killed_in_the_middle_of_rollouts[{0}]"),
    *run("grpo", "environment", "test_environment_runs.py::test_a_policy_learns_over_several_turns"),
    *run("ppo", "environment", "test_environment_runs.py::test_objectives_take_episodes[ppo]"),
    *run(
        "ppo",
        "rewritten history, agent",
        "test_agent_runs.py::test_ppo_is_trained_on_episodes_with_a_rewritten_history",
    ),
    *run("ppo", "passes", "test_rl_runs.py::test_ppo_trains_a_critic_beside_the_policy"),
    *run("grpo", "rewritten history", "objectives/test_policy.py::test_an_answer_in_several_branches_is_one_answer"),
    *run("grpo", "replay", "run/test_replay.py::test_a_rollout_made_again_has_the_same_tokens"),
    *run("grpo", "exact numerics", "test_rl_runs.py::test_exact_numerics_leave_no_gap"),
    *run("online-dpo", "resumed", "test_online_dpo.py::test_a_run_stopped_in_a_rollout_goes_on_as_if_it_had_not_been"),
    *run("asynchronous", "passes", "rl/test_asynchronous.py::test_staleness_counts_the_updates_of_all_passes"),
    *run("asynchronous", "rewind", "rl/test_asynchronous.py::test_a_rewind_into_a_rollout_of_several_passes"),
    *run("passes", "rewind", "rl/test_asynchronous.py::test_a_rewind_into_a_rollout_of_several_passes"),
    *run(
        "asynchronous", "resumed", "test_rl_asynchronous.py::test_a_run_that_is_stopped_goes_on_with_the_answers_it_has"
    ),
    *run(
        "asynchronous",
        "environment",
        "test_asynchronous_environments.py::test_with_weights_that_stay_as_they_are_the_same_episodes_are_played",
    ),
    *run(
        "asynchronous",
        "replay",
        "test_rl_asynchronous.py::test_a_rollout_is_replayed_with_the_weights_that_drew_each_token",
    ),
    *run("asynchronous", "experts", "test_rl_experts.py::test_asynchronous_rollouts_bring_theirs"),
    *run(
        "replay", "rewind", "run/test_replay.py::test_a_run_that_went_back_is_refused_unless_a_checkpoint_lies_after_it"
    ),
    *refused("asynchronous", "agent", "rollout.staleness: 2: agents ask the policy of the trainer"),
    *refused("environment", "lengths rewarded", "objective.0.overlong: shapes by the length of a single answer"),
    *refused("environment", "online-dpo", "environment: pairs are of answers in one turn"),
]
GROUPS = {
    "adapters and layer kinds": ADAPTERS_ON_ATTENTION,
    "layer kinds and layouts": ATTENTION_IN_LAYOUTS,
    "adapters and layouts": ADAPTERS_IN_LAYOUTS,
    "device maps": DEVICE_MAPS,
    "stages and steps": STAGES_AND_STEPS,
    "rollouts": ROLLOUTS,
}
