"""Mutations of rows, templates and tool calls."""

from __future__ import annotations

from mutation.table import Mutation

SHOWN = "data/test_shown_texts.py"
ANSWERS = "serving/test_openai_answers.py"
CALLS = "data/test_tool_calls.py"
COLUMNS = "data/test_column_mapping.py"
CLOSES = "data/test_call_terminators.py"
TOKENIZING = "data/test_tokenizing.py"
MUTATIONS: tuple[Mutation, ...] = (
    # -- text that a template leaves out
    Mutation(
        "data/shown_texts.py",
        "in enumerate(_THOUGHT_MARK.split(turn.get(key) or",
        "in enumerate(_SPACES.split(turn.get(key) or",
        SHOWN,
    ),
    Mutation("data/shown_texts.py", "        if not shown_alone:", "        if not alone:", SHOWN),
    Mutation(
        "data/shown_texts.py",
        "        return self._marked is None or placeholder in self._marked",
        "        return True",
        SHOWN,
    ),
    Mutation(
        "data/shown_texts.py",
        "        for place, passage in enumerate(parts[::2]):",
        "        for place, passage in enumerate(parts[:1]):",
        SHOWN,
    ),
    Mutation("data/shown_texts.py", "passage.index(stripped) + len(stripped) // 2", "passage.index(stripped)", SHOWN),
    Mutation(
        "data/shown_texts.py",
        "self.text.count(passage) >= self._all_texts.count(passage)",
        "True",
        SHOWN,
    ),
    Mutation("data/shown_texts.py", "for form in (passage, *escaped)", "for form in (passage,)", SHOWN),
    Mutation(
        "data/shown_texts.py",
        "    return any(_SPACES.sub",
        "    return False and any(_SPACES.sub",
        SHOWN,
    ),
    Mutation("data/message_spans.py", "_SpanTemplate.of(text, contents[:count])", "_SpanTemplate.of(text, [])", SHOWN),
    Mutation("data/render.py", "weights[i] > 0 and messages[i].content])", "weights[i] > 2])", SHOWN),
    Mutation(
        "data/prompts.py",
        "            left_out = renderer.keys_left_out(columns)",
        "            left_out = ()",
        SHOWN,
    ),
    # -- prompts whose tokens are no beginning of the sample
    Mutation(
        "data/render.py",
        "reasons[border] in _PROMPT_ENDS or is_begun",
        "weights[border] == 0",
        TOKENIZING,
    ),
    Mutation(
        "data/render.py", "            if weights[border + 1] > 0 and reasons", "            if reasons", TOKENIZING
    ),
    Mutation(
        "data/message_spans.py",
        "    return _Written(start, stop, start == len(prompt))",
        "    return _Written(start, stop, True)",
        TOKENIZING,
    ),
    Mutation("data/answer_trees.py", "remarks=Remarks.of(paths_of_row)", "remarks=Remarks()", TOKENIZING),
    # -- nested columns
    Mutation("data/file_formats.py", "if inner is not None", "if True", "data/test_columnar_rows.py"),
    Mutation("data/file_formats.py", '== "arrow.json":', '== "json":', "data/test_columnar_rows.py"),
    Mutation(
        "data/file_formats.py",
        "    if is_list and (read_value := _read_of(arrow_type.value_type)) is not None:",
        "    if False:",
        "data/test_columnar_rows.py",
    ),
    Mutation("data/file_formats.py", "    if is_too_deep(value):", "    if False:", "data/test_columnar_rows.py"),
    Mutation(
        "data/file_formats.py",
        "None if value is None else read_value(value)",
        "read_value(value)",
        "data/test_columnar_rows.py",
    ),
    Mutation("data/sources.py", '.with_format("arrow")', "", "data/test_columnar_rows.py"),
    # -- what closes an answer with calls
    Mutation("data/chat_template.py", " or single.count(last) != double.count(last)", "", CLOSES),
    Mutation("data/chat_template.py", 'tool_calls": [_CALL] * count}', 'tool_calls": [_CALL]}', CLOSES),
    Mutation("data/message_spans.py", 'template.call_terminators if turn.get("tool_calls") else ', "", CLOSES),
    Mutation("data/message_spans.py", "if is_opened and (mark", "if (mark", CLOSES),
    Mutation("data/tokenizer.py", "self.template(tools=True).call_terminators", "()", CLOSES),
    # -- columns that come first behind the rows that are looked through
    Mutation("data/sources.py", "if absent and any(map(mapping.can_read, rows)):", "if absent:", COLUMNS),
    Mutation("data/sources.py", "if absent and any(map(mapping.can_read, rows)):", "if False:", COLUMNS),
    Mutation("data/sources.py", "islice(read(), len(first), limit)", "islice(read(), len(first), None)", COLUMNS),
    Mutation("data/sources.py", 'b"\\\\u" not in content and', "", COLUMNS),
    Mutation("data/sources.py", "_ESCAPED_SHORTLY.split(name)", "[name]", COLUMNS),
    # -- calls of tools
    Mutation("data/tool_calls.py", "            self._thought_end = THOUGHTS[mark]", "            pass", CALLS),
    Mutation("data/tool_calls.py", "        withheld = 0 if ended else", "        withheld = 0 if True else", CALLS),
    Mutation(
        "data/tool_calls.py", "            in_thought = bool(end) and", "            in_thought = False and", CALLS
    ),
    Mutation("data/tool_calls.py", "        while end := next(", "        while end := None and next(", CALLS),
    Mutation("data/tool_calls.py", "        if text.strip():", "        if False:", CALLS),
    Mutation("data/tool_call_forms.py", "        and value.keys() <= _BARE_KEYS", "        and True", CALLS),
    Mutation("data/tool_call_forms.py", '("arguments" in value) != ("parameters" in value)', "True", CALLS),
    Mutation("data/tool_call_forms.py", "        if behind.startswith(tuple(followers))", "        if True", CALLS),
    Mutation(
        "data/tool_call_forms.py",
        'is_thought = channel is not None and channel[1] == "analysis"',
        "is_thought = False",
        CALLS,
    ),
    Mutation("data/tool_call_forms.py", "    return value.lower() == ", "    return value == ", CALLS),
    Mutation("data/tool_call_forms.py", 'if types - {"string"} and', "if", CALLS),
    Mutation(
        "data/tool_call_forms.py", "        if not ended and (is_open or", "        if not ended and (False or", CALLS
    ),
    Mutation("data/tool_call_forms.py", "(is_open or is_number or any(", "(is_open or any(", CALLS),
    Mutation("data/tool_call_forms.py", "JSONDecoder(parse_constant=_no_number)", "JSONDecoder()", CALLS),
    Mutation("data/tool_call_forms.py", "    if not math.isfinite(number):", "    if False:", CALLS),
    Mutation(
        "data/tool_call_forms.py",
        "        if not ended:  # all of the answer is of the call that is wrong",
        "        if False:",
        CALLS,
    ),
    Mutation("serving/openai_answers.py", "                self._calls[index] += 1", "                pass", ANSWERS),
    Mutation("serving/openai_answers.py", "if valid and len(valid) == len(calls):", "if True:", ANSWERS),
    Mutation("serving/openai_answers.py", '"tool_calls" if reason == "stop" and', '"tool_calls" if', ANSWERS),
    Mutation(
        "data/tool_calls.py",
        "parts += [replace(part, text=text) if isinstance(part, MalformedCall) else part for part in read]",
        "parts += read",
        ANSWERS,
    ),
    # -- a step that the prompt quotes
    Mutation("data/render.py", "draft.text.rfind(answer)", "draft.text.find(answer)", "data/test_answer_trees.py"),
    # -- drawn at random by a tool
    Mutation(
        "data/prompt_formats.py",
        "if not messages[-1].content.strip():",
        "if not messages[0].content.strip():",
        "data/test_prompts.py",
        only="nothing or none",
    ),
    Mutation(
        "data/stream.py",
        "self.position = Position((0,) * count, (0,) * count, (False,) * count)",
        "self.position = Position((-1,) * count, (0,) * count, (False,) * count)",
        "data/test_stream.py",
        only="larger_weight",
    ),
    Mutation(
        "data/context_sharding.py",
        "branch=None if batch.branch is None else moved(batch.branch),",
        "branch=None if batch.branch is not None else moved(batch.branch),",
        "data/test_context_batch.py",
        only="its_device",
    ),
    Mutation(
        "data/prepare.py",
        "capacity = 2 * self.data.max_length",
        "capacity = 2 % self.data.max_length",
        "data/test_answer_trees.py",
        only="come_back",
    ),
    Mutation(
        "data/demo_data.py",
        "(6, english), (3, chinese)",
        "(6, english), (4, chinese)",
        "data/test_demo_data.py",
        only="in_nine",
    ),
    Mutation(
        "data/prompt_encoding.py",
        "fewest, most = 1, len(text)",
        "fewest, most = 0, len(text)",
        "data/test_prompts.py",
        only="another_look",
    ),
    Mutation(
        "curation/near_duplicates.py",
        "            if index >= self.at_least:",
        "            if index >= 0:",
        "curation/test_near_duplicates.py",
    ),
    Mutation(
        "curation/near_duplicates.py", "parents[high] = low", "parents[low] = high", "curation/test_near_duplicates.py"
    ),
    Mutation(
        "curation/near_duplicates.py",
        "(values[kept] == values[row]).mean(axis=1)",
        "(values[kept[:1]] == values[row]).mean(axis=1)",
        "curation/test_near_duplicates.py",
    ),
    Mutation(
        "curation/tables.py",
        "order[_is_new([key[order] for key in keys])]",
        "order",
        "curation/test_near_duplicates.py curation/test_duplicates.py",
    ),
    Mutation(
        "curation/word_hashes.py", "is_whole = left >= size", "is_whole = left > 0", "curation/test_word_hashes.py"
    ),
    Mutation(
        "curation/word_hashes.py",
        "short = np.flatnonzero(words.lengths < 2 * size)",
        "short = np.flatnonzero(words.lengths < size)",
        "curation/test_word_hashes.py",
    ),
    Mutation(
        "curation/rows.py",
        'f"{part.role}:{len(text)}:".encode()',
        'f"{part.role}:".encode()',
        "curation/test_run_steps.py",
    ),
    Mutation(
        "curation/quality/repetition.py", "            at += n", "            at += 1", "curation/test_quality.py"
    ),
    Mutation("curation/quality/c4.py", ' and not cleaned.endswith("...")', "", "curation/test_quality.py"),
    Mutation(
        "curation/decontaminate.py",
        "counts <= max(_MOST_ROWS,",
        "counts <= max(len(runs),",
        "curation/test_decontaminate.py",
    ),
    Mutation(
        "curation/personal/addresses.py",
        "is_version = len(match.group()) == 7 or ",
        "is_version = ",
        "curation/test_personal.py",
    ),
    Mutation(
        "curation/personal/numbers.py",
        'if _ISSUERS.fullmatch(digits) and require("stdnum.luhn").is_valid(digits):',
        "if _ISSUERS.fullmatch(digits):",
        "curation/test_personal.py",
    ),
    Mutation(
        "curation/language.py",
        "is_likely = probability >= self.at_least",
        "is_likely = True",
        "curation/test_language.py",
    ),
    Mutation(
        "curation/language.py",
        "if probability < _CERTAIN and len(sample) < len(text):",
        "if False:",
        "curation/test_language.py",
    ),
    Mutation(
        "curation/selection.py",
        "np.flatnonzero(_rank(merged) < self.rows)",
        "np.flatnonzero(_rank(merged) < self.rows - 1)",
        "curation/test_selection.py",
    ),
    Mutation(
        "curation/selection.py",
        "(draw, row.place) <= (bound, place)",
        "draw < bound",
        "curation/test_selection.py",
    ),
    Mutation(
        "curation/repair.py",
        "if self.boilerplate and row.is_document:",
        "if self.boilerplate:",
        "curation/test_repair.py",
    ),
)
