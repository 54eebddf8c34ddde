"""Mutations of models, adapters and exported folders."""

from __future__ import annotations

from mutation.table import Mutation

MUTATIONS: tuple[Mutation, ...] = ()
