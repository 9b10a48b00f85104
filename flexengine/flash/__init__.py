"""Flash mode: of the feed-forward blocks, only the neurons that fire are read from the disk (LLM in a flash)."""
