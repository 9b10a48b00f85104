"""Skeletons by config: a model is built and tried on the meta device once per process, which takes six times a copy."""

import copy
from pathlib import Path

import pytest
import torch

from flexengine.model.build import build as build_skeleton
from flexengine.model.skeleton import Skeleton
from flexengine.worker import open_model

Key = tuple[str, str, torch.dtype]
MOST = 16  # skeletons; a model with many layers takes megabytes


def reuse(patch: pytest.MonkeyPatch) -> None:
    """Let engines copy skeletons that an earlier one of this process built. Tests of skeletons call `build` itself."""
    built = dict[Key, Skeleton]()

    def build(directory: Path, dtype: torch.dtype, trust_remote_code: bool = False) -> Skeleton:
        config = directory / "config.json"
        if trust_remote_code or not config.is_file():
            return build_skeleton(directory, dtype, trust_remote_code)
        key = directory.name, config.read_text(errors="replace"), dtype
        if key not in built:
            if len(built) == MOST:
                del built[next(iter(built))]
            built[key] = build_skeleton(directory, dtype)
        return copy.deepcopy(built[key])

    patch.setattr(open_model, "build", build)
