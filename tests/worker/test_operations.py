"""The worker's table of operations."""

from flexengine.guests.replicas.worker import TurnsWorker
from flexengine.schedule.tasks import Op
from flexengine.worker.worker import OPERATIONS


def test_each_operation_of_a_program_has_a_method() -> None:
    """READ_USED is in traces only. Slices of replicas need a worker of their own."""
    assert set(TurnsWorker.operations) == set(Op) - {Op.READ_USED}
    assert set(OPERATIONS) == set(TurnsWorker.operations) - {Op.HAND_OVER, Op.TAKE_BACK}
