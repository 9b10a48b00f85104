"""Replicas: further engines for slices of gpu_batches whose attention is computed elsewhere (Lamina, section 3.3)."""
