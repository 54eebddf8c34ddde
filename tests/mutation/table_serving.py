"""Mutations of the server and the engine behind it."""

from __future__ import annotations

from mutation.table import Mutation

MUTATIONS: tuple[Mutation, ...] = ()
