"""Proof that a recipe's layout computes the same as one process."""
