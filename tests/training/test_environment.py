from __future__ import annotations

import copy
import json
from pathlib import Path

import torch

from danlu.training.environment import changes_that_matter, describe_environment, write_environment


def test_what_decides_the_numbers_is_in_the_file(tmp_path: Path) -> None:
    environment = describe_environment(torch.device("cpu"))
    write_environment(tmp_path / "environment.json", environment)
    read = json.loads((tmp_path / "environment.json").read_text())
    assert read == environment
    assert read["packages"]["torch"].startswith(torch.__version__.split("+")[0])
    assert read["cpu"]["threads"] == torch.get_num_threads()
    assert read["cpu"]["memory_bytes"] > 1 << 28
    assert read["device"]["kind"] == "cpu"
    assert [entry.name for entry in tmp_path.iterdir()] == ["environment.json"]


def test_only_changes_that_move_numbers_are_reported() -> None:
    before = describe_environment(torch.device("cpu"))
    now = copy.deepcopy(before) | {"time": "later", "python": "9.9"}
    assert changes_that_matter(before, now) == []
    now["packages"]["torch"] = "9.0"
    now["cpu"]["threads"] = before["cpu"]["threads"] + 1
    assert changes_that_matter(before, now) == [
        f"packages.torch: {before['packages']['torch']!r} before, '9.0' now",
        f"cpu.threads: {before['cpu']['threads']} before, {before['cpu']['threads'] + 1} now",
    ]
    assert changes_that_matter({}, before)  # a file of an older danlu lacks fields: that counts as a change
