"""Environments as the trainer sees them: made in processes of their own, asked turn by turn, limited in time."""
