"""Losses as pure functions of model outputs: likelihood, preferences, rewards, distillation, policy gradients."""
