"""Text of conversations, as chat templates write them: in a process of its own, with limits.

A template comes with a checkpoint and is a program. In one step it can ask for any memory ('a' * 10**10), and filters
and loops for any time, so no check inside the engine's process can bound it. This module is also the program of the
other process, which has transformers without torch (0.7 s to start, 60 MB). One process serves all rows.
"""

import os
import pickle
import random
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from flexengine.errors import FlexError, InvalidInput
from flexengine.job.own_process import last_line, set_limit, started

CPU_SECONDS = 3.0  # most time of the processor for one conversation; usual templates take under a millisecond
SPARE_BYTES, SPARE_PER_BYTE = 64 << 20, 16  # most memory for one conversation, and more for each byte of it
_REQUEST, _REPLY = struct.Struct("<Qd"), struct.Struct("<cQ")  # length and seconds; kind and length
_TEXT, _ERROR, _TIME, _MEMORY = b"t", b"e", b"s", b"m"  # kinds of replies
_LIMITS = {
    _TIME: f"more than the {CPU_SECONDS:g} s of processor time that are allowed",
    _MEMORY: f"more than the {SPARE_BYTES >> 20} MiB of memory, and {SPARE_PER_BYTE} bytes per byte, that are allowed",
}
_REMEDY = "use a model with another template"
_FAULTS = {
    "SecurityError": "the chat template does what templates must not do here ({})",
    "RecursionError": "the chat template, or the row, is nested too deeply",
}
_KILL_SECONDS = 2  # after CPU_SECONDS, until the kernel ends a step that cannot be interrupted
_MAX_ERROR = 1000  # characters
_LINE = "line "  # begins the reason of an error in the text of a template
_PROBE = [{"role": "user", "content": "a"}]


class TemplateFault(FlexError):
    """A chat template exceeds a limit, or raises an error, whose name a class derived from this one has."""


class _TimeExceeded(BaseException):
    """Ends a template. No filter of a template catches it."""


def chat_text(
    tokenizer: Any, messages: Any, tools: Any = None, now: datetime | None = None, variables: Mapping[str, Any] = {}
) -> str:
    """Return a conversation as the tokenizer's chat template writes it.

    Args:
        tokenizer: one whose `has_template` is false writes the conversation itself, without limits and without `now`.
        now: local time that the template reads; None is the present.
        variables: further arguments of `apply_chat_template`, and variables of the template.

    Raises:
        TemplateFault: the template raises an error, or exceeds a limit of time or memory.
        InvalidInput: the tokenizer has no chat template, or several of which none is the default.
    """
    if not has_template(tokenizer):
        text: str = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **variables)
        return text
    known = tokenizer.chat_template
    if not known:
        fault = "the model has no chat template, so it cannot run messages"
        raise InvalidInput(f"{fault}: send prompt, or put a chat_template.jinja into the model's directory")
    if isinstance(known, Mapping) and not {"default", *["tool_use"] * bool(tools)} & known.keys():
        fault = f"the model has no chat template named default, only {', '.join(sorted(known))}"
        raise InvalidInput(f"{fault}: copy the one to use to chat_template.jinja in the model's directory")
    template = tokenizer.get_chat_template(None, tools)
    given = {"conversations": [messages], "tools": tools, "chat_template": template}
    arguments = {**tokenizer.special_tokens_map, **variables, **given}
    try:
        return _RENDERER.text(template, arguments, now or datetime.now())
    except TemplateFault as fault:
        if not str(fault).startswith(_LINE):
            raise
        place = Path(getattr(tokenizer, "name_or_path", "") or os.devnull)
        files = ("chat_template.jinja", "tokenizer_config.json") if isinstance(known, str) else ()
        file = next((name for name in files if (place / name).is_file()), "the chat template")
        raise type(fault)(f"{file}, {fault}") from None


def has_template(tokenizer: Any) -> bool:
    """Return whether a tokenizer writes conversations with a template of Jinja, not with code of its own."""
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    method = getattr(tokenizer, "apply_chat_template", None)
    return getattr(method, "__func__", None) is PreTrainedTokenizerBase.apply_chat_template


