"""Stages in several processes: orders of the driver, their execution, and plans that all stages can keep."""
