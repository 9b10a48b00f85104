"""HELM with this engine (docs/helm.md).

`requests` converts requests of HELM to rows of a job, and rows of its output to results of HELM; `exchange` runs the
job, and reads and writes HELM's files. Neither imports HELM. `runner`, `client`, `plugin` and `imported` run in HELM.
"""
