"""Mutations of rows, templates and tool calls."""

from __future__ import annotations

from mutation.table import Mutation

MUTATIONS: tuple[Mutation, ...] = ()
