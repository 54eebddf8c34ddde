"""Builders of models, tokenizers, folders and groups of processes, shared between the rooms of tests."""
