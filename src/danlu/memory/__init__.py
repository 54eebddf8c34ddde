"""Recomputation, offload and memory-mapped files: ways to save memory at the price of time."""
