"""Recomputation, offload and memory-mapped files: what saves memory at the price of time."""
