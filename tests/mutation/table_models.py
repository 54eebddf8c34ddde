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
        "dict.fromkeys([*config.eos_token_ids, *stop_ids])",
        "dict.fromkeys(config.eos_token_ids)",
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
        "models/experts.py",
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
    Mutation(
        "models/attend.py",
        "key = kernels, scale, window, softcap, has_sinks",
        "key = kernels, scale, window, has_sinks",
        "models/test_attend.py",
        only="in_turn",
    ),
    # -- new tokens
    Mutation(
        "assembly/combined_rows.py",
        "tensors[token_rows.key_of(site)] = (start + change)[ids]",
        "tensors[token_rows.key_of(site)] = change[ids]",
        "assembly/test_combined_rows.py",
    ),
    Mutation(
        "assembly/combined_rows.py",
        "rows.put_into(start, site)",
        "pass",
        "assembly/test_combined_rows.py",
        only="upon_an_adapter",
    ),
    Mutation(
        "data/new_tokens.py",
        "return extended_tokenizer(str(folder), tokens) if missing else folder",
        "return folder",
        "assembly/test_combined_rows.py",
        only="tokenizer",
    ),
    Mutation(
        "models/decoder.py",
        "return rows.narrow(dim, 0, min(rows.shape[dim], self.config.vocab_size - start))",
        "return rows",
        "assembly/test_extended_base.py",
        only="padding",
    ),
    Mutation(
        "assembly/extended_base.py",
        "of_base = rows[: min(token.id for token in tokens)]",
        "of_base = rows",
        "assembly/test_extended_base.py",
        only="spare",
    ),
    Mutation(
        "adapters/token_rows.py",
        "modules[site.name], shared = embedding, embedding.token_rows if tied else None",
        "modules[site.name] = embedding",
        "adapters/test_token_rows.py",
        only="tied",
    ),
    Mutation(
        "adapters/token_rows.py",
        ")[order]",
        ")",
        "adapters/test_token_rows.py",
        only="peft_s_folder",
    ),
    Mutation(
        "models/hf_folder.py",
        "if weight_map.get(name, shard) == shard}",
        "}",
        "models/test_hf_folder.py",
        only="two_shards",
    ),
    Mutation(
        "assembly/token_notes.py",
        "alike - itself.long() >= _FEWEST_ALIKE",
        "alike >= 1",
        "assembly/test_token_notes.py",
        only="never_trained",
    ),
    Mutation("models/attention.py", "if self.norms_rotated:", "if False:", "models/test_families.py", "hunyuan"),
    Mutation("models/attention.py", "if self.norms_values:", "if False:", "models/test_families.py", "gemma4"),
    Mutation(
        "inference/fused_decoder.py",
        " or mixer.value_norm or mixer.values_are_keys",
        "",
        "inference/test_fused_decoder.py",
        "left_to_the_modules",
    ),
    Mutation("models/rope.py", "frequencies[int(share * width // 2) :] = 0.0", "", "models/test_families.py", "gemma4"),
    Mutation(
        "models/multimodal.py", ".image_keys if key in before", ".image_keys if False", "models/test_multimodal.py"
    ),
    Mutation(
        "inference/fused_decoder.py",
        " or mixer.norm_behind_rope",
        "",
        "inference/test_fused_decoder.py models/test_family_decoding.py",
        "left_to_the_modules or behind_the_rotation",
    ),
    Mutation(
        "models/families/exaone.py",
        "layer if layer.mixer.window",
        "layer if True",
        "models/test_families.py",
        "exaone4",
    ),
    Mutation(
        "models/hf_layout.py", "replace(entry, transposed=True)", "entry", "models/test_multimodal.py", "either_way"
    ),
    # -- GPT-NeoX, Cohere 2, GLM-4 and Gemma
    Mutation(
        "models/families/gpt_neox.py",
        'parallel=hf.flag("use_parallel_residual")',
        "parallel=True",
        "models/test_families.py",
        "gpt-neox",
    ),
    Mutation(
        "models/families/gpt_neox.py",
        "turns=lambda layer: layer.attention.heads",
        "turns=lambda layer: 1",
        "models/test_families.py",
        "gpt-neox",
    ),
    Mutation(
        "models/decoder.py", "source = x if self.parallel", "source = x if False", "models/test_families.py", "neox"
    ),
    Mutation(
        "models/families/cohere.py",
        "unrotated if each is None",
        "mixer if each is None",
        "models/test_families.py",
        "cohere2",
    ),
    Mutation(
        "models/families/cohere.py", "if (layer + 1) % every", "if layer % every", "models/test_families.py", "cohere2"
    ),
    Mutation(
        "models/families/glm.py",
        'read_glm(hf, replace(plain, norms="sandwich"), layers)',
        "read_glm(hf, plain, layers)",
        "models/test_families.py",
        "glm4",
    ),
    Mutation(
        "models/families/gemma.py",
        'activations={"gelu": "gelu_tanh"},',
        "",
        "models/test_families.py models/test_published_configs.py",
        "gemma",
    ),
    # -- Phi-3.5-MoE
    Mutation(
        "models/sparse_mixer.py",
        "(weight * (1 - _THIRD) * ~is_whole).detach()",
        "weight * (1 - _THIRD) * ~is_whole",
        "models/test_sparse_mixer.py",
    ),
    Mutation(
        "models/sparse_mixer.py",
        "logits.abs().clamp(min=highest) > threshold",
        "highest.abs() > threshold",
        "models/test_sparse_mixer.py models/test_families.py",
        "phimoe or transformers_for_the_same_draws",
    ),
    Mutation(
        "models/sparse_mixer.py", "x * (first * second)", "x * first", "models/test_sparse_mixer.py", "same_draws"
    ),
    Mutation("models/decoder.py", "ones = hidden.new_ones(", "ones = hidden.new_zeros(", "stages/test_head_bias.py"),
    Mutation(
        "models/rope.py",
        "scaling.long_mscale, scaling.short_mscale)",
        "scaling.short_mscale, scaling.short_mscale)",
        "models/test_sparse_mixer.py",
        "long_documents",
    ),
    Mutation(
        "stages/placed.py",
        "self.model.config.kinds if self.recipe.drops_out]",
        "self.model.config.kinds]",
        "stages/test_router_draws.py",
    ),
    Mutation(
        "assembly/extended_base.py",
        "[named.get(bias)] if config.head_bias else ()",
        "()",
        "assembly/test_extended_base.py",
        "biased",
    ),
    # -- names of each family
    Mutation(
        "remote_engines/vllm.py",
        'PREFIXES = {"gpt_neox.": "model."}',
        "PREFIXES: dict[str, str] = {}",
        "remote_engines/test_server_interface.py",
        "gpt_neox",
    ),
    Mutation(
        "planning/device_map.py",
        "(not is_outer or name in PARTS or name in outer)",
        "True",
        "planning/test_device_map.py",
    ),
)
