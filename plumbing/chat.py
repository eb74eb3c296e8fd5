"""A conversation in a model's chat template: a program from outside, which transformers runs in a sandbox."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from plumbing.faults import Fault, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

REMEDY = "fix it, or choose another model"
TODAY = datetime(2024, 7, 26)  # what Llama 3's template takes where it has no clock


def rendered(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], **options: Any) -> str:
    """Returns what the chat template writes of a conversation, up to where the policy's turn begins.

    `options`: what else it is given. A template that asks for the date gets TODAY: a resumed run has the prompts that
    it began with. Raises Fault where the template fails.
    """
    try:
        return str(
            tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, strftime_now=TODAY.strftime, **options
            )
        )
    except Exception as e:  # a template is a program and can raise anything
        why = f"{type(e).__name__}: {first_line(e)}"
        message = f"the {messages[-1]['role']}'s message that ends {messages[-1]['content'].strip()[-60:]!r}"
        raise Fault(f"{template_of(tokenizer)} fails ({why}) on {message}; {REMEDY}") from e


def template_of(tokenizer: Tokenizer) -> str:
    return f"--model {getattr(tokenizer, 'name_or_path', '')}: its chat template"


def in_template(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], **options: Any) -> str:
    """Returns a conversation as `rendered`. Raises Fault also where a message does not come out whole, except for
    blanks at its ends."""
    text = rendered(tokenizer, messages, **options)
    for message in messages:
        content = message["content"].strip()
        if content not in text:
            kept = bisect(range(len(content)), False, key=lambda n: content[: n + 1] not in text)  # noqa: B023
            lost = content[content.rfind(" ", 0, kept) + 1 :][:60]
            raise Fault(
                f"{template_of(tokenizer)} drops or changes {lost!r} of the {message['role']}'s message; {REMEDY}"
            )
    return text
