"""Processes that compute together: their group, frames between them, and heartbeats."""
