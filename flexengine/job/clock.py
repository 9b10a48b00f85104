"""The clock of chat templates: all rows of a job read one time, as their prompts must not depend on the day."""

from datetime import datetime
from typing import Any


def set_clock(tokenizer: Any, now: datetime, tools: list[Any] | None = None) -> None:
    """Let the chat template that these tools select read a fixed time by `strftime_now`, else it reads the clock."""
    from transformers.utils import chat_template_utils

    if (choose := getattr(tokenizer, "get_chat_template", None)) is None:
        return
    # transformers renders the compiled template that its cache holds. An argument of this name could be no function.
    compiled = chat_template_utils._compile_jinja_template(choose(tools=tools))
    compiled.globals["strftime_now"] = lambda form: now.strftime(form)
