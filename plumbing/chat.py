"""A conversation in a model's chat template: a program from outside, which transformers runs in a
sandbox."""

import functools
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from plumbing.faults import Fault, first_line
from plumbing.outside import match_markup

REMEDY = "fix it, or choose another model"
# a clock that stands still, for templates that ask for the date: what Llama 3's takes without one
CLOCK = "{% macro strftime_now(format) %}26 Jul 2024{% endmacro %}\n"


def rendered(tokenizer: Any, messages: Sequence[dict[str, Any]], **options: Any) -> str:
    """Returns what the chat template writes of a conversation, up to where the policy's turn
    begins.

    `options`: what else it is given. A template that asks for the date gets CLOCK's: a resumed run
    has the prompts that it began with. Raises Fault where the template fails.
    """
    options = {"add_generation_prompt": True} | options
    try:
        if "strftime_now" in str(getattr(tokenizer, "chat_template", "")):
            template = tokenizer.get_chat_template(tools=options.get("tools"))
            options["chat_template"] = CLOCK + template
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except Exception as e:  # a template is a program and can raise anything
        why = f"{type(e).__name__}: {first_line(e)}"
        raise Fault(f"{template_of(tokenizer)} fails ({why}); {REMEDY}") from e


@functools.lru_cache(maxsize=16)
def turn_ends(tokenizer: Any) -> tuple[int, ...]:
    """Returns the tokens that end a turn of the policy, whoever samples it: the control token that
    the chat template writes after an assistant's message, the tokenizer's EOS, and `eos_token_id`
    of the model's generation_config.json.

    A turn that we write ends with the first of them.
    """
    from transformers import GenerationConfig

    said = "It is Lake Baikal."
    asked = [
        {"role": "user", "content": "Which lake is the deepest?"},
        {"role": "assistant", "content": said},
    ]
    after = rendered(tokenizer, asked, add_generation_prompt=False).partition(said)[2]
    declared = None
    with suppress(OSError):  # it has none
        declared = GenerationConfig.from_pretrained(tokenizer.name_or_path).eos_token_id

    # in this order, each once
    closing = match_markup(tokenizer).search(after)
    ends = [tokenizer.convert_tokens_to_ids(closing[0])] if closing else []
    ends += [tokenizer.eos_token_id, *(declared if isinstance(declared, list) else [declared])]
    return tuple(dict.fromkeys(end for end in ends if end is not None))  # CHOICE-34


def template_of(tokenizer: Any) -> str:
    return f"--model {getattr(tokenizer, 'name_or_path', '')}: its chat template"


def apply_template(tokenizer: Any, messages: Sequence[dict[str, Any]], **options: Any) -> str:
    """Returns a conversation as `rendered`. Raises Fault also where a message does not come out
    whole, except for blanks at its ends."""
    text = rendered(tokenizer, messages, **options)
    for message in messages:
        content = message["content"].strip()
        if content not in text:
            raise Fault(
                f"{template_of(tokenizer)} drops or changes part of the {message['role']}'s message; {REMEDY}"
            )
    return text
