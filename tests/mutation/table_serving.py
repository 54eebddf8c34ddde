"""Mutations of the server and the engine behind it."""

from __future__ import annotations

from mutation.table import Mutation

MUTATIONS: tuple[Mutation, ...] = (
    # -- requests cross a process by one codec
    Mutation(
        "rollout/servers/danlu_protocol.py",
        "        rotary_length=request.text_length,",
        "        rotary_length=None,",
        "rollout/servers/test_danlu_server.py",
        only="every_field",
    ),
    Mutation(
        "rollout/engine_state.py",
        "    return {name: _to_json(getattr(value, name)) for name in _HINTS[type(value)]}",
        '    return {name: _to_json(getattr(value, name)) for name in _HINTS[type(value)] if name != "draw_sample"}',
        "rollout/servers/test_danlu_server.py",
        only="later_turns",
    ),
    Mutation(
        "rollout/engine_state.py",
        "if name not in fields] if complete else []:",
        "if name not in fields] if False else []:",
        "rollout/servers/test_danlu_server.py",
        only="one_side_does_not_know",
    ),
    Mutation(
        "rollout/servers/server_interface.py",
        "    if short is not None and context > short:",
        "    if short is not None and context >= short:",
        "rollout/servers/test_http_engine.py",
        only="short_context_there",
    ),
    Mutation(
        "rollout/servers/vllm.py",
        "        check_rotation(self.name, url, config, self.context)",
        "        pass",
        "rollout/servers/test_http_engine.py",
        only="short_context_there",
    ),
    Mutation(
        "rollout/servers/sglang.py",
        "        check_rotation(self.name, url, config, self.context)",
        "        pass",
        "rollout/servers/test_http_engine.py",
        only="short_context_there",
    ),
)
