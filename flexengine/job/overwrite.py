"""Checks that no file of a job or of its model is written over."""

import os
import re
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

from flexengine.errors import InvalidInput

PathName = str | os.PathLike[str] | None
# Names of files in a model's directory. Others there, such as an earlier trace, may be replaced.
_OF_MODEL = re.compile(
    r".*\.(safetensors|bin|model|tiktoken|jinja|py)|(.*config|.*\.index|tokenizer.*|vocab|special_tokens_map"
    r"|added_tokens)\.json|(vocab|merges)\.txt|SHA256SUMS"
)


def check_not_overwritten(read: Mapping[str, PathName], written: Mapping[str, PathName]) -> None:
    """Raise InvalidInput if a file that is written is also read, or is written twice. Call it before all work.

    Directories, and devices such as /dev/null, may be given more than once.

    Args:
        read: files that are read, by the names that messages use; None if an option is not given.
        written: files that are written, by the names that messages use; None if an option is not given.
    """
    given = {**read, **written}
    paths = {name: Path(os.path.realpath(path)) for name, path in given.items() if path}
    for one, other in combinations(paths, 2):
        same = paths[one] == paths[other] and (paths[one].is_file() or not paths[one].exists())
        if same and (one in written or other in written):
            raise InvalidInput(f"{one} and {other} are one file, {given[one]}; give each a file of its own")


def check_model_kept(model: PathName, written: Mapping[str, PathName]) -> None:
    """Raise InvalidInput if a file that is written would replace a file of the model.

    Args:
        model: a directory or a file; other names, such as hub ids, and None have no files here.
        written: files that are written, by the names that messages use; None if an option is not given.
    """
    if model is None or not os.path.exists(model):
        return
    root = os.path.realpath(model)
    for name, path in written.items():
        if not path or not (target := Path(os.path.realpath(path))).is_file() or not target.is_relative_to(root):
            continue
        if target == Path(root) or _OF_MODEL.fullmatch(target.name):
            raise InvalidInput(f"{name} {path} would replace a file of the model {model}; name another file")
