"""Generators: pure functions that ask a model for rows, and make rows of what it says."""