class _Renderer:
    """The other process, which is started by the first conversation and ends with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._answered = False  # whether the process has answered
        self._errors: IO[bytes] = BytesIO()  # what it writes to stderr
        self._fault: str | None = None  # why it cannot start; it is not started for each row again
        self._endless = set[str]()  # templates that exceed the time for a short message, too

    def text(self, template: str, arguments: dict[str, Any], now: datetime) -> str:
        """Return the text of one conversation. Raise TemplateFault. arguments: of `render_jinja_template`."""
        if template in self._endless:
            raise TemplateFault(f"the chat template takes {_LIMITS[_TIME]}, even for a short message; {_REMEDY}")
        kind, text = self._ask(arguments, now)
        if kind == _TEXT:
            return text
        if kind == _TIME and self._ask({**arguments, "conversations": [_PROBE], "tools": None}, now)[0] == _TIME:
            self._endless.add(template)
        if kind in _LIMITS:
            raise TemplateFault(f"the chat template takes {_LIMITS[kind]} for a row; shorten the row, or {_REMEDY}")
        name, _, reason = text.partition(": ")
        if name in _FAULTS:
            raise TemplateFault(f"{_FAULTS[name].format(reason)}; {_REMEDY}")
        raise type(name, (TemplateFault,), {})(reason)

    def _ask(self, arguments: dict[str, Any], now: datetime) -> tuple[bytes, str]:
        """Return the kind of the reply, and its text."""
        data = pickle.dumps((arguments, now), pickle.HIGHEST_PROTOCOL)
        with self._lock:
            if self._fault is not None:
                return _ERROR, self._fault
            if self._process is None or self._process.poll() is not None:
                self._errors, self._answered = TemporaryFile(), False  # noqa: SIM115 - while the process runs
                self._process = started(
                    __name__, stdin=subprocess.PIPE, stderr=self._errors, TRANSFORMERS_VERBOSITY="error"
                )
            process = self._process
            source, target = process.stdout, process.stdin
            assert source is not None
            assert target is not None
            try:
                target.write(_REQUEST.pack(len(data), CPU_SECONDS) + data)
                target.flush()
                if len(header := source.read(_REPLY.size)) == _REPLY.size:
                    kind, size = _REPLY.unpack(header)
                    if len(reply := source.read(size)) == size:  # else the process ended while it wrote
                        self._answered = True
                        return kind, reply.decode("utf-8", "surrogatepass")
            except BrokenPipeError:
                pass
            except BaseException:  # such as Ctrl-C: the reply would be taken for that of the next conversation
                self._end()
                raise
            code = self._end()
            line = last_line(self._errors)
            fault = f"TemplateFault: the process that renders chat templates ended with exit status {code}: {line}"
            if code > 0 and not self._answered:
                self._fault = fault
        return {-signal.SIGXCPU: _TIME, -signal.SIGKILL: _MEMORY}.get(code, _ERROR), fault

    def _end(self) -> int:
        process, self._process = self._process, None
        assert process is not None
        process.kill()
        return process.wait()

    def forget(self) -> None:
        """Leave the process to the parent, in a child that was forked: it ends when the parent has."""
        if self._process is not None:
            null = os.open(os.devnull, os.O_RDWR)
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None and not pipe.closed:
                    os.dup2(null, pipe.fileno(), inheritable=False)  # to close it might write what the parent writes
            os.close(null)
        self._process, self._lock = None, threading.Lock()


_RENDERER = _Renderer()
os.register_at_fork(after_in_child=_RENDERER.forget)


def _serve(source: IO[bytes], target: IO[bytes]) -> None:
    """Write conversations until the engine's process has ended."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers works without; torch takes 3 s and 300 MB
    from transformers.utils import chat_template_utils

    signal.signal(signal.SIGPROF, _exceeded)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while len(header := source.read(_REQUEST.size)) == _REQUEST.size:
        size, seconds = _REQUEST.unpack(header)
        kind, data = _written(source.read(size), seconds, chat_template_utils)
        target.write(_REPLY.pack(kind, len(data)))
        target.write(data)
        target.flush()


def _written(request: bytes, seconds: float, library: Any) -> tuple[bytes, bytes]:
    """Return the kind and the text of the reply. library: transformers.utils.chat_template_utils."""
    try:
        try:
            _limit(len(request), seconds)
            arguments, now = pickle.loads(request)
            random.seed(repr(arguments["conversations"]))  # of the filter `random`: resumed jobs have the same prompts
            library.datetime = type("Clock", (datetime,), {"now": classmethod(lambda *_: now)})
            texts, _ = library.render_jinja_template(**arguments)
            return _TEXT, texts[0].encode("utf-8", "surrogatepass")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            set_limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)
    except _TimeExceeded:
        return _TIME, b""
    except MemoryError:
        return _MEMORY, b""
    except Exception as error:  # a template may raise any error
        line = getattr(error, "lineno", None) if type(error).__module__ == "jinja2.exceptions" else None
        where = f"{_LINE}{line}: " if line else ""
        return _ERROR, f"{type(error).__name__}: {where}{error}"[:_MAX_ERROR].encode("utf-8", "replace")


def _limit(size: int, seconds: float) -> None:
    """Set the limits of one conversation, beside what the process has taken before. size: of the request, in bytes."""
    with open("/proc/self/statm", "rb") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    set_limit(resource.RLIMIT_AS, used + SPARE_BYTES + SPARE_PER_BYTE * size)
    set_limit(resource.RLIMIT_CPU, int(time.process_time() + seconds) + _KILL_SECONDS)
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _exceeded(*_: object) -> None:
    raise _TimeExceeded


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer)
