"""Compares `recipe/keys_of_other_tools/` with the classes of arguments of the tools, which are read and never imported.

Run it with a folder in which packages lie unpacked, one folder each, as `pip download --no-deps` and `python -m zipfile
-e` leave them:

    python docs/scripts/keys_of_other_tools.py FOLDER

It prints the keys of each tool that lead nowhere.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from danlu.recipe.other_tools import of_tool

# For each tool the files with its arguments: a pattern below the folder, and the names of classes or functions in
# them; () for all classes.
SOURCES: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "transformers": (("transformers/training_args*.py", ("TrainingArguments", "Seq2SeqTrainingArguments")),),
    "trl": (
        ("trl/trainer/*_config.py", ()),
        ("trl/experimental/*/*_config.py", ()),
        ("trl/scripts/utils.py", ("ScriptArguments", "DatasetMixtureConfig")),
    ),
    "llama-factory": (
        ("llamafactory/hparams/*_args.py", ()),
        ("llamafactory/v1/config/*_args.py", ()),
    ),
    "axolotl": (
        ("axolotl/utils/schemas/*.py", ()),
        ("axolotl/integrations/*/args.py", ()),
    ),
    "unsloth": (
        ("unsloth_cli/config.py", ()),
        ("unsloth/models/loader.py", ("from_pretrained",)),
        ("unsloth/models/llama.py", ("get_peft_model",)),
        ("unsloth/trainer.py", ("UnslothTrainingArguments",)),
    ),
}
PREFIXES = {
    "TRLConfig": "trl",
    "VllmConfig": "vllm",
    "EBFTConfig": "ebft",
    "FSDPConfig": "fsdp_config",
    "QATConfig": "qat",
    "PTQConfig": "quantization",
    "DynamicCheckpointConfig": "dynamic_checkpoint",
    "FP8Config": "fp8_config",
    "GPUCapabilities": "capabilities",
    "EnvCapabilities": "env_capabilities",
    "SpecialTokensConfig": "special_tokens",
    "LoftQConfig": "peft",
    "PeftConfig": "peft",
    "LrGroup": "lr_groups",
    "SelectiveCheckpointingConfig": "selective_checkpointing",
    "DiffusionConfig": "diffusion",
    "MoraConfig": "mora",
    "HatcheryConfig": "hatchery",
    "CompressionArgs": "llmcompressor",
    "RoleBoundarySpec": "role_boundaries",
    "UserDefinedPrompterType": "datasets.type",
    "UserDefinedDPOType": "datasets.type",
    "UserDefinedKTOType": "datasets.type",
    "SFTDataset": "datasets",
    "DPODataset": "datasets",
    "KTODataset": "datasets",
    "StepwiseSupervisedDataset": "datasets",
    "SyntheticDataset": "datasets",
    "PretrainingDataset": "pretraining_dataset",
    "DatasetConfig": "datasets",
    "QGaloreConfig": "q_galore_config",
    "KDTrainingArgsMixin": "",
    "AxolotlConfigWCapabilities": "",
}
"""The key under which a class of arguments stands, where it is not at the top."""
LISTED_ELSEWHERE = ("self", "model", "args", "kwargs")


def keys(folder: Path, tool: str) -> set[str]:
    """The dotted keys of a tool, of all its versions' packages that lie below the folder."""
    if tool == "torchtune":
        files = folder.rglob("recipes/configs/**/*.yaml")
        return {key for file in files for key in _leaves(yaml.safe_load(file.read_text(encoding="utf-8")), "")}
    return {
        key
        for pattern, names in SOURCES[tool]
        for file in folder.rglob(pattern)
        for key in _arguments(ast.parse(file.read_text(encoding="utf-8")), names)
    }


def _arguments(tree: ast.Module, names: tuple[str, ...]) -> Iterator[str]:
    """The fields of classes, and the arguments of functions, with these names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and (not names or node.name in names):
            prefix = PREFIXES.get(node.name, "")
            for part in node.body:
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    name = part.target.id
                    if not name.startswith("_") and "ClassVar" not in ast.unparse(part.annotation):
                        yield f"{prefix}.{name}" if prefix else name
        elif isinstance(node, ast.FunctionDef) and node.name in names:
            arguments = [*node.args.args, *node.args.kwonlyargs]
            yield from (each.arg for each in arguments if each.arg not in LISTED_ELSEWHERE)


def _leaves(value: object, key: str) -> Iterator[str]:
    """The dotted keys of a configuration, without the indices of lists."""
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, dict):
            for name, below in each.items():
                inner = f"{key}.{name}" if key else str(name)
                yield inner
                yield from _leaves(below, inner)


def main(folder: Path) -> None:
    """Prints them for each tool."""
    for tool in (*SOURCES, "torchtune"):
        names = keys(folder, tool)
        nowhere = sorted(name for name in names if of_tool(tool, name) is None)
        sys.stdout.write(f"{tool}: {len(names)} keys, {len(nowhere)} lead nowhere: {' '.join(nowhere)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
