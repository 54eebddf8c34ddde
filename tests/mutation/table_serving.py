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
    # -- what one request fails at is its own
    Mutation(
        "rollout/embedded.py",
        "        failed_requests = {answer.request.number for answer, _ in outcome.failed}",
        "        failed_requests = set()",
        "rollout/test_embedded.py",
        only="costs_the_others_nothing",
    ),
    Mutation(
        "rollout/embedded.py",
        "        self._fail(outcome.failed)",
        "        pass",
        "rollout/test_embedded.py",
        only="request_fails_at",
    ),
    Mutation(
        "rollout/model_runner.py",
        "            if not all(map(math.isfinite, of_token)):",
        "            if False:",
        "rollout/test_embedded.py",
        only="request_fails_at",
    ),
    Mutation(
        "rollout/answer.py",
        "        self.decode = self._stream = None",
        "        pass",
        "rollout/test_embedded.py",
        only="tokenizer_that_fails",
    ),
    Mutation(
        "rollout/serving/engine_thread.py",
        "            self._give_up_failed()",
        "            pass",
        "rollout/serving/test_engine_thread.py",
        only="request_that_fails",
    ),
    Mutation(
        "rollout/request.py",
        "self.temperature == 0 or LOWEST_TEMPERATURE <= self.temperature < math.inf,",
        "0 <= self.temperature < math.inf,",
        "rollout/serving/test_openai_api.py",
        only="make_no_sense",
    ),
    Mutation(
        "rollout/request.py",
        "1 / HIGHEST_PENALTY <= self.repetition_penalty <= HIGHEST_PENALTY,",
        "0 < self.repetition_penalty < math.inf,",
        "rollout/serving/test_openai_api.py",
        only="make_no_sense",
    ),
    Mutation(
        "rollout/scheduler.py",
        "            del sequence.drafts[self.batch_tokens - 1 :]",
        "            pass",
        "rollout/test_scheduler.py",
        only="has_a_chunk",
    ),
)
