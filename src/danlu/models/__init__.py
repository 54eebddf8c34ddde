"""Decoders, their families, and Hugging Face folders in and out.

These modules need no torch (the plan and the command line read model configs without it): `config` (ModelConfig,
parameter shapes), `families` (FAMILIES), `hf_config` (config.json both ways), `hf_folder` (resolve_folder,
read_config, check_headers), `hf_layout` (names on disk), `presets` (from_scratch). These compute:
`decoder` (Decoder), `attention`, `modules` with the declarations of sublayers, `rope`, `ops`, `attend` with `segments`,
`block_attention` and `attention_kernels`, `initialize`, `loading` (load), `saving` (save), `lenet`. This
file imports nothing, so that the first group stays light.
"""
