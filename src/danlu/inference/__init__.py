"""Answers from a model: sampling, the cache of keys and values, stopping, and conversations.

This file imports nothing, so that a verb pays only for the modules it uses.
"""
