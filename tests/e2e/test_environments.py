"""Two environments of one machine share what is converted and compiled."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flexengine
from flexengine.system.openmp import openmp_runtime
from tests.helpers.tiny_gguf import tiny_gguf

FIRST_JOB = """
import json, sys
from flexengine import Engine, Lossy, SamplingParams
begun = []
def note(report):
    if report.state == "began":
        begun.append(report.name)
with Engine(sys.argv[1], device="cpu", device_mem="200M", lossy=Lossy(weights="int8"), progress=note) as engine:
    result = engine.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=4))
import flexengine
from flexengine.system.openmp import openmp_runtime
print(json.dumps([flexengine.__file__, openmp_runtime(), begun, result.token_ids]))
"""


@pytest.mark.slow
def test_the_second_converts_compiles_and_encodes_nothing(tmp_path: Path, own_cache: Path) -> None:
    """Each has a copy of the package, of torch's OpenMP library, and of the model, with other names and times."""
    model, ran = tiny_gguf(tmp_path / "m.gguf"), []
    for name in ("one", "two"):
        folder = tmp_path / name
        for part in ("flexengine", "policies"):
            shutil.copytree(Path(flexengine.__file__).parents[1] / part, folder / part)
        given = shutil.copyfile(model, folder / f"model-{name}.gguf")
        preload = shutil.copy(openmp_runtime() or pytest.skip("torch has no OpenMP library of its own"), folder)
        environment = os.environ | {"PYTHONPATH": str(folder), "LD_PRELOAD": str(preload)}
        command = [sys.executable, "-c", FIRST_JOB, str(given)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
        assert done.returncode == 0, done.stderr
        package, openmp, begun, tokens = json.loads(done.stdout)
        assert Path(package).is_relative_to(folder)
        assert Path(openmp).is_relative_to(folder)
        ran.append((begun, tokens))
    (first, expected), (second, tokens) = ran
    assert {"converting", "encoding"} <= {*first}
    assert not {"converting", "compiling", "encoding", "waiting"} & {*second}
    assert tokens == expected
