"""transformers with accelerate's offload: reads a Job on stdin, prints one JSON line.

options["place"]: "disk" offloads all weights to disk; "cpu" keeps all weights in host RAM, which needs a GPU to have an
effect.
"""

import sys
import tempfile
from typing import Any

from bench.harness import Job, needs, skip
from bench.peers.transformers_generate import run


def half(size: str) -> str:
    """Return "8.0GiB" for "16GiB"."""
    number = size.rstrip("GMKiB")
    return f"{float(number) / 2}{size[len(number) :]}"


def main() -> None:
    """Run one job. accelerate's files go to a folder in job.scratch, which is removed."""
    job = Job.from_json(sys.stdin.read())
    place = job.options.get("place", "disk")
    needs("accelerate", "accelerate", job.device)
    if place == "cpu" and job.device != "cuda":
        skip("without a GPU, offloading to host RAM is transformers as it is")
    options: dict[str, Any] = {"device_map": {"model": place, "lm_head": place}}
    if job.device == "cuda":  # accelerate places the weights; half of the memory remains for caches and activations
        most = {0: job.device_mem and half(job.device_mem), "cpu": "1024GiB" if place == "cpu" else "1MiB"}
        options = {"device_map": "auto", "max_memory": {k: v for k, v in most.items() if v}}
    with tempfile.TemporaryDirectory(dir=job.scratch) as folder:
        run(job, offload_folder=folder, **options)


if __name__ == "__main__":
    main()
