"""Decoders, their families, and Hugging Face folders in and out.

What needs no torch (the plan and the command line read model configs without it): `config` (ModelConfig, parameter
shapes), `families` (FAMILIES, config.json both ways), `folder` (resolve_folder, read_config), `presets` (from_scratch),
`layout` and `tensor_file` (names and bytes on disk).
What computes: `decoder` (Decoder), `rope`, `ops`, `attend`, `initialize`, `loading` (load), `saving` (save).
This file imports nothing, so that the first group stays light.
"""
