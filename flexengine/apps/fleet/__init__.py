"""Fleets: a job of a file, run by engines or groups of stages on a Ray cluster.

The process of the command reads the input, owns the journal, and writes the output. It cuts the rows into shards, which
Ray Data gives to actors. Ray starts the actors, and repeats shards of actors and nodes that are lost.
"""
