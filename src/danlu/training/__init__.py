"""The training engine: loop, step, evaluation, checkpoints, metrics, signals."""
