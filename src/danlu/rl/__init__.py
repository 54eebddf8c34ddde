"""Reinforcement learning from rollouts: episodes, experience, advantages, asynchronous rollouts."""
