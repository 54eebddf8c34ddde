"""Mutations of recipes, runs, checkpoints and recorders."""

from __future__ import annotations

from mutation.table import Mutation

MUTATIONS: tuple[Mutation, ...] = ()
