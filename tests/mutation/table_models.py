"""Mutations of models, adapters and exported folders."""

from __future__ import annotations

from mutation.table import Mutation

MUTATIONS: tuple[Mutation, ...] = (
    # -- config.json of published models
    Mutation(
        "models/hf_rope.py",
        "return values.integer(rules.dim_key) / head_dim",
        "return 1.0",
        "models/test_published_configs.py",
        only="minimax",
    ),
    Mutation(
        "models/hf_rope.py",
        'key = "rope_scaling" if values.section("rope_scaling") else "rope_parameters"',
        'key = "rope_scaling" if "rope_scaling" in values else "rope_parameters"',
        "models/test_published_configs.py",
        only="converts",
    ),
    Mutation(
        "models/hf_rope.py",
        "given[_ORIGINAL] = original or given.get(_ORIGINAL, longest)",
        "given[_ORIGINAL] = given.get(_ORIGINAL, original or longest)",
        "models/test_published_configs.py",
        only="converts",
    ),
    Mutation(
        "models/hf_rope.py",
        "rope = HFValues({**by_type.section(layer_type), **scaling}",
        "rope = HFValues(by_type.section(layer_type) or scaling",
        "models/test_published_configs.py",
        only="converts",
    ),
    Mutation(
        "models/hf_rope.py",
        "if share != 1 and not rules.rotates_part:",
        "if False:",
        "models/test_families.py",
        only="would_be_computed",
    ),
    Mutation(
        "models/hf_rope.py",
        'rope.get("attn_factor") is not None',
        "False",
        "models/test_published_configs.py",
        only="under_another_name",
    ),
    Mutation(
        "models/hf_rope.py",
        '_POSITIVE = ("factor", "beta_fast", "beta_slow")',
        '_POSITIVE = ("factor",)',
        "models/test_families.py",
        only="would_be_computed",
    ),
    Mutation(
        "models/hf_rope.py",
        'if rope.raw("truncate") is False:',
        "if False:",
        "models/test_families.py",
        only="would_be_computed",
    ),
    Mutation(
        "assembly/recipe_adapters.py",
        "ignored = ignored_settings(resolve_folder(model.path))",
        "ignored: list[str] = []",
        "assembly/test_base_model.py",
        only="ignored",
    ),
    Mutation(
        "models/families/phi.py",
        '"original_max_position_embeddings": 4096,',
        "",
        "models/test_published_configs.py",
        only="phi",
    ),
    Mutation(
        "models/families/minimax.py",
        '"rotary_dim": None if rope is None else rope.dim',
        '"rotary_dim": None',
        "models/test_published_configs.py",
        only="minimax",
    ),
    Mutation(
        "models/hf_config.py",
        "hf = HFValues({**values, **renamed}",
        "hf = HFValues({**renamed, **values}",
        "models/test_published_configs.py",
        only="converts",
    ),
    Mutation(
        "models/long_context.py",
        "attention_factor = yarn.attention_factor if is_same else None",
        "attention_factor = yarn.attention_factor",
        "models/test_long_context.py",
        only="attention_factor",
    ),
    Mutation(
        "models/long_context.py",
        "rope.temperature and replace(rope.temperature, length=original)",
        "rope.temperature",
        "models/test_long_context.py",
        only="temperature",
    ),
    # -- exported folders
    Mutation(
        "models/saving.py",
        "if missing := [token for token in dict.fromkeys(stop_ids) if token not in known]:",
        "if missing := [token for token in dict.fromkeys(stop_ids) if not known]:",
        "test_exported_folders.py",
    ),
    Mutation(
        "models/saving.py",
        "dict.fromkeys([*shape.eos_token_ids, *stop_ids])",
        "dict.fromkeys(shape.eos_token_ids)",
        "test_exported_folders.py",
    ),
    Mutation(
        "assembly/adapter_training.py",
        "write_stop_ids(fresh, [*model.config.eos_token_ids, *stop_ids])",
        "pass",
        "test_exported_folders.py",
    ),
    Mutation(
        "assembly/quantizing.py",
        "dict.fromkeys([*config.eos_token_ids, *stop_ids])",
        "dict.fromkeys(config.eos_token_ids)",
        "test_exported_folders.py",
    ),
    Mutation(
        "assembly/merging.py",
        "else end_of_turn_ids(str(tokenizer)),",
        "else (),",
        "test_exported_folders.py",
    ),
    Mutation("cli/train.py", "    if not adapter.below:", "    if True:", "cli/test_merge_cli.py", only="upon_another"),
    Mutation(
        "cli/train.py",
        'if read_config(folder).task != "causal-lm":',
        "if False:",
        "cli/test_merge_cli.py",
        only="evaluated",
    ),
    # -- two features that meet, and state that is used twice
    Mutation(
        "models/latent_attention.py",
        "linear.dense_weight(dtype) if linear.adapter is None else linear.adapter.effective(linear).to(dtype)",
        "linear.dense_weight(dtype)",
        "models/test_latent_attention.py",
        only="adapter",
    ),
    Mutation(
        "models/families/gemma.py",
        "window if (layer + 1) % every else None",
        "window if layer % every else None",
        "models/test_published_configs.py",
        only="gemma",
    ),
    Mutation(
        "parallel/ring_attention.py",
        "key = source, window, kernel, dtype",
        "key = source, kernel, dtype",
        "parallel/test_ring_attention.py",
    ),
    Mutation(
        "models/router.py",
        "by_group.masked_fill(left_out.unsqueeze(-1), -torch.inf)",
        "by_group.masked_fill(left_out.unsqueeze(-1), 0.0)",
        "models/test_experts.py",
        only="negative",
    ),
    Mutation(
        "models/load_balancing.py",
        "if self._copied is not self.tokens:",
        "if self._copied is None:",
        "models/test_load_balancing.py",
        only="micro_batch",
    ),
    Mutation(
        "models/experts.py",
        "wide = torch.float32 if rows.dtype in (torch.bfloat16, torch.float16) else rows.dtype",
        "wide = rows.dtype",
        "models/test_experts.py",
        only="half_precision",
    ),
    Mutation(
        "parallel/gradient_buckets.py",
        "kind = parameter.dtype, parameter.device",
        "kind = members[0][1].dtype if members else parameter.dtype, parameter.device",
        "parallel/test_gradient_buckets.py",
        only="several_types",
    ),
    # -- drawn at random by a tool
    Mutation(
        "models/block_scaled.py",
        "return (block[0], block[1])",
        "return (block[0], block[0])",
        "models/test_block_scaled.py",
    ),
    Mutation("optim/adamw.py", "(view != 0).any(1)", "(view != -1).any(1)", "optim/test_sparse.py", only="loaded"),
    Mutation(
        "numerics/batch_invariant.py",
        "return x.neg().exp_().add_(1).reciprocal_()",
        "return x.neg().exp_().add_(2).reciprocal_()",
        "numerics/test_batch_invariant.py",
        only="sigmoid",
    ),
    # -- pairs of features
    Mutation(
        "adapters/bottleneck.py",
        'return f"{name.partition(number)[0]}.{layer}"',
        'return name.rsplit(".", 2)[0]',
        "adapters/test_bottleneck.py",
        only="layers_of_experts",
    ),
)
