"""Conversations of rows: messages and tools as chat templates read them, and their token ids."""

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from flexengine.activity import message as say
from flexengine.errors import InvalidInput, alike, blankness, cut, fault_text, is_fault, json_kind, shown
from flexengine.job.bounds import check_text
from flexengine.job.foreign import TOOLS
from flexengine.job.near_names import stated

_ROLES = ("user", "assistant", "system", "tool")
_ALLOWED = f"it must be {', '.join(_ROLES[:-1])} or {_ROLES[-1]}"
# Names of roles elsewhere: ShareGPT, OpenAssistant, Gemini, OpenAI's newer name.
_OTHER_NAMES = {"human": "user", "prompter": "user", "developer": "system"}
_OTHER_NAMES |= dict.fromkeys(("gpt", "chatgpt", "ai", "bot", "chatbot", "model", "llm"), "assistant")
_OTHER_FIELDS = {"role": ("from", "speaker", "author"), "content": ("value", "text")}
_TEXT_REMEDY = "for a text, send prompt, or give --template '{messages}' (template='{messages}' of run_job in Python)"
_TEXTS_REMEDY = "for texts, give each its own row, as prompt"


def messages_of(value: Any) -> list[dict[str, Any]]:
    """Return messages for a chat template: without null fields, and with text parts joined to one text.

    transformers also leaves null fields out. Parts are joined with newlines, as vLLM and llama.cpp join them, since
    templates of text models read `content` as text. All other fields stay as they are. Raise InvalidInput if the value
    is no array of messages, a message has no text, or no visible character is in the last one of a user, or in any
    message without tool calls; the error names the message.
    """
    if not isinstance(value, list | tuple) or not value:
        example = ', such as [{"role": "user", "content": "..."}]' if isinstance(value, str) else ""
        raise InvalidInput(f"messages is {shown(value)}; it must be an array of messages that is not empty{example}")
    messages = [_message(f"messages[{i}]", message) for i, message in enumerate(value)]
    asked = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if asked is not None and (lack := blankness(messages[asked].get("content", "-"))):
        raise InvalidInput(f"messages[{asked}].content is {lack}; give the user's text")
    if not any(message.get("tool_calls") or not blankness(message["content"]) for message in messages):
        lack = blankness(messages[0]["content"])
        raise InvalidInput(f"no message has visible text (messages[0].content is {lack}); give one")
    return messages


def row_messages(given: Any) -> list[dict[str, Any]]:
    """Return `messages_of` a row's field. The error of texts names what runs them; batches of OpenAI have no options
    for it."""
    try:
        return messages_of(given)
    except InvalidInput as error:
        texts = given if isinstance(given, list | tuple) else [given]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise
        remedy = _TEXT_REMEDY if texts[0] is given else _TEXTS_REMEDY
        raise InvalidInput(f"{error}; {remedy}, with --chat (engine.chat in Python) for a user's message") from None


def check_chat(kind: str, messages: list[dict[str, Any]], tools: list[Any] | None) -> None:
    """Raise InvalidInput if messages or tools hold infinities or NaN, half a surrogate pair, or are nested too deeply.
    kind: field that the messages are from."""
    for place, value in [*((f"{kind}[{i}]", message) for i, message in enumerate(messages)), (TOOLS, tools)]:
        try:
            text = json.dumps(value, ensure_ascii=False, default=str, allow_nan=False)
        except RecursionError as error:
            raise InvalidInput("messages are nested too deeply") from error
        except ValueError as error:
            fault = f"{place} holds Infinity or NaN, which no JSON has"
            raise InvalidInput(f"{fault}; give a finite number, null or a text instead") from error
        check_text(kind, text)


