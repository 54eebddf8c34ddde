"""Checkpoints: what is on disk, how it is written, verified, pruned, and loaded at any layout."""
