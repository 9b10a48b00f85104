"""Measurement of this machine's rates, by the engine's own code, and a cache of the results: see `store.obtain`."""
