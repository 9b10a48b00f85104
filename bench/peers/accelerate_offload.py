"""transformers with accelerate's disk offload, everything on disk: reads a Job on stdin, prints one JSON line."""

import sys
import tempfile

from bench.harness import Job
from bench.peers.transformers_generate import run


def main() -> None:
    """One job; what accelerate writes goes to a folder in job.scratch that is removed."""
    job = Job.from_json(sys.stdin.read())
    with tempfile.TemporaryDirectory(dir=job.scratch) as folder:
        run(job, device_map={"model": "disk", "lm_head": "disk"}, offload_folder=folder)


if __name__ == "__main__":
    main()
