"""Measures this machine as the engine uses it, and keeps what it found: see `store.obtain`."""
