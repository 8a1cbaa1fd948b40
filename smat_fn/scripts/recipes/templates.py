"""Chat templates that a recipe may name: the text of a conversation is the one of mergekit's templates of these names.

Every tag and expression strips the space around it, so that the layout here is no part of the text.
"""

CHATML = r"""
{%- for message in messages -%}
    {{- '<|im_start|>' ~ message['role'] ~ '\n' ~ message['content'] ~ '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
{%- endif -%}
"""

# mergekit's ends every message with a line break, which Meta's template does not have
LLAMA3 = r"""
{%- for message in messages -%}
    {%- if loop.first -%}
        {{- bos_token -}}
    {%- endif -%}
    {{- '<|start_header_id|>' ~ message['role'] ~ '<|end_header_id|>\n\n' -}}
    {{- message['content'] | trim ~ '<|eot_id|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
{%- endif -%}
"""

# mergekit's puts the header of the answer to be generated behind the question, without a line break
ALPACA = r"""
{%- set headers = {'user': 'Instruction', 'user_context': 'Input', 'assistant': 'Response'} -%}
{%- for message in messages | selectattr('role', 'equalto', 'system') -%}
    {%- if loop.last -%}
        {{- message['content'] | trim -}}
    {%- endif -%}
{%- endfor -%}
{{- '\n\n' -}}
{%- for message in messages -%}
    {%- if message['role'] in headers -%}
        {{- '### ' ~ headers[message['role']] ~ ':\n' ~ message['content'] | trim -}}
        {{- '' if loop.last else '\n\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1]['role'] != 'assistant' -%}
    {{- '### Response:\n' -}}
{%- endif -%}
"""

MISTRAL = r"""
{%- set instructed = messages[0]['role'] == 'system' -%}
{{- bos_token -}}
{%- for message in (messages[1:] if instructed else messages) -%}
    {%- if message['role'] != ('assistant' if loop.index0 % 2 else 'user') -%}
        {{- raise_exception('After an optional system message, user and assistant must alternate, the user first') -}}
    {%- endif -%}
    {%- if message['role'] == 'user' -%}
        {{- ' [INST] ' ~ (messages[0]['content'] ~ '\n\n' if loop.first and instructed else '') -}}
        {{- message['content'] ~ ' [/INST]' -}}
    {%- else -%}
        {{- ' ' ~ message['content'] ~ eos_token -}}
    {%- endif -%}
{%- endfor -%}
"""

TEMPLATES = {name: text.strip() for name, text in
             {"chatml": CHATML, "llama3": LLAMA3, "alpaca": ALPACA, "mistral": MISTRAL}.items()}  # fmt: skip
NOTES = {
    "llama3": "chat_template llama3 has, as in mergekit, a line break after every <|eot_id|>, which Meta's template "
    "does not have: chat_template: auto takes the template of the models",
    "alpaca": "chat_template alpaca has, as in mergekit, no line break before the last '### Response:' of a prompt: "
    "give the template itself to have one",
}  # where mergekit's text differs from the definition of the format
