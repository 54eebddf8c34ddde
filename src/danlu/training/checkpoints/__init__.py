"""Checkpoints: their files, and how they are written, verified, pruned, and loaded at any layout."""
