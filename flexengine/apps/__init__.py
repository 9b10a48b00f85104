"""Applications of the engine: evaluation, data wrangling, and the model of lm-evaluation-harness."""
