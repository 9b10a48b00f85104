"""A run that is killed at a point, for a process of its own.

Points are the calls that change files, in their order. The job's own resuming has tests of its own.
"""

import os
import signal
from collections.abc import Callable
from typing import Any

from flexengine.apps.wrangle.plan import make_plan
from flexengine.apps.wrangle.run import check, finish, job_of, prepare
from flexengine.apps.wrangle.spec import make_spec
from tests.apps.wrangle.helpers import answer_rows


def main(point: int, table: str, output: str) -> None:
    """Run, and print the number of calls of os.fsync and os.replace. Before call number `point`, from 1, be killed."""
    reached = 0

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any) -> Any:
            nonlocal reached
            reached += 1
            if reached == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args)

        return made

    os.fsync, os.replace = dying(os.fsync), dying(os.replace)
    plan = make_plan(make_spec("match", (table,), {"label": "same", "shots": 1}))
    check(plan, output)
    prepare(plan, output)
    if not job_of(output).results.exists():  # as a finished job does
        job = job_of(output)
        answer_rows(job.rows, job.results, lambda row: [-len(row["context"]), -70.0 * (row["row"] + 3)])
    finish(plan, output)
    print(reached)
