"""Mutations of rewards, programs and judges."""

from __future__ import annotations

from mutation.table import Mutation

MUTATIONS: tuple[Mutation, ...] = ()
