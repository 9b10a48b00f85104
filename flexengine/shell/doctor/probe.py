"""Facts that need torch, printed as one line of JSON by a process of its own: importing a damaged torch, or starting a
damaged GPU driver, can end or stop the process that does it.

    python -m flexengine.shell.doctor.probe '{"offload": "/path", "disks": [...], "measure": false, "model": ""}'
"""

import json
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from flexengine import kernels
from flexengine.config import cache_root
from flexengine.errors import format_words
from flexengine.kernels import build
from flexengine.kernels.onednn import has_onednn
from flexengine.places import disks_of
from flexengine.plan.hardware import Hardware, Table
from flexengine.shell.doctor.machine import Failed, attempt, compilers
from flexengine.system.limits import has_gpu
from flexengine.system.openmp import openmp_runtime
from flexengine.tier import cuda
from flexengine.tier.machine import Machine, make_machine

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def torch_facts() -> dict[str, Any]:
    """Return version, build and threads of torch."""
    return {
        "version": torch.__version__,
        "cuda_build": torch.version.cuda,
        "hip_build": torch.version.hip,
        "cuda_available": has_gpu(),
        "threads": torch.get_num_threads(),
        "onednn": has_onednn(),
        "openmp": openmp_runtime(),
    }


def kernel_facts() -> dict[str, Any]:
    """Return which kernels jobs use: name (native, or reference: plain torch), and of compiled native kernels the
    library and the width of vectors in bits; `compiled` is false if the first job compiles them."""
    library, loaded, name = None, None, "reference"
    if kernels.choice() != "reference":
        library = build.compiled()
        loaded = kernels.load() if library is not None else None
        usable = any(compiler.works for compiler in compilers())
        name = loaded.name if loaded is not None else "native" if usable else "reference"
    path = None if library is None else str(library)
    features = {feature: getattr(loaded, feature, None) for feature in ("simd", "bf16")}
    return {"name": name, "compiled": loaded is not None, "library": path, **features}


def stored_rates(machine: Machine, disks: list[Path]) -> dict[str, Any] | None:
    """Return the latest rates of this machine in the cache; None if there are none. disks: directories where models may
    lie."""
    if not any((cache_root() / "hardware").glob("*.json")):
        return None
    if not kernel_facts()["compiled"] and kernel_facts()["name"] != "reference":
        return None  # rates belong to kernels, and finding their key would compile them
    from flexengine.measure import store  # imported here, as it imports transformers

    stored = []
    for key in {store.key_of(machine, dtype, [place]) for dtype in _DTYPES for place in disks}:
        file = cache_root() / "hardware" / f"{key}.json"
        with suppress(OSError, ValueError):
            if (hardware := Hardware.load(file)).measured:
                stored.append((file.stat().st_mtime, hardware))
    if not stored:
        return None
    when, hardware = max(stored, key=lambda pair: pair[0])
    best = {dtype: _best(table) for dtype, table in hardware.products.items()}
    return {"when": when, "flops": best} | _rates(machine, hardware.links, hardware.checkpoint_read, hardware.touch)


def measured_rates(machine: Machine) -> dict[str, Any]:
    """Measure and return the rates of the disks and the memory. Takes about ten seconds; kernels are compiled first
    if necessary."""
    from flexengine.measure.links import measure_links  # imported here, as it imports transformers

    rates = measure_links(machine)
    return _rates(machine, rates["links"], rates["checkpoint_read"], rates["touch"])


def _rates(machine: Machine, links: Any, checkpoint: Table, touch: float) -> dict[str, Any]:
    """Return bytes per second: of each directory (read, write), of the links and of page faults."""
    disks = {}
    for place, directory in zip(disks_of(machine.tiers), machine.directories, strict=True):
        read, write = (_best(links[lane]) if lane in links else None for lane in place.lanes)
        disks[str(directory)] = {"read": read, "write": write}
    disks[str(machine.directories[0])]["checkpoint_read"] = _best(checkpoint)
    others = {lane: _best(table) for lane, table in links.items() if lane in ("h2d", "d2h")}
    return {"disks": disks, "touch": touch, **others}


def _best(table: Table) -> float:
    return max(rate for _, rate in table)


def model_facts(model: str) -> dict[str, Any]:
    """Return how many layers of a model native kernels compute on a CPU, why they do not compute the others, and the
    formats of weights that are encoded in the checkpoint. No weight is read (but scales of quantised ones), and nothing
    is downloaded; kernels are compiled first if necessary."""
    from flexengine.model.build import build_from  # imported here, as it imports transformers
    from flexengine.model.checkpoint import read_checkpoint
    from flexengine.model.config import load_config, quantisation
    from flexengine.model.files import read_object, weights_in
    from flexengine.model.forward import pausing_layers
    from flexengine.model.source import ModelSource, check_local, resolve

    path = Path(model)
    bare = (path / "config.json").is_file() and weights_in(path) is None  # a config is enough
    if not bare:
        check_local(model)
    source = ModelSource(path, path.resolve().name) if bare else resolve(model)
    with torch.no_grad():
        config = load_config(source.directory, weights=not bare)
        skeleton = build_from(config, source.directory, torch.float32)
        if skeleton.mixing:
            resolve_name("flexengine.model.state_kernels:use_kernels")(skeleton, kernels.load())
        layers = pausing_layers(skeleton.model)
        native = sum(layer.native is not None and layer.native.kind.proven() for layer in layers)
    tensors = {} if bare else read_checkpoint(source.directory, source.given)
    if not bare and quantisation(read_object(source.directory / "config.json")):
        decoded_names = resolve_name("flexengine.model.quantised.schemes:decoded_names")
        tensors = decoded_names(source.directory, tensors, check=False)
    forms = sorted({format_words(origin.form.packed.name) for origin in tensors.values() if origin.form})
    texts = list(skeleton.module_words)
    return {"name": source.name, "layers": len(layers), "native": native, "as_modules": texts, "formats": forms}


def facts(offload: Path, disks: list[Path], measure: bool, model: str) -> dict[str, Any]:
    """Return all facts; a failed probe is {"error": text}. disks: directories on disks of their own."""
    facts: dict[str, Any] = {"torch": attempt(torch_facts), "kernels": attempt(kernel_facts)}
    facts["gpus"] = attempt(cuda.gpus)
    facts["rates"] = attempt(lambda: _on([offload], lambda machine: stored_rates(machine, disks)))
    facts["model"] = attempt(lambda: model_facts(model)) if model else None
    facts["measured"] = attempt(lambda: _on(disks, measured_rates)) if measure and disks else None
    return {name: asdict(value) if isinstance(value, Failed) else value for name, value in facts.items()}


def _on(directories: list[Path], probe: Callable[[Machine], Any]) -> Any:
    with closing(make_machine("auto", None, None, directories)) as machine:
        return probe(machine)


if __name__ == "__main__":
    wanted = json.loads(sys.argv[1])
    disks = list(map(Path, wanted["disks"]))
    print(json.dumps(facts(Path(wanted["offload"]), disks, wanted["measure"], wanted["model"])), flush=True)
