"""The kernels that tests compare with each other."""

import pytest

from flexengine.kernels import Kernels
from tests.helpers.builds import KERNELS, kernels_named


@pytest.fixture(scope="module", params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Kernels:
    return kernels_named(request.param)
