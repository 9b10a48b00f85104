"""HELM with this engine (docs/helm.md).

`requests` converts requests of HELM to rows of a job, `results` converts the rows of its output to results of HELM, and
`batch` runs the job. `exchange` reads and writes HELM's files; none of these modules imports HELM. `runner`, `client`,
`plugin` and `imported` run inside HELM.
"""
