"""Copies of skeletons, which engines of the tests use: nothing of a copy leads to the model that was copied."""

import copy
import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from flexengine.model.build import build
from tests.helpers.families import FAMILIES


def modules_of(root: Any) -> dict[int, nn.Module]:
    """Return all modules of torch that an object leads to, also by closures and bound methods."""
    seen, found, todo = {id(vars(module)) for module in sys.modules.values()}, dict[int, nn.Module](), [root]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, type(sys) | type):
            continue
        seen.add(id(item))
        if isinstance(item, nn.Module):
            found[id(item)] = item
        todo += gc.get_referents(item)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_shares_no_module(tmp_path: Path, family: str) -> None:
    kind, values = FAMILIES[family]
    getattr(transformers, f"{kind}Config")(**values).save_pretrained(tmp_path)
    skeleton = build(tmp_path, torch.float32)
    first, second = modules_of(skeleton), modules_of(copy.deepcopy(skeleton))
    assert len(first) == len(second) > 30
    assert not first.keys() & second.keys()
