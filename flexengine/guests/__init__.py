"""Guests: parts that a plain job does not use. The engine imports them on first use (`engine.guests`)."""
