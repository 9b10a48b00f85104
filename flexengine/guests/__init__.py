"""Guests: parts that a plain job does not use. Modules name them as "module:name", and import them on first use."""
