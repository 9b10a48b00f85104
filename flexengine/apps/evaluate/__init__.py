"""Evaluation of models on local scenarios (docs/evaluate.md).

`scenario` reads a YAML file, `instances` makes prompts of its rows, and `evaluation` packs the prompts of all scenarios
into one job, which `runs` runs; `figures` computes the metrics of its results, and `report` writes the files.
"""
