"""The worker's table of operations."""

from flexengine.schedule.tasks import Op
from flexengine.worker.worker import OPERATIONS


def test_each_operation_of_a_program_has_a_method() -> None:
    """READ_USED is in traces only."""
    assert set(OPERATIONS) == set(Op) - {Op.READ_USED}
