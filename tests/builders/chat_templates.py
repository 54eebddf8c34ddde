"""Chat templates in the manner of the families in use, written for tests."""

from __future__ import annotations

from danlu.data.tokenizer_training import CHATML

LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

# The thoughts of turns before the last question are left out, and an answer without any shows an empty thought.
QWEN3 = """\
{%- if tools %}{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- '# Tools\n<tools>' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{%- set reasoning = message.reasoning_content or '' %}
{%- set content = message.content %}
{%- if '</think>' in content and not reasoning %}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or reasoning) %}
{{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{- content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '\n' if content or not loop.first }}{{- '<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user' if messages[loop.index0 - 1].role != 'tool' }}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{{- '<|im_end|>\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

# The prompt opens the thought itself, and only what follows a thought is kept of earlier turns (DeepSeek-R1's way).
OPEN_THOUGHT = """\
{{- bos_token }}{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' and '</think>' in content and not loop.last %}
{%- set content = content.split('</think>')[-1] %}{%- endif %}
{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"""

# The system text stands before the last question, and only until that is answered (older Mistral templates).
MISTRAL = """\
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{{- bos_token }}{%- for message in rest %}
{%- if message.role == 'user' %}
{{- '[INST] ' + (system + '\n\n' if loop.last and system is defined else '') + message.content + '[/INST]' }}
{%- else %}{{- ' ' + message.content | trim + eos_token }}{%- endif %}{%- endfor %}"""

# A whole conversation is closed with a second token.
PHI3 = """\
{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ eos_token }}{% endif %}"""

NO_TERMINATOR = """\
{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""

MARKED = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}{{- '\n' }}
{%- else %}{{- message.content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

# Calls are closed by the mark that their results begin with; results stand within the turn of their calls, which the
# next answer goes on with (Gemma 4's way).
CALLS_IN_TURN = """\
{{- bos_token }}
{%- for tool in tools or [] %}{{- '<tool>' + tool.function.name + '</tool>\n' }}{%- endfor %}
{%- for message in messages if message.role != 'tool' %}
{%- if loop.first or message.role != 'assistant' or loop.previtem.role != 'assistant' %}
{{- '<|im_start|>' + message.role + '\n' }}{%- endif %}
{%- if message.reasoning_content and message.tool_calls %}
{{- '[THINK]' + message.reasoning_content + '[/THINK]' }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function.name + call.function.arguments | tojson + '</tool_call>' }}{%- endfor %}
{%- set results = namespace(count=0) %}
{%- for call in message.tool_calls or [] %}
{%- for result in messages if result.role == 'tool' and result.tool_call_id == call.id %}
{%- set results.count = results.count + 1 %}
{{- '<|end|>' + result.content + '<|eot_id|>' }}{%- endfor %}{%- endfor %}
{{- message.content | trim }}
{%- if message.tool_calls and not results.count %}{{- '<|end|>' }}
{%- elif message.content or not message.tool_calls %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

RAISES = "{{ raise_exception('this template takes nothing') }}"

STYLES = {
    "chatml": CHATML,
    "gemma": GEMMA,
    "llama3": LLAMA3,
    "marked": MARKED,
    "mistral": MISTRAL,
    "no-terminator": NO_TERMINATOR,
    "open-thought": OPEN_THOUGHT,
    "phi3": PHI3,
    "qwen3": QWEN3,
}
"""Templates that render an ordinary conversation, by the family whose way they follow."""

TERMINATORS = {
    "chatml": "<|im_end|>",
    "gemma": "<end_of_turn>",
    "llama3": "<|eot_id|>",
    "marked": "<|im_end|>",
    "mistral": "</s>",
    "open-thought": "<|im_end|>",
    "phi3": "<|end|>",
    "qwen3": "<|im_end|>",
}
