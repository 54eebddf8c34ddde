"""Proof that a recipe's layout computes what one process does."""
