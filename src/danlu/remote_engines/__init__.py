"""Rollout engines that are servers: vLLM and SGLang over HTTP, and how they get the weights."""
