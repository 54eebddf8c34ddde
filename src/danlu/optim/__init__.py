"""Optimizers behind one interface, parameter groups, learning-rate schedules, clipping, moving averages."""