def unnamed_roles(messages: list[dict[str, Any]], templates: Any) -> dict[str, int]:
    """Return the roles that chat templates do not name in quotes, each with the number of its first message. Raise
    InvalidInput for one that the templates do not have at all, if it resembles a role that all have, or has another
    name there. Many templates write any role. templates: text of the tokenizer's template, or a text by name; None if
    it has none."""
    named = "".join(templates.values()) if isinstance(templates, Mapping) else templates or ""
    roles = {message["role"]: i for i, message in reversed([*enumerate(messages)])}
    unnamed = {r: i for r, i in roles.items() if r not in _ROLES and f"'{r}'" not in named and f'"{r}"' not in named}
    for role, i in unnamed.items():
        other = _OTHER_NAMES.get(role.lower())
        written = re.search(rf"(?<!\w){re.escape(role)}(?!\w)", named)  # as a header of the text, such as bot:
        if not written and (near := [other] if other else alike(role, _ROLES)):
            fault = f"which the chat template does not name; {_ALLOWED}: did you mean {near[0]}?"
            raise InvalidInput(f"messages[{i}].role is {shown(role)}, {fault}")
    return unnamed


def _message(place: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidInput(f"{place} is {shown(message)}; it must be an object with role and content")
    fields = {name: value for name, value in message.items() if value is not None}
    if not isinstance(role := fields.get("role"), str) or not role:
        raise InvalidInput(_stated(place, "role", message, "a string such as user"))
    calls = fields.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)):
        raise InvalidInput(f"{place}.tool_calls is {shown(calls)}; it must be an array of objects")
    content = fields.get("content")
    if isinstance(content, list) and content:
        fields["content"] = "\n".join(_part(place, part) for part in content)
    elif content is None and calls:
        fields.pop("content", None)
    elif not isinstance(content, str):
        allowed = "a string or an array of text parts" + (", or be null beside tool_calls" if content is None else "")
        raise InvalidInput(_stated(place, "content", message, allowed))
    return fields


def _stated(place: str, name: str, message: Mapping[str, Any], must: str) -> str:
    """Return the fault of a message's field, with the names of ShareGPT and others that the message has instead."""
    other = [f"{o} to {n}" for n, others in _OTHER_FIELDS.items() if n not in message for o in others if o in message]
    rename = f"; rename {' and '.join(other)}" if other else ""
    return f"{place}.{stated(name, message)}; it must be {must}{rename}"


def _part(place: str, part: Any) -> str:
    if not isinstance(part, Mapping):
        raise InvalidInput(f"{place} has a part that is {json_kind(part)}; it must be an object of type text")
    if part.get("type") != "text":
        kind = shown(part.get("type"))
        raise InvalidInput(f"{place} has a part of type {kind}; only text is read, no images, audio or files")
    if not isinstance(text := part.get("text"), str):
        raise InvalidInput(f"{place} has a text part whose {stated('text', part)}; it must be a string")
    return text


def chat_fault(tokenizer: Any) -> str | None:
    """Return why no prompt can be run as a user's message; None if prompts can. One message is tokenized to try.
    tokenizer: None if the checkpoint has none."""
    if tokenizer is None:
        return "the checkpoint has no tokenizer"
    try:
        chat_token_ids(tokenizer, [{"role": "user", "content": "a"}], None, datetime.now())
    except BaseException as error:  # a chat template and a tokenizer may raise any error
        if not is_fault(error):
            raise
        if not getattr(tokenizer, "chat_template", None):
            return "the model has no chat template"
        if isinstance(error, InvalidInput):
            return str(error)
        return f"the model's chat template refuses a user's message ({fault_text(error)})"
    return None


def _check_continued(last: Mapping[str, Any], number: int, continued: bool, templates: str) -> None:
    """Raise InvalidInput if the last message has a field by which DeepSeek, Mistral, Moonshot and Qwen continue it, but
    it is not continued here, and no chat template names the field."""
    for name in ("prefix", "partial"):
        if last.get(name) is True and not continued and templates != "None" and name not in templates:
            fault = f"messages[{number}].{name} is true, which the chat template does not read"
            raise InvalidInput(f"{fault}; give the row continue_final_message true instead, or remove the field")


def with_parsed_arguments(message: Any) -> Any:
    """Return a message of the OpenAI API with the arguments of its tool calls as objects, if they are JSON text.

    The API has arguments as text; chat templates read objects, as transformers documents.
    """
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    return {**message, "tool_calls": [_parsed_call(call) for call in calls]} if isinstance(calls, list) else message


