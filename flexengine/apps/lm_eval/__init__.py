"""A model of lm-evaluation-harness that computes all requests of a type as one offline batch."""
