"""A run from its recipe to its output folder: training, chains, automatic values, export, replay, previews."""