def _parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(text := function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def tools_of(request: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools that a chat template gets; None for none, or if `tool_choice` is none. Raise InvalidInput if
    tools is no array of objects, or a field asks for something that a model cannot be forced to do."""
    tools, choice = request.get(TOOLS), request.get("tool_choice")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise InvalidInput(f"tools is {shown(tools)}; it must be an array of objects")
    if choice not in (None, "auto", "none"):
        raise InvalidInput(f"tool_choice is {shown(choice)}; it must be auto or none, as no tool call can be forced")
    if (parallel := request.get("parallel_tool_calls")) not in (None, True):
        raise InvalidInput(f"parallel_tool_calls is {shown(parallel)}; only true is possible: the model decides")
    return (tools or None) if choice != "none" else None


def chat_token_ids(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    tools: list[Any] | None,
    now: datetime,
    options: Mapping[str, Any] = {},
) -> Any:
    """Return the token ids of a chat, as the tokenizer's chat template writes it.

    Args:
        now: local time for the template.
        options: further arguments of `apply_chat_template`.

    Raises:
        InvalidInput: the chat template does not use the tools, or a role. transformers would leave them out silently.
        Any error of the template.
    """
    from flexengine.job.templates import chat_text, has_template  # most prompts are no chats

    given = {"add_generation_prompt": True, **options}

    def written(messages: list[dict[str, Any]], tools: list[Any] | None) -> Any:
        if has_template(tokenizer):
            return chat_text(tokenizer, messages, tools, now, given)
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=True, **given)

    unnamed = unnamed_roles(messages, templates := getattr(tokenizer, "chat_template", None))
    _check_continued(messages[-1], len(messages) - 1, bool(options.get("continue_final_message")), str(templates))
    chat = written(messages, tools)
    for role, i in unnamed.items():
        others = [{**message, "role": f"{role}x"} if message["role"] == role else message for message in messages]
        if chat == written(others, tools):
            raise InvalidInput(f"messages[{i}].role is {shown(role)}, which the chat template leaves out; {_ALLOWED}")
    if tools and chat == written(messages, None):
        fault = "tools are given, but the model's chat template does not use them"
        raise InvalidInput(f"{fault}; remove them, or take a model whose template does")
    _check_unread(chat, messages, lambda others: written(others, tools), str(templates))
    if isinstance(chat, str):
        check_text("the text that the chat template writes", chat)
    return tokenizer(chat, add_special_tokens=False, verbose=False) if isinstance(chat, str) else chat


_noted = set[tuple[str, str]]()  # templates, and fields of messages of which was said whether they are read


def _check_unread(chat: Any, messages: list[dict[str, Any]], written: Callable[[Any], Any], templates: str) -> None:
    """Raise InvalidInput if the chat template leaves all tool calls out. Say once per template and field which other
    fields it leaves out. chat: what `written` returns for the messages."""

    def is_unread(name: str, contents: dict[str, str]) -> bool:
        bare = [{**contents, **{n: v for n, v in each.items() if n != name}} for each in messages]
        try:
            return bool(chat == written(bare))
        except BaseException as error:  # the template needs the field
            if not is_fault(error):
                raise
            return False

    places = {name: i for i, each in reversed([*enumerate(messages)]) for name, value in each.items() if value}
    if "tool_calls" in places and (is_unread("tool_calls", {}) or is_unread("tool_calls", {"content": ""})):
        place = f"messages[{places['tool_calls']}].tool_calls"
        fault = f"{place} are given, but the model's chat template does not use them"
        raise InvalidInput(f"{fault}; write them into content, remove them, or take a model whose template does")
    for name in sorted(places.keys() - {"role", "content", "tool_calls"}):
        if (templates, name) not in _noted:
            _noted.add((templates, name))
            if is_unread(name, {}):
                place = cut(f"messages[{places[name]}].{name}")
                say(f"the model's chat template leaves {place} out (and maybe others)")
