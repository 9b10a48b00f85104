"""Applications of the engine: evaluation, data wrangling, the model of lm-evaluation-harness, and the runner of HELM."""
