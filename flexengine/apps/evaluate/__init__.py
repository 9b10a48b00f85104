"""Evaluation of models on local scenarios (docs/evaluate.md).

`scenario` reads a YAML file, `instances` makes prompts of its rows, and `evaluation` runs the prompts of all scenarios
as one job; `report` computes the metrics of its results, and writes the files.
"""
