"""Fleets of actors on a local Ray, whose processes are killed."""
