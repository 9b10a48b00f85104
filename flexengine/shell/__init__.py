"""What stands around the engine: commands, reports, explanations of plans, the doctor and the list of the cache."""
