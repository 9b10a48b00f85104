"""Evaluation of models on local scenarios (docs/evaluate.md).

`scenario` reads a YAML file, `instances` makes prompts of its rows, `requests` packs the prompts of all scenarios into
one job, `measure` computes the metrics of the job's results, and `report` writes them.
"""
