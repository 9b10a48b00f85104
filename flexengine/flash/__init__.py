"""Sparse feed-forward blocks read from flash (LLM in a flash; PowerInfer): records, their memory, predictors."""
