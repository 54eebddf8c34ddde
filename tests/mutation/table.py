"""The mutations: each changes one line of one file, and some test of that file's room has to fail.

A line that has changed since is an error of this table, which `mutation/test_mutation.py` finds: write the mutation for
the line that stands there now, or delete it with the behaviour that it was about.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutation:
    """`old` in `src/danlu/FILE`, where it stands exactly once and on one line, becomes `new`."""

    file: str
    old: str
    new: str
    tests: str  # files below tests/, separated by spaces
    only: str = ""  # of these files the tests that pytest's -k selects, where all of them take long

    @property
    def name(self) -> str:
        return f"{self.file}: {self.old} -> {self.new}"

    def problem(self, root: Path) -> str:
        """Why it cannot be applied to the tree at `root`; empty if it can."""
        try:
            text = (root / "src" / "danlu" / self.file).read_text(encoding="utf-8")
        except FileNotFoundError:
            return "there is no such file"
        if (count := text.count(self.old)) != 1:
            return f"the old text is found {count} times"
        if self.old == self.new or "\n" in self.old + self.new:
            return "it changes no line, or several"
        missing = [name for name in self.tests.split() if not (root / "tests" / name).is_file()]
        if missing or not self.tests:
            return f"no such tests: {', '.join(missing)}"
        try:
            compile(text.replace(self.old, self.new), self.file, "exec")
        except SyntaxError as error:
            return f"what it makes does not compile: {error}"
        return ""

    def apply(self, root: Path) -> str:
        """The text of the mutated file, of a tree in which it has no `problem`."""
        return (root / "src" / "danlu" / self.file).read_text(encoding="utf-8").replace(self.old, self.new)


MUTATIONS: tuple[Mutation, ...] = (
    # -- layers on several devices of one process
    Mutation(
        "parallel/device_map.py",
        "        if device not in copies:",
        "        if True:",
        "parallel/test_device_map.py",
        only="tables_once",
    ),
    Mutation(
        "parallel/device_map.py",
        "moves_input=own != device, rotations",
        "moves_input=True, rotations",
        "parallel/test_device_map.py",
        only="tables_once",
    ),
    Mutation(
        "parallel/device_map.py",
        "rotations=None if own == device_map.head else rotations",
        "rotations=None",
        "parallel/test_device_map.py",
        only="on_one_device and dense",
    ),
    Mutation(
        "models/load_balancing.py",
        "if self.tokens is None or self.tokens.real.device == device:",
        "if True:",
        "parallel/test_device_map.py",
        only="own_device",
    ),
    Mutation(
        "planning/layer_graph.py",
        "            kept.names -= made_again",
        "            break",
        "planning/test_layer_graph.py",
    ),
    Mutation(
        "planning/layer_memory.py",
        "        live = {name: size for name, size in live.items() if name in needed}",
        "        pass",
        "planning/test_layer_memory.py",
    ),
    Mutation(
        "planning/device_map.py",
        "            extras[names.index(place)] += matrix",
        "            pass",
        "planning/test_device_map.py",
    ),
    Mutation(
        "planning/device_map.py",
        'shares = None if section == "balanced" or None in free',
        "shares = None if True",
        "planning/test_device_map.py",
    ),
    Mutation(
        "assembly/parallelize.py",
        "move_part(self.model.layers[name], self.device_map.layers[int(name)])",
        "move_part(self.model.layers[name], self.device_map.head)",
        "test_device_map_runs.py",
        only="read_layer_by_layer",
    ),
    Mutation(
        "stages/builder.py",
        "        device = self._loss_device(config, device)",
        "        pass",
        "test_device_map_runs.py",
        only="teachers or lora",
    ),
    Mutation(
        "assembly/memory_estimate.py",
        "has_head=device == device_map.head,",
        "has_head=True,",
        "assembly/test_memory_estimate.py",
        only="device_of_a_map",
    ),
    Mutation(
        "assembly/memory_estimate.py",
        "return min(find_micro_batch(own, per_step, resident_bytes=resident) for own, resident in own_limits)",
        "return max(find_micro_batch(own, per_step, resident_bytes=resident) for own, resident in own_limits)",
        "assembly/test_memory_estimate.py",
        only="fits_into_each",
    ),
    Mutation(
        "inference/device_pools.py",
        "        attend = self._attends[self._devices[layer]]",
        "        attend = next(iter(self._attends.values()))",
        "inference/test_device_pools.py",
    ),
    # -- stages of training in a pipeline
    Mutation(
        "stages/no_grad_pass.py",
        "partial(learner.judged_by, dropout_step=step)",
        "partial(learner.judged_by, dropout_step=None)",
        "parallel/test_pipeline_stages.py",
    ),
    Mutation(
        "stages/builder.py",
        "replace(each.box, is_writer=False)",
        "replace(each.box, is_writer=True)",
        "stages/test_reference_stages.py",
    ),
    # -- pipeline schedules
    Mutation(
        "parallel/schedules/compute_order.py",
        "if order.weights_left > rank:",
        "if order.weights_left > 0:",
        "parallel/test_schedules.py",
    ),
    Mutation(
        "parallel/schedules/compute_order.py",
        "(chunks - 1) * round_ + 2 * (stages - 1 - rank))",
        "(chunks - 1) * round_ + (stages - 1 - rank))",
        "parallel/test_schedules.py",
    ),
    Mutation(
        "parallel/schedules/v_shaped.py",
        "while order.backwards_left(up) > rank:",
        "while order.backwards_left(up) > 0:",
        "parallel/test_schedules.py",
    ),
    Mutation(
        "parallel/schedules/messages.py",
        "_MESSAGE, _REDUCE, _UPDATE, _COMPUTE = range(4)",
        "_COMPUTE, _MESSAGE, _REDUCE, _UPDATE = range(4)",
        "parallel/test_schedules.py",
    ),
    Mutation(
        "parallel/schedules/messages.py",
        "lists[peer].append(((end, _MESSAGE, key), receive))",
        "lists[peer].append(((end, _MESSAGE, key[::-1]), receive))",
        "parallel/test_schedules.py",
    ),
    Mutation(
        "parallel/schedules/action.py",
        'elif action.kind in ("backward", "weight"):',
        'elif action.kind in ("backward", "input"):',
        "parallel/test_schedules.py",
    ),
    Mutation(
        "parallel/weight_stash.py",
        "            self._copy_parameters()",
        "            pass",
        "parallel/test_weight_stash.py",
    ),
    Mutation(
        "parallel/weight_stash.py",
        "torch._C._autograd._unsafe_set_version_counter(self._parameters, weights.counters)",
        "return",
        "parallel/test_weight_stash.py",
    ),
    Mutation(
        "parallel/weight_stash.py",
        "if lowest <= version <= highest:",
        "if version <= highest:",
        "parallel/test_weight_stash.py",
    ),
    Mutation(
        "training/pipedream.py",
        "step - step % every + every for every in periods",
        "step + every for every in periods",
        "training/test_pipedream.py",
    ),
    Mutation(
        "training/executor.py",
        "(action.chunk, action.micro if each_updates else None): number",
        "(action.chunk, None): number",
        "training/test_executor.py",
    ),
    Mutation(
        "planning/dependency_order.py",
        "Step(rank, position, False, sends[-1] if sends else NONE, NONE, False)",
        "Step(rank, position, False, NONE, NONE, False)",
        "planning/test_pipeline_simulation.py",
    ),
    Mutation(
        "planning/dependency_order.py",
        "Step(rank, position, True, self._sum[rank], NONE, False)",
        "Step(rank, position, True, NONE, NONE, False)",
        "planning/test_pipeline_simulation.py",
    ),
    Mutation(
        "planning/step_walk.py",
        "            self.queue += cost.kept_for_weight",
        "            self.queue += 0",
        "planning/test_step_walk.py",
    ),
    Mutation(
        "planning/step_walk.py",
        "if len(self._unfinished) > UNFINISHED_SENDS:",
        "if self._unfinished:",
        "planning/test_step_walk.py",
    ),
    Mutation(
        "planning/step_walk.py",
        "                shared = before.message",
        "                shared = 0",
        "planning/test_step_walk.py",
    ),
    Mutation(
        "planning/step_walk.py",
        "        self.gradients += cost.gradients_of_forward",
        "        self.gradients += 0",
        "planning/test_step_walk.py",
    ),
    Mutation(
        "planning/action_times.py",
        'min(times) if kind == "send" else sum(times) / len(times)',
        "sum(times) / len(times)",
        "planning/test_action_times.py",
    ),
    Mutation(
        "parallel/timeline.py",
        'if events[-1].kind == "update"}',
        "if events}",
        "parallel/test_timeline.py",
    ),
    # -- experts
    Mutation(
        "models/load_balancing.py",
        "return torch._C._current_graph_task_id() != -1",
        "return False",
        "models/test_load_balancing.py",
        only="recomputed",
    ),
    Mutation(
        "models/load_balancing.py",
        "torch.sign(self.counts.mean() - self.counts)",
        "torch.sign(self.counts - self.counts.mean())",
        "models/test_load_balancing.py",
        only="biases",
    ),
    Mutation(
        "models/load_balancing.py",
        "chosen = torch.zeros_like(shares).scatter_(1, best, 1.0).masked_fill_(~tokens.real.unsqueeze(1), 0.0)",
        "chosen = torch.zeros_like(shares).scatter_(1, best, 1.0)",
        "models/test_load_balancing.py",
        only="virtual",
    ),
    Mutation(
        "data/batch.py",
        "real=F.pad(batch.real, (0, more_tokens)),",
        "real=F.pad(batch.real, (0, more_tokens), value=True),",
        "stages/test_expert_balance.py",
        only="real",
    ),
    Mutation(
        "models/grouped_mm.py",
        "_with_zeros(rows[group], size))",
        "rows[group.start : group.start + size])",
        "models/test_grouped_mm.py",
        only="own_rows",
    ),
    Mutation(
        "models/grouped_mm.py",
        "return -(-rows // multiple) * multiple",
        "return rows",
        "models/test_grouped_mm.py",
        only="few_sizes",
    ),
    Mutation(
        "models/experts.py",
        "self._replayed(self.chosen(scores.detach()))",
        "self._replayed(scores.detach().topk(self.top_k).indices)",
        "models/test_experts.py",
    ),
    # -- recipe
    Mutation(
        "recipe/overrides.py",
        "_drop(node.value, [name for name in section.one_of if name != part])",
        "_drop(node.value, [])",
        "recipe/test_overrides.py",
    ),
    Mutation(
        "recipe/diff.py",
        'if key == "checkpoint.every" and recipe.watch.policy == "rewind":',
        'if key == "checkpoint.every" and recipe.watch.policy == "warn":',
        "recipe/test_diff.py",
    ),
    Mutation(
        "recipe/diff.py",
        "different = [key for key in keys if old_values.get(key) != new_values.get(key)]",
        "different = [key for key in new_values if old_values.get(key) != new_values.get(key)]",
        "recipe/test_diff.py",
    ),
    Mutation(
        "recipe/sections/training.py",
        "return self.prompts // self.updates",
        "return self.prompts",
        "recipe/test_rl_rules.py",
    ),
    Mutation(
        "recipe/reference.py",
        'recipe.data.streaming or recipe.stage == "rl" else',
        "recipe.data.streaming else",
        "recipe/test_rl_rules.py",
    ),
    Mutation(
        "recipe/rules/rl.py",
        "if rollout.max_new_tokens >= data.max_length:",
        "if rollout.max_new_tokens > data.max_length:",
        "recipe/test_rl_rules.py",
    ),
    Mutation(
        "recipe/rules/training.py",
        "if isinstance(batch.micro, int) and packs % batch.micro:",
        "if isinstance(batch.micro, int) and packs < batch.micro:",
        "recipe/test_rules.py",
    ),
    Mutation(
        "recipe/rules/unread_keys.py",
        "if condition.is_met(value) or (condition.or_with and value_at(recipe, condition.or_with)):",
        "if condition.is_met(value) or condition.or_with:",
        "recipe/test_on_policy_rules.py recipe/test_rl_rules.py",
    ),
    Mutation(
        "recipe/rules/unread_keys.py",
        "base.model_fields.get(name) for base in section.__mro__ if issubclass(base, Section)",
        "base.model_fields.get(name) for base in section.__mro__[:1] if issubclass(base, Section)",
        "recipe/test_rl_rules.py",
    ),
    Mutation(
        "recipe/sections/training.py",
        'ReadWith("kind", "wsd", "only the wsd',
        'ReadWith("kind", "cosine", "only the wsd',
        "recipe/test_rules.py",
    ),
    Mutation(
        "training/timeline.py",
        "sum(step <= after_step for step in steps)",
        "sum(step < after_step for step in steps)",
        "training/test_timeline.py",
    ),
    Mutation(
        "memory/recompute.py",
        "chunks = [model.chunks.layers[chunk] for chunk in model.chunks.local]",
        "chunks = [layers]",
        "memory/test_recompute.py",
        "segments_end_with_their_chunk",
    ),
    Mutation(
        "planning/traffic.py",
        "if stage_of[before] != stage_of[behind]:",
        "if True:",
        "verification/test_pipeline_traffic.py",
        "messages_by_stage",
    ),
    # -- models
    Mutation(
        "models/delta_rule.py",
        "grad_log_decay[:, -1] += written.sum(-1) + last",
        "grad_log_decay[:, -1] += written.sum(-1)",
        "models/test_delta_rule.py",
    ),
    Mutation(
        "models/delta_rule.py",
        "grad_log_decay -= by_log_decay.sum(-2, dtype=torch.float64)",
        "grad_log_decay -= by_log_decay.sum(-2)",
        "models/test_delta_rule.py",
    ),
    Mutation(
        "models/delta_rule.py",
        "cut.masked_fill_(chunks.fill[:, None, :, None], 0)",
        "pass",
        "models/test_delta_rule.py",
    ),
    Mutation(
        "models/recurrent_order.py",
        "is_last = None if len(last) == len(level) else",
        "is_last = None if last else",
        "models/test_delta_rule.py",
    ),
    Mutation(
        "models/gated_delta_net.py",
        "grad_x.index_add_(0, tokens, grad_rows.index_select(0, of_rows))",
        "pass",
        "models/test_causal_conv.py",
    ),
    Mutation(
        "inference/scheduler.py",
        "self._state_copies.append((parent.slot, child.slot))",
        "pass",
        "inference/test_state_pool.py",
    ),
    Mutation(
        "inference/state_pool.py",
        "each.index_fill_(0, beginning, 0)",
        "pass",
        "inference/test_state_pool.py",
    ),
    Mutation(
        "adapters/hf_layers.py",
        "turns = self.parts[0].turns",
        "turns = 1",
        "adapters/test_peft_folder.py",
        "qwen3",
    ),
    Mutation(
        "models/block_scaled.py",
        "first = at[-1] % columns",
        "first = 0",
        "models/test_block_scaled.py",
    ),
    Mutation(
        "models/multimodal.py",
        "known = {**multimodal.defaults, **inner, **given",
        "known = {**multimodal.defaults, **given, **inner",
        "models/test_multimodal.py",
    ),
    Mutation(
        "models/hf_layout.py", "values[self.axis] *= self.stride", "values[self.axis] *= 1", "models/test_hf_parts.py"
    ),
    Mutation("models/hf_layout.py", "at[0] = each", "at[0] = 0", "models/test_hf_parts.py"),
    Mutation(
        "models/safetensors_io.py",
        "for start, end in ranges(count, elements):",
        "for start, end in ranges(count, count):",
        "models/test_hf_parts.py",
    ),
    Mutation(
        "models/initialize.py",
        'named_generator(seed, f"{name}[{expert}]")',
        "named_generator(seed, name)",
        "models/test_hf_parts.py",
    ),
    Mutation(
        "models/initialize.py",
        "return 1 / config.embedding_multiplier",
        "return 1.0",
        "models/test_initialize.py",
    ),
    Mutation(
        "models/initialize.py",
        "return small / math.sqrt(2 * len(config.layers))",
        "return small / math.sqrt(len(config.layers))",
        "models/test_initialize.py",
    ),
    Mutation(
        "models/segments.py",
        "self._position(query) - window + 1)",
        "self._position(query) - window + 2)",
        "models/test_attend.py",
    ),
    Mutation(
        "models/attend.py",
        "mask.triu(keys - queries + 1 - window)",
        "mask.triu(keys - queries - window)",
        "models/test_attend.py",
    ),
    Mutation(
        "models/block_attention.py", "grad_scores.mul_(weights.slope)", "grad_scores.mul_(1)", "models/test_attend.py"
    ),
    Mutation(
        "models/block_attention.py",
        "if not recomputed:",
        "if True:",
        "models/test_attend.py",
        only="computed_again",
    ),
    Mutation(
        "models/attend.py",
        "recomputed = layer in self._recomputed_layers",
        "recomputed = bool(self._recomputed_layers)",
        "models/test_attend.py",
        only="computed_again",
    ),
    Mutation(
        "stages/learner.py",
        "exact=self.exact, recomputed_layers=recomputed_layers)",
        "exact=self.exact, recomputed_layers=())",
        "training/test_step.py",
        only="make_them_twice",
    ),
    Mutation(
        "memory/recompute.py",
        'frozenset(entry.layer for entry in plan if entry.kind == "elementwise")',
        "frozenset()",
        "memory/test_recompute.py",
        only="what_the_table_says",
    ),
    Mutation("models/rope.py", "lengths[:, None] > scaling", "lengths[:, None] >= scaling", "models/test_rope.py"),
    Mutation("models/rope_config.py", "factor ** (dim / (dim - 2))", "factor", "models/test_rope.py"),
    Mutation(
        "models/long_context.py",
        "factor = length / original",
        "factor = length / rope.max_position_embeddings",
        "models/test_long_context.py",
    ),
    Mutation(
        "training/data_loader.py",
        "self.next = max(self.next, stretch.first_item)",
        "pass",
        "test_long_context_runs.py",
    ),
    Mutation(
        "inference/embedded.py",
        "long_root_digest(root) if is_long else root",
        "root",
        "inference/test_longrope.py",
    ),
    Mutation(
        "data/prepare.py",
        "        if held_out_rows:",
        "        if False:",
        "test_long_context_runs.py",
    ),
    Mutation("models/rope.py", "keep = 1 - ramp", "keep = ramp", "models/test_rope.py"),
    Mutation("models/rope.py", "(width / (width - 2))", "(width / (width - 1))", "models/test_rope.py"),
    Mutation(
        "models/ops.py",
        "scale = weight.to(wide.dtype) + offset if offset else weight",
        "scale = weight",
        "models/test_ops.py",
    ),
    Mutation(
        "models/ops.py",
        "ctx.vocab_size, -1, False)",
        "ctx.vocab_size, 0, False)",
        "models/test_ops.py",
    ),
    # -- adapters
    Mutation(
        "adapters/lora.py",
        "gain = factors.magnitude / (norm if self.exact_norm else norm.detach())",
        "gain = factors.magnitude / norm",
        "adapters/test_lora.py",
    ),
    Mutation(
        "adapters/lora.py",
        "return None if self.restores_base else self._dropout",
        "return self._dropout",
        "adapters/test_lora.py",
    ),
    Mutation(
        "adapters/lora.py",
        "return 0.0 if self.restores_base else self._dropout.p",
        "return self._dropout.p",
        "adapters/test_lora.py",
    ),
    Mutation(
        "adapters/lora.py",
        "bound = 1 / math.sqrt(inputs)",
        "bound = 1 / math.sqrt(rank)",
        "adapters/test_peft_folder.py",
        "initial_values",
    ),
    Mutation(
        "adapters/lora.py",
        "return y + linear.product(low, self.lora_B * self.scale, counts)",
        "return y + linear.product(low, self.lora_B, counts)",
        "adapters/test_grouped_lora.py",
    ),
    Mutation(
        "adapters/peft_stacked.py",
        "= b.permute(1, 2, 0).flatten(1).contiguous()",
        "= b.permute(1, 0, 2).flatten(1).contiguous()",
        "adapters/test_peft_stacked.py",
    ),
    Mutation(
        "adapters/peft_stacked.py",
        "for later in PARAMETERS[PARAMETERS.index(parameter) + 1 :] if",
        "for later in PARAMETERS[: PARAMETERS.index(parameter)] if",
        "adapters/test_peft_stacked.py",
    ),
    Mutation(
        "adapters/targets.py",
        "if site.experts is not None and EXPERTS not in target:",
        "if site.experts is not None and not target:",
        "adapters/test_grouped_lora.py",
    ),
    Mutation(
        "adapters/low_rank.py",
        "factors.base_row_squares + 2 * scale * cross",
        "factors.base_row_squares + scale * cross",
        "adapters/test_low_rank.py",
    ),
    Mutation(
        "adapters/low_rank.py",
        "grad_b = (grad.t() @ u).to(dtype).mul_(scale)",
        "grad_b = (grad.t() @ u).to(dtype)",
        "adapters/test_low_rank.py",
    ),
    Mutation(
        "adapters/dropout.py",
        "    DropoutState.token_keys = torch.compiler.disable(DropoutState.token_keys)",
        "    torch.compiler.disable(DropoutState.token_keys)",
        "adapters/test_dropout.py",
    ),
    Mutation(
        "adapters/dropout.py",
        r'_hash(f"{self.seed}\0{step}"), tuple(packs)',
        r'_hash(f"{self.seed}"), tuple(packs)',
        "adapters/test_dropout.py",
    ),
    Mutation(
        "adapters/dropout.py",
        "return x * kept * (1 / (1 - self.p))",
        "return x * kept",
        "adapters/test_dropout.py",
    ),
    Mutation(
        "adapters/mora.py",
        "second * cos + first * sin), dim=-1)",
        "second * cos - first * sin), dim=-1)",
        "adapters/test_mora.py",
    ),
    Mutation(
        "adapters/ia3.py",
        "None if dense.bias is None else dense.bias * vector)",
        "dense.bias)",
        "adapters/test_ia3.py",
    ),
    # -- data
    Mutation(
        "data/prompts.py",
        "if len(tokens) <= self._settings.longest:",
        "if len(tokens) < self._settings.longest:",
        "data/test_prompts.py",
    ),
    Mutation(
        "data/prompts.py",
        'self._seed, "prompts", epoch)[place]',
        'self._seed, "prompts")[place]',
        "data/test_prompts.py",
    ),
    Mutation(
        "data/prompts.py",
        "described = [prompt.tokens, sorted(prompt.row.items())]",
        "described = [prompt.tokens]",
        "data/test_prompts.py",
    ),
    Mutation(
        "data/prompt_formats.py",
        'while answered and messages and messages[-1].role == "assistant":',
        "while False:",
        "data/test_prompts.py",
    ),
    Mutation(
        "data/render.py",
        "weights.append(context if owner == turn and end <= border and weight else weight)",
        "weights.append(weight)",
        "data/test_begun_answers.py",
        only="from_the_end",
    ),
    Mutation(
        "data/chat_template.py",
        "return text[:end] if text.startswith(_CONTENT_END, end) else text[:end].rstrip()",
        "return text[:end]",
        "data/test_begun_answers.py",
        only="stage_rl",
    ),
    Mutation(
        "data/prompt_encoding.py",
        "turns, conversation.tools, prompt=True)",
        "turns, conversation.tools)",
        "data/test_prompts.py",
    ),
    Mutation(
        "data/prepare.py",
        '"settings": asdict(self._spec.settings(source.format)),',
        '"settings": asdict(self._spec.settings("auto")),',
        "data/test_prepare.py",
        "another_format",
    ),
    Mutation(
        "data/prepare.py",
        'starts = np.searchsorted(store.row_numbers, row_numbers, side="left")',
        'starts = np.searchsorted(store.row_numbers, row_numbers, side="right") - 1',
        "data/test_prepare.py",
        "pieces_of_a_split_row",
    ),
    Mutation(
        "data/batch.py",
        "predicted_from: np.ndarray = targets - 1",
        "predicted_from: np.ndarray = targets - 0",
        "data/test_batch.py",
    ),
    Mutation(
        "data/permutation.py",
        "round_key = (self.key ^ (number * 0xD1B54A32D192ED03)) & 0xFFFFFFFFFFFFFFFF",
        "round_key = self.key & 0xFFFFFFFFFFFFFFFF",
        "data/test_permutation.py",
    ),
    Mutation(
        "data/packed_dataset.py",
        "insort(open_packs, (free - length) << shift | pack)",
        "insort(open_packs, free << shift | pack)",
        "data/test_packing.py",
    ),
    Mutation(
        "data/packed_dataset.py",
        'np.argsort(-part.astype(np.int64), kind="stable")',
        'np.argsort(part.astype(np.int64), kind="stable")',
        "data/test_packing.py",
    ),
    Mutation("data/packed_dataset.py", "weights[:1] = 0", "weights[:0] = 0", "data/test_packed_dataset.py"),
    Mutation(
        "data/packed_dataset.py",
        'Permutation.of(self.packs_per_epoch, self._seed, "packs", epoch)',
        'Permutation.of(self.packs_per_epoch, self._seed, "packs")',
        "data/test_packed_dataset.py",
    ),
    Mutation(
        "data/mixture.py",
        "drawn = order.take(np.arange(wanted))",
        "drawn = np.arange(wanted)",
        "data/test_mixture.py",
    ),
    Mutation("data/mixture.py", "if kept[row_source] > 1:", "if kept[row_source] >= 1:", "data/test_mixture.py"),
    Mutation(
        "data/render.py",
        'weights = [1.0 if self._rendering.train_on == "all" else 0.0, 1.0]',
        "weights = [1.0, 1.0]",
        "data/test_render.py",
    ),
    Mutation(
        "data/message_spans.py",
        "if start < template.common_prefix_length(prompt, earlier):",
        "if start < 0:",
        "data/test_message_spans.py data/test_chat_template.py",
    ),
    Mutation(
        "data/statistics.py",
        "self.longest = max(value, added)",
        "self.longest = value",
        "data/test_prepare.py",
        "statistics_count",
    ),
    # -- objectives
    Mutation(
        "objectives/linear_cross_entropy.py",
        "gradient.mul_(weights.unsqueeze(1) * options.gradient_scale)",
        "gradient.mul_(weights.unsqueeze(1))",
        "objectives/test_linear_cross_entropy.py",
    ),
    Mutation(
        "objectives/linear_cross_entropy.py",
        "gradient.scatter_add_(1, part.columns, weights.unsqueeze(1) * -options.gradient_scale)",
        "gradient.scatter_add_(1, part.columns, weights.unsqueeze(1) * -1)",
        "objectives/test_linear_cross_entropy.py",
    ),
    Mutation(
        "objectives/linear_cross_entropy.py",
        "loss = loss + options.z_loss * rows.log_z.square()",
        "loss = loss + options.z_loss * rows.log_z",
        "objectives/test_linear_cross_entropy.py",
    ),
    Mutation(
        "objectives/linear_cross_entropy.py",
        "mass.mul_((highest - raised).exp_()).add_(",
        "mass.add_(",
        "objectives/test_linear_cross_entropy.py",
    ),
    Mutation(
        "objectives/cross_entropy.py",
        "(1 - label_smoothing) * nll + label_smoothing",
        "nll + label_smoothing",
        "objectives/test_classification.py",
    ),
    # -- optim
    Mutation(
        "optim/gradients.py",
        "factor = scale if max_norm is None or norm <= max_norm else",
        "factor = scale if max_norm is None or norm >= max_norm else",
        "optim/test_gradients.py",
    ),
    Mutation(
        "optim/ema.py",
        "share = (1 - self.decay) / (1 - self.decay**self.updates)",
        "share = 1 - self.decay",
        "optim/test_ema.py",
    ),
    Mutation("optim/ema.py", "average.copy_(saved)", "average.copy_(average)", "optim/test_ema.py"),
    Mutation(
        "optim/schedules.py",
        "warmup = max(1, section.warmup_steps(total))",
        "warmup = max(2, section.warmup_steps(total))",
        "optim/test_schedules.py",
    ),
    Mutation(
        "optim/schedules.py",
        "0.5 * (1 + math.cos(math.pi * share))",
        "0.5 * (1 + math.cos(share))",
        "optim/test_schedules.py",
    ),
    Mutation(
        "optim/lion.py",
        "momentum.lerp_(grad, 1 - betas[1])",
        "momentum.lerp_(grad, 1 - betas[0])",
        "optim/test_lion.py",
    ),
    Mutation(
        "optim/groups.py",
        'role(name, parameter.ndim) in ("matrix", "head")',
        'role(name, parameter.ndim) in ("matrix",)',
        "optim/test_groups.py",
    ),
    Mutation("optim/galore.py", 'alpha=group["lr"] * self.scale)', 'alpha=group["lr"])', "optim/test_galore.py"),
    Mutation("optim/eight_bit.py", 'state["step"].add_(1)', 'state["step"].add_(0)', "optim/test_eight_bit.py"),
    Mutation("optim/gradients.py", "grad = parameter.grad.coalesce()", "grad = parameter.grad", "optim/test_sparse.py"),
    # -- numerics
    Mutation(
        "numerics/integer_weight.py",
        "scales[rows] = largest / _LARGEST[bits]",
        "scales[rows] = largest / (_LARGEST[bits] + 1)",
        "numerics/test_integer_weight.py",
    ),
    Mutation(
        "numerics/loss_scaling.py",
        "self.scale = max(self.floor, old_scale / 2)",
        "self.scale = old_scale / 2",
        "numerics/test_loss_scaling.py",
    ),
    Mutation(
        "numerics/loss_scaling.py",
        "if self.good_steps < self.growth_interval:",
        "if self.good_steps <= self.growth_interval:",
        "numerics/test_loss_scaling.py",
    ),
    Mutation(
        "numerics/four_bit.py",
        "return _times(values, nested.absmax, NESTED_BLOCK).add_(nested.offset)",
        "return _times(values, nested.absmax, NESTED_BLOCK)",
        "numerics/test_four_bit.py",
    ),
    Mutation(
        "numerics/relative_error.py",
        "return max(listed) if all(map(math.isfinite, listed)) else math.inf",
        "return max(listed)",
        "numerics/test_relative_error.py",
    ),
    # -- assembly
    Mutation(
        "assembly/combining.py",
        "change = factors.scale * (factors.b.float() @ factors.a.float())",
        "change = factors.b.float() @ factors.a.float()",
        "assembly/test_combining.py",
    ),
    Mutation(
        "assembly/combining.py",
        "math.copysign(root, strength) for root",
        "root for root",
        "assembly/test_combining.py",
    ),
    Mutation(
        "assembly/merging.py",
        "for part, start, delta in zip(parts, starts, changes, strict=True)}",
        "for part, start, delta in zip(parts, starts, reversed(changes), strict=True)}",
        "assembly/test_merging.py",
    ),
    # -- parallel
    Mutation(
        "parallel/layout.py",
        "return self.replicate * self.shard",
        "return self.shard",
        "parallel/test_layout.py",
    ),
    Mutation(
        "models/ops.py",
        "shard.group.sum(sums) / (shard.width * shard.copies)",
        "shard.group.sum(sums) / shard.width",
        "parallel/test_tensor.py",
        "olmo2",
    ),
    Mutation(
        "parallel/tensor.py",
        "norm.shard = NormShard(self.group, width, replicas.size)",
        "norm.shard = NormShard(self.group, width, 1)",
        "parallel/test_tensor.py",
        "olmo2",
    ),
    Mutation(
        "models/tiled_attention.py", "distances >= window", "distances > window", "models/test_tiled_attention.py"
    ),
    Mutation("models/tiled_attention.py", ".sub_(mean).mul_(", ".mul_(", "models/test_tiled_attention.py"),
    Mutation("models/tiled_attention.py", "window - 1 - ahead", "window - ahead", "models/test_tiled_attention.py"),
    Mutation(
        "models/tiled_attention.py",
        "(part.lse - total.lse)",
        "(total.lse - part.lse)",
        "models/test_tiled_attention.py",
    ),
    Mutation(
        "models/attention_kernels.py", "ahead < -call.left", "ahead <= -call.left", "models/test_tiled_attention.py"
    ),
    Mutation(
        "models/attention_kernels.py",
        "out, lse.transpose(0, 1).contiguous(), *self._lengths(call, q)",
        "out, lse.contiguous().transpose(0, 1), *self._lengths(call, q)",
        "models/test_tiled_attention.py",
    ),
    Mutation(
        "parallel/context_exchange.py",
        "k.repeat_interleave(copies, dim=1), v",
        "k.repeat(1, copies, 1), v",
        "parallel/test_context_attention.py",
    ),
    Mutation(
        "parallel/ring_attention.py",
        "travelling = passes.pass_on(of_stored, hop + 1)",
        "travelling = travelling or passes.pass_on(of_stored, hop + 1)",
        "parallel/test_context_attention.py",
    ),
    Mutation(
        "data/context_sharding.py", "min(number, count - 2 - number)", "number % ranks", "data/test_context_sharding.py"
    ),
    Mutation("data/context_sharding.py", "(-each.cost, each", "(each.cost, each", "data/test_context_sharding.py"),
    Mutation(
        "data/context_sharding.py",
        "position=run.position + first",
        "position=run.position",
        "data/test_context_sharding.py",
    ),
    Mutation(
        "models/tiled_attention.py",
        "(*rows.ancestors, rows.document)",
        "(rows.document,)",
        "parallel/test_context_attention.py",
    ),
    Mutation(
        "parallel/expert.py",
        "return ctx.group.all_to_all(grad, ctx.receives, ctx.sends), None, None, None",
        "return ctx.group.all_to_all(grad.flip(0), ctx.receives, ctx.sends), None, None, None",
        "parallel/test_expert.py",
    ),
    Mutation(
        "parallel/expert.py",
        "from_forward(lambda: self._agreed(counts))",
        "self._agreed(counts)",
        "parallel/test_expert.py",
        "formulas",
    ),
    Mutation(
        "models/forward_values.py",
        "in calls[repeated + 1 :]:",
        "in calls[:0]:",
        "memory/test_recomputed_function.py",
    ),
    Mutation(
        "parallel/expert.py",
        "return grad.index_select(0, inverse), None, None",
        "return grad, None, None",
        "parallel/test_expert.py",
    ),
    Mutation(
        "planning/traffic.py",
        "rows += each.sent_rows * each.output_gradients + each.received_rows * each.input_gradients",
        "rows += each.sent_rows * each.output_gradients + each.sent_rows * each.input_gradients",
        "parallel/test_expert.py",
        "formulas",
    ),
    Mutation(
        "verification/trace.py",
        "learner.end_step()  # what was counted here is of no step",
        "pass",
        "verification/test_experts.py",
        "right_layout",
    ),
    Mutation(
        "parallel/local_parameter.py",
        "return LocalParameter(name, parameter, parameter, _copied(box, groups.all), groups)",
        "return LocalParameter(name, parameter, parameter, _copied(box, ranks.data), groups)",
        "parallel/test_local_parameter.py",
    ),
    Mutation(
        "parallel/local_parameter.py",
        "is_summed = local.is_sharded or (in_buckets and group.ranks == ranks.dense_data.all.ranks)",
        "is_summed = local.is_sharded or in_buckets",
        "parallel/test_local_parameter.py",
    ),
    Mutation(
        "parallel/layout.py",
        "return ranks[ranks.index(rank) % self.expert :: self.expert]",
        "return ranks",
        "parallel/test_local_parameter.py",
    ),
    Mutation(
        "parallel/regions.py",
        "ctx.group.reduce_scatter(grad) if ctx.cut else ctx.group.sum(_copy(grad)), None, None",
        "ctx.group.reduce_scatter(grad) if ctx.cut else _copy(grad), None, None",
        "parallel/test_tensor_placing.py",
        "float32_gradients",
    ),
    Mutation(
        "parallel/hang_detection.py",
        "if now_s < report.deadline_s:",
        "if now_s > report.deadline_s:",
        "parallel/test_hang_detection.py",
    ),
    Mutation(
        "objectives/linear_cross_entropy.py",
        "mass = mass * (local - highest).exp_()",
        "mass = mass * 1",
        "parallel/test_tensor_loss.py",
    ),
    # -- memory
    Mutation(
        "memory/recompute_planner.py",
        "if partial.kept_bytes + layer_costs.whole_bytes <= peak_bytes",
        "if partial.kept_bytes <= peak_bytes",
        "memory/test_recompute_planner.py",
    ),
    Mutation(
        "memory/layer_plan.py",
        "size = section.layers or max(1, round(math.sqrt(len(layers))))",
        "size = section.layers or max(1, len(layers))",
        "memory/test_recompute.py",
        "plans_by or in_words",
    ),
    Mutation(
        "memory/recomputed_function.py",
        "(tensor.shape, tensor.dtype) != self._shapes[number]",
        "tensor.dtype != self._shapes[number][1]",
        "memory/test_recomputed_function.py",
    ),
    # -- train
    Mutation(
        "training/watch.py", "_DEVIATIONS_PER_MAD = 1.4826", "_DEVIATIONS_PER_MAD = 1.0", "training/test_watch.py"
    ),
    Mutation(
        "training/watch.py",
        "if self._spikes_in_a_row >= self._half_window:",
        "if self._spikes_in_a_row > self._half_window:",
        "training/test_watch.py",
    ),
    Mutation(
        "training/data_loader.py",
        'self.excluded = set(state["excluded"])',
        "self.excluded = set()",
        "training/test_loop.py",
    ),
    Mutation(
        "training/data_loader.py",
        "self.next = self.last_taken[0]",
        "self.next = self.last_taken[-1]",
        "training/test_loop.py",
    ),
    Mutation(
        "parallel/gradient_buckets.py",
        "self._started = 0 if is_last else None",
        "self._started = 0",
        "parallel/test_gradient_buckets.py",
    ),
    Mutation(
        "parallel/gradient_buckets.py",
        "reversed(parameters)",
        "parameters",
        "parallel/test_gradient_buckets.py",
    ),
    Mutation(
        "training/executor.py",
        "finish_weight_pass(is_last(number, chunk, micro), chunk)",
        "finish_weight_pass(False, chunk)",
        "training/test_executor.py",
    ),
    Mutation(
        "core/weight_gradients.py",
        "sums[weight] + gradient if weight in sums else gradient",
        "gradient",
        "core/test_weight_gradients.py",
    ),
    Mutation(
        "core/weight_gradients.py",
        "before, _active = _active, self",
        "before, _active = None, self",
        "core/test_weight_gradients.py",
    ),
    Mutation(
        "training/executor.py",
        "prepare_backward(is_last(number, chunk, micro), chunk)",
        "prepare_backward(True, chunk)",
        "training/test_executor.py",
    ),
    Mutation(
        "training/executor.py",
        "self._gradients.pop(place)() if place in self._gradients else None",
        "None",
        "training/test_executor.py",
    ),
    Mutation(
        "training/step.py",
        "scale = 1 / (totals.weight * loss_scale)",
        "scale = 1 / totals.weight",
        "training/test_step.py",
    ),
    Mutation(
        "training/step.py",
        "StepItems(items, micro_batches, totals, step, loss_scale)",
        "StepItems(items, micro_batches, totals, step + 1, loss_scale)",
        "training/test_step.py",
    ),
    Mutation(
        "training/state.py",
        'run.watch.load(state["watch"])',
        "pass",
        "training/test_loop.py",
        "whole_state",
    ),
    Mutation(
        "training/loop.py",
        "if run.criterion.is_better(value, state.best_value,",
        "if not run.criterion.is_better(value, state.best_value,",
        "training/test_loop.py",
    ),
    Mutation(
        "training/checkpoints/folders.py",
        "kept = {info.step for info in complete[-keep:]}",
        "kept = {info.step for info in complete[:keep]}",
        "training/checkpoints/test_store.py",
    ),
    Mutation(
        "training/checkpoints/verification.py",
        "if digest.result() != shard.tensors[name].sha256",
        "if digest.result() == shard.tensors[name].sha256",
        "training/checkpoints/test_store.py",
    ),
    Mutation(
        "core/line_log.py",
        "os.ftruncate(self._fd, sum(map(len, content[:lines])))",
        "os.ftruncate(self._fd, sum(map(len, content)))",
        "training/test_metrics.py",
    ),
    # -- exact numerics
    Mutation(
        "numerics/batch_invariant.py",
        "whole = rows // tile * tile",
        "whole = rows",
        "numerics/test_batch_invariant.py",
        only="rows_of_products",
    ),
    Mutation(
        "models/blockwise.py",
        "oldest // KEY_BLOCK, (position",
        "position // KEY_BLOCK, (position",
        "models/test_blockwise.py",
    ),
    Mutation("models/blockwise.py", "seen & (keys > queries", "seen & (keys >= queries", "models/test_blockwise.py"),
    Mutation("models/blockwise.py", "mass.clamp_min(1)).unsqueeze", "mass).unsqueeze", "models/test_blockwise.py"),
    Mutation(
        "objectives/token_logprobs.py",
        "sums.add(_scores(capped, columns, inside, start, temperature, support), columns, inside)",
        "sums.add(_scores(capped, columns, inside, start, temperature, None), columns, inside)",
        "objectives/test_logprobs_of_logits.py",
    ),
    Mutation(
        "objectives/policy.py",
        "return totals.weight / groups / _weight_of_own",
        "return totals.weight / answers / _weight_of_own",
        "objectives/test_policy.py",
        only="formulas",
    ),
    Mutation(
        "objectives/policy.py",
        'if settings.single_update else columns["old"]',
        'if settings.single_update else columns["sampled"]',
        "objectives/test_policy.py",
        only="formulas",
    ),
    Mutation(
        "stages/policy_objective.py",
        "zip(section.vespo_shapes, section.vespo_rates, strict=True)",
        "zip(section.vespo_rates, section.vespo_shapes, strict=True)",
        "stages/test_reinforcement.py",
    ),
    Mutation(
        "stages/policy_objective.py", "sapo_temperatures=section.sapo_temperatures,", "", "stages/test_reinforcement.py"
    ),
    Mutation(
        "objectives/policy.py",
        'if importance is not None and settings.loss != "vespo":',
        "if importance is not None:",
        "objectives/test_policy.py",
        only="formulas",
    ),
    Mutation(
        "objectives/policy.py", "(kl * ratio if settings.kl_with_ratio else kl)", "kl", "objectives/test_trl_policy.py"
    ),
    Mutation(
        "objectives/policy.py",
        'copy_to((batch.facts["fresh"] == 1)',
        'copy_to((batch.facts["fresh"] >= 0)',
        "objectives/test_policy.py",
        only="metrics",
    ),
    Mutation(
        "objectives/policy.py",
        'np.count_nonzero(~np.isnan(facts["reward"]))',
        'len(facts["reward"])',
        "objectives/test_policy.py",
        only="held_out",
    ),
    Mutation(
        "objectives/policy.py",
        "temperature=temperature, support=",
        "temperature=1.0, support=",
        "objectives/test_policy.py",
        only="exactly",
    ),
    Mutation(
        "objectives/policy_losses.py",
        "difference.clamp(max=MOST_LOG_RATIO).exp()",
        "difference.exp()",
        "objectives/test_policy.py",
        only="nan",
    ),
    Mutation(
        "objectives/token_logprobs.py",
        "(support < 0).all(1, keepdim=True)",
        "(support < 0).any(1, keepdim=True)",
        "objectives/test_token_logprobs.py",
        only="support",
    ),
    Mutation(
        "objectives/token_logprobs.py",
        "ctx.set_materialize_grads(False)",
        "ctx.set_materialize_grads(True)",
        "objectives/test_token_logprobs.py",
        only="shown",
    ),
    Mutation(
        "objectives/value.py",
        "np.average(returns, weights=weights)",
        "returns.mean()",
        "objectives/test_value.py",
        only="explained",
    ),
    Mutation(
        "objectives/value.py",
        "bounded = losses > 0.5 * residuals",
        "bounded = losses >= 0.5 * residuals",
        "objectives/test_value.py",
        only="share",
    ),
    Mutation(
        "stages/critic.py",
        "else recomputed_within(self._switched_on)",
        "else self._switched_on()",
        "stages/test_critic.py",
    ),
    Mutation(
        "stages/critic.py",
        "self.adapters.switched_to([*below, VALUE])",
        "self.adapters.switched_to([*below, TRAINED])",
        "stages/test_critic.py",
    ),
    Mutation(
        "training/trained_roles.py",
        "if step <= self.frozen.get(role, 0)]",
        "if step < self.frozen.get(role, 0)]",
        "training/test_trained_roles.py",
    ),
    Mutation(
        "training/step.py",
        "        roles.drop_frozen()",
        "        pass",
        "test_critic_runs.py",
        only="held and base",
    ),
    Mutation(
        "optim/gradients.py",
        "if not all(math.isfinite(norm) for norm in norms.values()):",
        "if not any(math.isfinite(norm) for norm in norms.values()):",
        "training/test_trained_roles.py",
    ),
    Mutation(
        "stages/rewards.py",
        "switched_on = partial(adapters.switched_to, names)",
        "switched_on = partial(adapters.switched_to, ())",
        "test_reward_on_base.py",
        only="scores",
    ),
    Mutation(
        "stages/rewards.py",
        "if stack[-1].quantization != (None",
        "if False and stack[-1].quantization != (None",
        "test_reward_on_base.py",
        only="told",
    ),
    Mutation(
        "stages/role_configs.py",
        "if shape != (labels, config.hidden_size):",
        "if shape[1:] != (config.hidden_size,):",
        "stages/test_reward_model.py",
        only="refused",
    ),
    Mutation(
        "planning/step_estimate.py",
        "return ActivationBytes(activations.kept + own.kept, max(activations.recomputed, own.recomputed))",
        "return ActivationBytes(activations.kept, max(activations.recomputed, own.recomputed))",
        "test_critic_memory.py",
    ),
    Mutation(
        "stages/step_budget.py",
        "weights=models + own + replaced + self.reward_bytes - adapter,",
        "weights=models + own + replaced + self.reward_bytes,",
        "test_critic_memory.py",
    ),
    Mutation("data/batch.py", ".view(array.shape)", ".flatten()", "data/test_batch.py", only="copy"),
    Mutation(
        "inference/self_check.py",
        "if not torch.equal(rows, wanted):",
        "if not torch.allclose(rows, wanted):",
        "inference/test_self_check.py",
        only="named",
    ),
    Mutation(
        "models/block_attention.py",
        "grad_sinks -= (weights.of_sinks * means)",
        "grad_sinks -= means",
        "models/test_attend.py",
        only="sinks",
    ),
    Mutation(
        "models/attention_kernels.py",
        "copy_(torch.logaddexp(lse, of_sinks))",
        "copy_(lse)",
        "models/test_attend.py",
        only="sinks",
    ),
    Mutation(
        "models/latent_attention.py",
        "makes_values = self._matrices(out.dtype)[:, self._spec.qk_nope_head_dim :]",
        "makes_values = self._matrices(out.dtype)[:, : self._spec.v_head_dim]",
        "models/test_latent_attention.py",
        only="packed",
    ),
    Mutation(
        "inference/paged.py",
        "return Keys(stored, lambda x, at=None: expand(x, positions if at is None else at), keys.absorb)",
        "return Keys(stored, expand, keys.absorb)",
        "inference/test_paged.py",
        only="key-reuse",
    ),
    Mutation(
        "inference/exact_paged.py",
        "self._pool.write(layer, *keys.stored)",
        "None",
        "inference/test_self_check.py",
        only="silent",
    ),
    Mutation(
        "recipe/stage_names.py",
        'if name == "distill" and on_policy is not None and on_policy.value:',
        'if name == "distill" and on_policy is not None:',
        "recipe/test_on_policy_rules.py",
    ),
    # -- rollout
    Mutation(
        "rl/answer_pairs.py",
        "(best, worst) if rewards[best] - rewards[worst] > SMALLEST_DIFFERENCE else None",
        "(best, worst) if rewards[best] > rewards[worst] else None",
        "rl/test_answer_pairs.py",
    ),
    Mutation(
        "rl/answer_pairs.py",
        "labels = [np.nan, CHOSEN, REJECTED][: len(numbers)]",
        "labels = [np.nan, REJECTED, CHOSEN][: len(numbers)]",
        "rl/test_answer_pairs.py",
    ),
    Mutation(
        "rl/answer_pairs.py",
        "float(np.nanmean(each)) for name",
        "float(np.nan_to_num(each).mean()) for name",
        "rl/test_answer_pairs.py",
    ),
    Mutation(
        "rl/on_policy_rows.py",
        "weights[length:] = row.weights[length]",
        "weights[length:] = 1",
        "rl/test_on_policy_rows.py",
    ),
    Mutation(
        "rl/on_policy_rows.py",
        "self._lines_before if begun and not place else lines",
        "lines",
        "rl/test_on_policy_rows.py",
    ),
    Mutation(
        "rl/on_policy_rows.py",
        "min(settings.max_new_tokens, settings.max_length - length)",
        "settings.max_new_tokens",
        "rl/test_on_policy_rows.py",
    ),
    Mutation(
        "rl/on_policy_rows.py",
        "int(trained[0] if not len(breaks) else trained[breaks[-1] + 1])",
        "int(trained[0])",
        "rl/test_on_policy_rows.py",
    ),
    Mutation(
        "rl/on_policy_rows.py",
        "if step != self._step or not place:",
        "if True:",
        "rl/test_on_policy_rows.py",
    ),
    Mutation(
        "inference/filters.py",
        "rows = sorted(by_width.pop(width))",
        "rows = by_width.pop(width)",
        "inference/test_sampling.py",
    ),
    Mutation(
        "inference/blocks.py", "references = self._references[block] - 1", "references = 0", "inference/test_blocks.py"
    ),
    Mutation(
        "inference/blocks.py",
        "return block if known == tuple(tokens) else None",
        "return block",
        "inference/test_blocks.py",
    ),
    Mutation(
        "inference/blocks.py", "if self._empty:", "if self._empty and not self._cached:", "inference/test_blocks.py"
    ),
    Mutation(
        "inference/sequence_state.py",
        "(len(self.tokens) - 1) // block):",
        "len(self.tokens) // block):",
        "inference/test_scheduler.py",
    ),
    Mutation(
        "inference/scheduler.py", "if self._writes_to_shared(sequence):", "if False:", "inference/test_scheduler.py"
    ),
    Mutation("inference/scheduler.py", "sequence.computed = 0", "pass", "inference/test_scheduler.py"),
    Mutation(
        "inference/scheduler.py",
        "sequence.computed - self.window + 1)",
        "sequence.computed)",
        "inference/test_scheduler.py",
    ),
    Mutation(
        "inference/sequence_state.py",
        "range(max(self.remembered, self.passed), full)",
        "range(self.remembered, full)",
        "inference/test_scheduler.py",
    ),
    Mutation("inference/sequence_state.py", "self.fill_passed()", "pass", "inference/test_window_blocks.py"),
    Mutation(
        "inference/scheduler.py",
        "latest = next(other for other in reversed(self.running)",
        "latest = next(other for other in self.running",
        "inference/test_scheduler.py",
    ),
    Mutation(
        "inference/scheduler.py", "sequence.computed -= rejected[chunk.sequence]", "pass", "inference/test_scheduler.py"
    ),
    Mutation(
        "inference/embedded.py",
        "root_digest(answer.request.adapter, self.version)",
        "root_digest(None, self.version)",
        "inference/test_embedded_requests.py",
    ),
    Mutation(
        "inference/embedded.py",
        "not (is_long and self._config.rotates_by_growth)",
        "True",
        "inference/test_embedded_cache.py",
    ),
    Mutation(
        "training/executor.py",
        "self._outputs[place] = output[: self._learner.trained_activations]",
        "self._outputs[place] = output[:1]",
        "training/test_executor.py",
    ),
    Mutation(
        "planning/cache_memory.py",
        "max(each.block_bytes for each in several)",
        "min(each.block_bytes for each in several)",
        "inference/test_pipelined_decoder.py",
    ),
    Mutation(
        "inference/pipelined_decoder.py",
        "return self.pipeline.stages.max(routes.int()).to(routes.dtype)",
        "return routes",
        "test_rl_experts.py",
        only="stages_of_a_pipeline",
    ),
    Mutation(
        "inference/ranks.py",
        "copies_weights = not self._is_in_step",
        "copies_weights = True",
        "inference/test_ranks.py",
        only="not_copied",
    ),
    Mutation("inference/model_runner.py", "self._adapters.use(None)", "pass", "inference/test_embedded_requests.py"),
    Mutation(
        "inference/model_runner.py",
        "self.packed_weights.clear()",
        "pass",
        "inference/test_weight_copies.py stages/test_samples.py",
        only="weights",
    ),
    Mutation(
        "inference/penalties.py",
        "torch.where(values < 0, values * penalty, values / penalty)",
        "values / penalty",
        "inference/test_sampling.py",
    ),
    Mutation(
        "inference/penalties.py",
        "options.frequency_penalty * generated.counts",
        "options.frequency_penalty",
        "inference/test_penalties.py",
    ),
    Mutation("inference/answer.py", "self._generated.add(token)", "pass", "inference/test_penalties.py"),
    Mutation(
        "inference/embedded.py",
        "shares &= not answer.request.prompt_logprobs",
        "pass",
        "inference/test_prompt_logprobs.py",
    ),
    Mutation("inference/answer.py", "self.prompt_scores.clear()", "pass", "inference/test_prompt_logprobs.py"),
    Mutation(
        "inference/sampling.py",
        "uniform(row.options.seed, row.number, row.sample, row.position, purpose)",
        "uniform(row.options.seed, 0, row.sample, row.position, purpose)",
        "inference/test_sampling.py",
    ),
    Mutation(
        "inference/filters.py",
        "inside = cumulative - exp < top_p * total",
        "inside = cumulative < top_p * total",
        "inference/test_sampling.py",
    ),
    Mutation("inference/filters.py", "[math.log(option.min_p) for", "[option.min_p for", "inference/test_sampling.py"),
    Mutation(
        "inference/filters.py",
        "math.log(option.min_p) if option.min_p > 0",
        "option.min_p if option.min_p > 0",
        "inference/test_sampling.py",
    ),
    Mutation("inference/filters.py", "if 0 < width == count < vocab_size", "if False", "inference/test_sampling.py"),
    Mutation("inference/sampling.py", "(p - q).clamp_(min=0)", "p", "inference/test_rejection_sampling.py"),
    Mutation(
        "inference/speculative.py",
        "drawn.tokens[start + kept] == proposed[kept]",
        "True",
        "inference/test_speculative.py",
    ),
    Mutation(
        "inference/speculative.py",
        "self._proposals.get(sequence.number, (-1,))[0] != len(sequence.tokens)",
        "sequence.number not in self._proposals",
        "inference/test_speculative.py",
    ),
    Mutation(
        "inference/draft_model.py",
        "while cached and cached != text[: len(cached)]:",
        "while False:",
        "inference/test_draft_model.py",
    ),
    Mutation(
        "inference/draft_model.py",
        "sequence.tokens[sequence.virtual_tokens :]",
        "sequence.tokens",
        "inference/test_draft_model.py",
    ),
    Mutation("inference/blocked_softmax.py", "targets - below", "targets", "inference/test_sampling.py"),
    Mutation(
        "inference/stopping.py",
        "longest = min(len(text), len(string) - 1)",
        "longest = min(len(text), len(string) - 2)",
        "inference/test_stopping.py",
    ),
    Mutation(
        "inference/answer.py",
        'finish = "length" if self.reported + 1 >= request.max_new_tokens else "context"',
        'finish = "length"',
        "inference/test_engine_answers.py",
    ),
    Mutation(
        "inference/chat.py",
        "(length := chat_format.virtual_tokens + len(prompt))",
        "(length := len(prompt))",
        "inference/test_chat.py",
    ),
    Mutation(
        "inference/chat.py",
        "self._turns_asked += 1",
        "self._turns_asked += 0",
        "inference/test_chat.py",
    ),
    Mutation(
        "inference/engine_adapters.py",
        "0 if name is None else self.names.index(name)",
        "0",
        "inference/test_engine_adapters.py",
    ),
    Mutation(
        "inference/prompt_rows.py",
        'if conversation.messages[-1].role == "assistant":',
        "if not conversation.messages:",
        "inference/test_prompt_rows.py",
    ),
    Mutation(
        "evaluation/answer_matching.py",
        "_single_spaced(matches[-1]",
        "_single_spaced(matches[0]",
        "evaluation/test_answer_matching.py",
    ),
    Mutation(
        "inference/chat_adapters.py",
        "return ActiveAdapter(chat_tokenizer, stop_ids, name, len(adapters.virtual_token_ids(name)))",
        "return ActiveAdapter(chat_tokenizer, stop_ids, None, len(adapters.virtual_token_ids(name)))",
        "inference/test_chat_adapters.py",
    ),
    Mutation(
        "inference/engine.py",
        "engine.update(engine.version + 1)",
        "engine.update(engine.version)",
        "stages/test_samples.py",
    ),
    # -- plan
    Mutation("planning/flops.py", "_TRAINING = 3", "_TRAINING = 2", "planning/test_flops.py"),
    Mutation(
        "planning/flops.py",
        "pairs += reach * (reach + 1) // 2 + (length - reach) * reach",
        "pairs += reach * (reach + 1) // 2 + length * reach",
        "planning/test_flops.py",
    ),
    Mutation(
        "planning/cluster.py",
        "return self.ranks is None or first // self.ranks == last // self.ranks",
        "return self.ranks is None or last - first < self.ranks",
        "planning/test_cluster.py",
        only="slowest_link",
    ),
    Mutation(
        "planning/cluster.py",
        "if card.nvlink is None or connected == 1 or larger % smaller:",
        "if card.nvlink is None or connected == 1:",
        "planning/test_cluster.py",
        only="pci_express",
    ),
    Mutation(
        "planning/measured_table.py",
        "values[index] = min(values[index], values[index + stride])",
        "pass",
        "planning/test_measured_table.py",
    ),
    Mutation(
        "planning/measured_table.py",
        "factor *= max(1.0, size / axis[-1]) ** power",
        "factor *= max(1.0, size / axis[-1])",
        "planning/test_measured_table.py",
    ),
    Mutation(
        "planning/machine_profile.py",
        "rest = max(0.0, seconds - latency) * (1 - 1 / ranks) / (1 - 1 / measured_ranks)",
        "rest = max(0.0, seconds - latency)",
        "planning/test_machine_profile.py",
    ),
    Mutation(
        "planning/product_peak.py",
        'return "bf16" if speeds["bf16"] * NEAR > speeds["fp32"] else "fp32"',
        'return "bf16" if speeds["bf16"] > speeds["fp32"] else "fp32"',
        "planning/test_precision.py",
    ),
    Mutation(
        "planning/activation_memory.py",
        "in_backward = share * free // (each.kept + each.recomputed)",
        "in_backward = share * free // each.kept",
        "planning/test_micro_batch.py",
    ),
    Mutation(
        "planning/traffic.py",
        "first_exit = first_with_gradient - 1 + trained_between",
        "first_exit = first_with_gradient",
        "planning/test_traffic.py",
        "gradients_go_back",
    ),
    # -- report
    Mutation(
        "recipe/parameter_grid.py",
        'return [key if names[key.rpartition(".")[2]] > 1 else key.rpartition(".")[2] for key in keys]',
        'return [key.rpartition(".")[2] for key in keys]',
        "recipe/test_parameter_grid.py",
    ),
    Mutation(
        "report/preview_content.py",
        "total = math.ceil(math.ceil(epochs * packed.packs) / per_step)",
        "total = math.ceil(epochs * packed.packs)",
        "report/test_preview.py cli/test_preview.py",
    ),
    # -- verify
    Mutation(
        "verification/comparison.py",
        "farthest = worst_error(_finite((perturbed[name] - value).norm().item() for name, value in reference.items()))",
        "farthest = worst_error((perturbed[name] - value).norm().item() for name, value in reference.items())",
        "verification/test_comparison.py",
    ),
    Mutation(
        "verification/comparison.py",
        "ranks = None if unequal is None else (0, unequal)",
        "ranks = None",
        "verification/test_comparison.py",
    ),
    Mutation(
        "verification/diagnosis.py",
        "missing, repeated = int((shares < 0.5).sum()), int((shares > 1.5).sum())",
        "missing, repeated = int((shares < 0.5).sum()), int((shares < 0.5).sum())",
        "verification/test_diagnosis.py",
    ),
    # -- the surface
    Mutation("data/demo_data.py", 'carried = "+1" if ones > 9 else ""', 'carried = ""', "data/test_demo_sums.py"),
    Mutation(
        "demo/demo.py",
        "sums=Tally(len(sums), sum(each.was_right for each in sums), sum(each.is_right for each in sums)),",
        "sums=Tally(len(sums), sum(each.is_right for each in sums), sum(each.is_right for each in sums)),",
        "demo/test_demo.py",
        "right_answers_are",
    ),
    Mutation(
        "run/auto_values.py",
        "chosen = saved.precision",
        "chosen = fastest(product_speeds(device))",
        "run/test_train.py",
        "precision_auto",
    ),
    Mutation(
        "study/plan.py",
        "names = {run.name for run in planned}",
        "names = set()",
        "study/test_runner.py",
    ),
    Mutation("cli/main.py", "return exit_.exit_code", "return 0", "cli/test_recipe_cli.py cli/test_checkpoint_cli.py"),
    # -- asynchronous rollouts
    Mutation(
        "rl/asynchronous.py",
        "return (updates + staleness) // updates_per_rollout + 1",
        "return (updates + staleness) // updates_per_rollout + 2",
        "rl/test_asynchronous.py",
    ),
    Mutation(
        "rl/asynchronous.py",
        "for completion in self._complete.values():",
        "for completion in ():",
        "rl/test_asynchronous.py",
        "rewards_fail",
    ),
    Mutation(
        "rl/asynchronous.py",
        "return admitted if self.rollouts is None else min(admitted, self.rollouts)",
        "return admitted",
        "rl/test_asynchronous.py",
        "none_after_the_last",
    ),
    Mutation(
        "rl/asynchronous.py",
        "if updates == self._updates:",
        "if self._updates is not None:",
        "rl/test_asynchronous.py",
        "bound",
    ),
    Mutation(
        "rl/experience.py",
        'self.sampler.next_prompt = self._before["next_prompt"]',
        "pass",
        "rl/test_asynchronous.py",
        "rewards_fail",
    ),
    Mutation(
        "rl/rollout_sampler.py",
        "generate = self.asynchronous.take",
        "pass",
        "rl/test_asynchronous.py",
        "bound",
    ),
    Mutation(
        "rl/recorded_engine.py",
        "count = sum(1 for each in versions if each <= version)",
        "count = sum(1 for each in versions if each <= version + 1)",
        "rl/test_recorded_engine.py",
    ),
    Mutation(
        "rl/recorded_engine.py",
        'is_same = drawn == self._versions[number, answer["sample"]][: len(drawn)]',
        "is_same = True",
        "rl/test_recorded_engine.py",
        "drawn_anew",
    ),
    Mutation(
        "recipe/policy_scores.py",
        'is_exact = recipe.numerics == "exact" and recipe.rollout.staleness == 0',
        'is_exact = recipe.numerics == "exact"',
        "stages/test_reinforcement.py",
    ),
    # -- episodes of several turns
    Mutation(
        "rl/open_episode.py",
        "drawn = (*segment.drawn, *[False] * len(between), *[True] * len(completion.tokens))",
        "drawn = (*segment.drawn, *[True] * len(between), *[True] * len(completion.tokens))",
        "rl/test_episodes.py",
    ),
    Mutation(
        "rl/open_episode.py",
        "            draw_sample=self.sample,",
        "            draw_sample=0,",
        "rl/test_episodes.py",
    ),
    Mutation(
        "inference/episode.py",
        "reward=None if failure is not None else reward,",
        "reward=reward or 0.0,",
        "rl/test_episodes.py",
    ),
    Mutation(
        "rl/turn_rendering.py",
        "return encoded[len(self.tokenizer.encode(terminator)) :]",
        "return encoded",
        "rl/test_episodes.py",
    ),
    Mutation(
        "rl/turn_rendering.py",
        "        if place is None:",
        "        if place is None and False:",
        "rl/test_episodes.py",
    ),
    Mutation(
        "rl/agent_conversations.py",
        "run = None if answered.parent is None else ending.pop(answered.parent, None)",
        "run = None if answered.parent is None else ending.get(answered.parent)",
        "rl/test_agent_conversations.py",
    ),
    Mutation(
        "rl/agent_conversations.py",
        "        drawn += [*[False] * len(between), *[True] * len(answered.completion.tokens)]",
        "        drawn += [True] * (len(between) + len(answered.completion.tokens))",
        "rl/test_agent_conversations.py",
    ),
    Mutation(
        "rl/agent_conversations.py",
        "        return json.dumps(message, sort_keys=True, ensure_ascii=False)",
        '        return str(message["role"])',
        "rl/test_agent_conversations.py",
    ),
    Mutation(
        "rl/agent_conversations.py",
        'key = hashlib.blake2b(f"{number}/{self.repeats}/".encode(), digest_size=8)',
        'key = hashlib.blake2b(f"{number}/".encode(), digest_size=8)',
        "rl/test_agent_conversations.py",
    ),
    Mutation(
        "rl/agent_episodes.py",
        "        if result.failure is not None and episode.cut is None:",
        "        if result.failure is not None:",
        "rl/test_agent_episodes.py",
    ),
    Mutation(
        "rl/agent_episodes.py",
        "            if answers >= self.section.max_turns:",
        "            if answers > self.section.max_turns:",
        "rl/test_agent_episodes.py",
    ),
    Mutation(
        "rl/estimators.py",
        "places, stops = np.flatnonzero(drawn), np.cumsum(self.lengths[first:last])",
        "places, stops = np.arange(len(drawn)), np.cumsum(self.lengths[first:last])",
        "rl/test_episodes.py",
    ),
    Mutation(
        "rewards/environments/worker.py",
        "if call.answers and tuple(episode.replies) != call.replies:",
        "if False:",
        "rewards/test_environments.py",
    ),
    # -- rollout servers
    Mutation(
        "remote_engines/fleet.py",
        "key=lambda each: each.in_flight, default=None",
        "key=lambda each: -each.in_flight, default=None",
        "remote_engines/test_fleet.py",
    ),
    Mutation(
        "remote_engines/fleet.py",
        "if not is_same and weights.load is not None:",
        "if is_same and weights.load is not None:",
        "remote_engines/test_fleet.py",
    ),
    Mutation(
        "remote_engines/fleet.py",
        "weights.canary.check(server)",
        "pass",
        "remote_engines/test_fleet.py",
    ),
    Mutation(
        "remote_engines/danlu_protocol.py",
        "        first_sample=continuation.sample,",
        "        first_sample=0,",
        "remote_engines/test_danlu_server.py",
    ),
    Mutation(
        "serving/served_weights.py",
        "if self.engine.exact:  # which",
        "if False:  # which",
        "remote_engines/test_danlu_server.py",
        only="arrive",
    ),
    Mutation(
        "serving/engine_thread.py",
        "return not self._engine.is_paused and self._engine.unfinished > 0",
        "return self._engine.unfinished > 0",
        "remote_engines/test_danlu_server.py",
        only="sleep",
    ),
)
