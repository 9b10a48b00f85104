"""Attention workers: processes that hold KV pages and compute decode attention over them (Lamina, arXiv 2405.01814).

A worker knows no model. It holds flat memory, and every question names the pages and the options of attention. So a
worker cannot hold a wrong model or a wrong part of one: only its version and its kernels must be those of the engine.

`messages` is the layout of messages, `server` is the worker's side, `client` the engine's side. A worker holds
pages on one of `devices`, and `answers` computes attention there.
"""
