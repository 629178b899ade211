"""Chat templates of the families that are recognised, without their parts for tools: in the words that
models of the family have for what happens to text."""

CHATML = """{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + \
'<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

CHATML_LINES = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + "\\n" }}
    {{- message["content"] }}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

CHATML_DEFAULT = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\\nYou\\'re helpful.<|im_end|>\\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\\n' + \
message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}\
{% endif %}"""

QWEN_25 = """{%- if tools %}
    {{- raise_exception('no tools') }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" \
and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

QWEN_3_BEGIN = """{%- if tools %}
    {{- raise_exception('no tools') }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
"""

QWEN_3_TURNS = """{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not(message.content.startswith('<tool_response>') and \
message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + \
'\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
"""

QWEN_3 = f"""{QWEN_3_BEGIN}{QWEN_3_TURNS}{{%- if add_generation_prompt %}}
    {{{{- '<|im_start|>assistant\\n' }}}}
    {{%- if enable_thinking is defined and enable_thinking is false %}}
        {{{{- '<think>\\n\\n</think>\\n\\n' }}}}
    {{%- endif %}}
{{%- endif %}}"""

QWEN_3_THINKING = f"""{QWEN_3_BEGIN}{QWEN_3_TURNS}{{%- if add_generation_prompt %}}
    {{{{- '<|im_start|>assistant\\n<think>\\n' }}}}
{{%- endif %}}"""

QWEN_3_INSTRUCT = f"""{QWEN_3_BEGIN}{{%- for message in messages %}}
    {{%- set content = message.content %}}
    {{%- if (message.role == "user") or (message.role == "system" and not loop.first) %}}
        {{{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}}}
    {{%- elif message.role == "assistant" %}}
        {{{{- '<|im_start|>' + message.role + '\\n' + content }}}}
        {{%- if message.tool_calls %}}
            {{{{- raise_exception('no tools') }}}}
        {{%- endif %}}
        {{{{- '<|im_end|>\\n' }}}}
    {{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}
    {{{{- '<|im_start|>assistant\\n' }}}}
{{%- endif %}}"""

LLAMA_3 = """{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = \
'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}\
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

LLAMA_3_ALWAYS = LLAMA_3.replace("{% if add_generation_prompt %}", "")[: -len("{% endif %}")]

LLAMA_31 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{#- The system message, with dates #}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none and tools is defined %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none and tools is defined %}
    {{- raise_exception('no tools') }}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

ALTERNATE = "Conversation roles must alternate user/assistant/user/assistant/..."

GEMMA_2 = f"""{{{{ bos_token }}}}{{% if messages[0]['role'] == 'system' %}}{{{{ raise_exception('System role not \
supported') }}}}{{% endif %}}{{% for message in messages %}}{{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) \
%}}{{{{ raise_exception('{ALTERNATE}') }}}}{{% endif %}}{{% if (message['role'] == 'assistant') %}}{{% set role = 'model' \
%}}{{% else %}}{{% set role = message['role'] %}}{{% endif %}}{{{{ '<start_of_turn>' + role + '\n' + message['content'] | \
trim + '<end_of_turn>\n' }}}}{{% endfor %}}{{% if add_generation_prompt %}}{{{{'<start_of_turn>model\n'}}}}{{% endif %}}"""

GEMMA_3 = f"""{{{{ bos_token }}}}
{{%- if messages[0]['role'] == 'system' -%}}
    {{%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}}
    {{%- set loop_messages = messages[1:] -%}}
{{%- else -%}}
    {{%- set first_user_prefix = "" -%}}
    {{%- set loop_messages = messages -%}}
{{%- endif -%}}
{{%- for message in loop_messages -%}}
    {{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}}
        {{{{ raise_exception("{ALTERNATE}") }}}}
    {{%- endif -%}}
    {{%- if (message['role'] == 'assistant') -%}}
        {{%- set role = "model" -%}}
    {{%- else -%}}
        {{%- set role = message['role'] -%}}
    {{%- endif -%}}
    {{{{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}}}
    {{%- if message['content'] is string -%}}
        {{{{ message['content'] | trim }}}}
    {{%- elif message['content'] is iterable -%}}
        {{{{ raise_exception("no lists") }}}}
    {{%- endif -%}}
    {{{{ '<end_of_turn>\n' }}}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}
    {{{{'<start_of_turn>model\n'}}}}
{{%- endif -%}}
"""

TEMPLATES = {
    name: text
    for name, text in list(globals().items())
    if name.isupper() and name not in ("ALTERNATE", "QWEN_3_BEGIN", "QWEN_3_TURNS")
}
