"""Tests, in folders like the package's."""

import pytest

pytest.register_assert_rewrite("tests.helpers")  # their assertions tell values, too
