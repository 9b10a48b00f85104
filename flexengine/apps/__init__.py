"""Applications of the engine: evaluation, data wrangling, lm-evaluation-harness's model and HELM's runner."""
