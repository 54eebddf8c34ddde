from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import chat_tokenizers
from builders.chat_templates import CHATML, LLAMA3, PHI3, RAISES
from builders.chat_tokenizers import KINDS, SPECIALS, Kind, make_tokenizer, pretrained, tokenizer_and_oracle
from builders.inline_workers import InlineWorkers
from hypothesis import given, settings
from hypothesis import strategies as st

from danlu.core.errors import DataError
from danlu.data import tokenizer_folder
from danlu.data.tokenizer import Encoded, Tokenizer, load_tokenizer
from danlu.data.tokenizer_export import ExportedTokenizer, exported_tokenizer
from danlu.data.tokenizer_folder import resolve_tokenizer_folder, template_date, today, tokenizer_fingerprint

# -- ids and places ----------------------------------------------------------------------------------------------------


def check_places(tokenizer: Tokenizer, oracle: Any, texts: list[str], encoded: Encoded) -> None:
    """Compare with transformers, one text at a time."""
    ids, places, base, sizes = [], [], 0, []
    for text in texts:
        one = oracle(text, add_special_tokens=False, return_offsets_mapping=True)
        widths = [len(character.encode()) if tokenizer.offsets_in_bytes else 1 for character in text]
        at = np.concatenate([[0], np.cumsum(widths, dtype=np.int64)])
        ids += one["input_ids"]
        places += [(base + at[start], base + at[stop]) for start, stop in one["offset_mapping"]]
        sizes.append(int(at[-1]))
        base += at[-1]
    assert encoded.ids.tolist() == ids
    assert encoded.sizes.tolist() == sizes
    assert encoded.counts.sum() == len(ids) and len(encoded.counts) == len(texts)
    found = list(zip(encoded.starts.tolist(), encoded.stops.tolist(), strict=True))
    if tokenizer.offsets_in_bytes:
        # A character of several tokens: transformers gives each of them the whole character, danlu its own bytes.
        assert len(found) == len(places)
        for (start, stop), (first, last) in zip(found, places, strict=True):
            assert first <= start <= stop <= last
        assert found == sorted(found)
    else:
        assert found == places


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(st.one_of(st.just(""), chat_tokenizers.odd_texts(), st.text(max_size=12)), min_size=1, max_size=4)
)
def test_ids_and_places_are_those_of_transformers(kind: Kind, texts: list[str]) -> None:
    tokenizer, oracle = tokenizer_and_oracle("chatml", kind)
    check_places(tokenizer, oracle, texts, tokenizer.encode_many(texts))
    assert [tokenizer.encode(text) for text in texts] == [
        oracle(text, add_special_tokens=False)["input_ids"] for text in texts
    ]


def test_the_check_of_places_catches_a_shift() -> None:
    tokenizer, oracle = tokenizer_and_oracle("chatml")
    encoded = tokenizer.encode_many(["hello there"])
    moved = Encoded(encoded.ids, encoded.starts + 1, encoded.stops + 1, encoded.counts, encoded.sizes)
    check_places(tokenizer, oracle, ["hello there"], encoded)
    with pytest.raises(AssertionError):
        check_places(tokenizer, oracle, ["hello there"], moved)


def test_kinds_that_write_bytes_are_counted_in_bytes() -> None:
    assert [tokenizer_and_oracle("chatml", kind)[0].offsets_in_bytes for kind in KINDS] == [True, True, False, False]


def test_bytes_of_a_character_are_told_apart() -> None:
    tokenizer, _ = tokenizer_and_oracle("chatml")
    encoded = tokenizer.encode_many(["é😀"])
    assert list(zip(encoded.starts.tolist(), encoded.stops.tolist(), strict=True)) == [(n, n + 1) for n in range(6)]


def test_a_text_that_is_normalised_has_its_places_in_what_was_written() -> None:
    tokenizer, _ = tokenizer_and_oracle("chatml", "byte-nfc")
    texts = ["hello", "e\u0301 is é", "bye"]
    encoded = tokenizer.encode_many(texts)
    assert tokenizer.decode(encoded.ids.tolist()) == "helloé is ébye"
    assert encoded.sizes.tolist() == [5, 9, 3]
    second = slice(encoded.counts[0], encoded.counts[:2].sum())
    assert encoded.starts[second].min() == 5 and encoded.stops[second].max() == 14


def test_marks_that_swallow_the_spaces_around_them(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path, CHATML)
    described = json.loads((folder / "tokenizer.json").read_text())
    for token in described["added_tokens"]:
        token["lstrip"] = token["rstrip"] = token["content"] == "<|end|>"
    (folder / "tokenizer.json").write_text(json.dumps(described))
    tokenizer, oracle = load_tokenizer(str(folder)), pretrained(folder)
    texts = ["hello there", "hello  <|end|>\n there", "Hi<|end|>"]
    check_places(tokenizer, oracle, texts, tokenizer.encode_many(texts))


def test_characters_that_the_vocabulary_lacks(shared_data: Path) -> None:
    folder = shared_data / "tokenizers/torchtitan-test"  # leaves out what it does not know
    tokenizer, oracle = load_tokenizer(str(folder)), pretrained(folder)
    texts = ["hello", "你好 hello", "there"]
    check_places(tokenizer, oracle, texts, tokenizer.encode_many(texts))


def test_no_texts_and_empty_texts() -> None:
    for kind in KINDS:
        tokenizer, _ = tokenizer_and_oracle("chatml", kind)
        assert tokenizer.encode_many([]).ids.tolist() == []
        assert tokenizer.encode_many(["", ""]).counts.tolist() == [0, 0]


@pytest.mark.parametrize("kind", KINDS)
@given(text=chat_tokenizers.plain_texts())
@settings(max_examples=25, deadline=None)
def test_decoding_gives_the_text_back(kind: Kind, text: str) -> None:
    tokenizer, _ = tokenizer_and_oracle("chatml", kind)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(f"<|im_start|>{text}")).removeprefix("<|im_start|>").strip() == text


# -- what it knows of itself -------------------------------------------------------------------------------------------


def test_special_tokens(tmp_path: Path) -> None:
    tokenizer, oracle = tokenizer_and_oracle("chatml")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (
        oracle.bos_token_id, oracle.eos_token_id, oracle.pad_token_id,
    )  # fmt: skip
    assert tokenizer.vocab_size == len(oracle) and not tokenizer.adds_bos
    bare = load_tokenizer(str(make_tokenizer(tmp_path, CHATML, **dict.fromkeys(SPECIALS))))
    assert (bare.bos_id, bare.eos_id, bare.pad_id) == (None, None, None)


def test_generation_stops_at_what_closes_a_turn_and_at_eos(tmp_path: Path) -> None:
    def stops(folder: Path) -> list[str]:
        tokenizer = load_tokenizer(str(folder))
        return [tokenizer.decode([token]) for token in tokenizer.end_of_turn_ids]

    assert stops(make_tokenizer(tmp_path / "chatml", CHATML)) == ["<|im_end|>", "</s>"]
    assert stops(make_tokenizer(tmp_path / "phi3", PHI3)) == ["<|end|>", "</s>"]
    assert stops(make_tokenizer(tmp_path / "no eos", LLAMA3, eos_token=None)) == ["<|eot_id|>"]
    for name, template in (("none", None), ("raises", RAISES), ("broken", "{% if %}")):
        assert stops(make_tokenizer(tmp_path / name, template)) == ["</s>"]


def test_a_template_for_tools_is_taken_for_tools(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path, CHATML)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("tools: {{ tools | tojson }}")
    tokenizer, oracle = load_tokenizer(str(folder)), pretrained(folder)
    turns, tools = [{"role": "user", "content": "Hi"}], [{"type": "function", "function": {"name": "look"}}]
    for given_tools in (None, tools):
        expected = oracle.apply_chat_template(turns, given_tools, tokenize=False)
        assert tokenizer.template(bool(given_tools)).render(turns, given_tools) == expected
    assert tokenizer.template(tools=True).render(turns, tools).startswith("tools: [")


# -- fingerprints ------------------------------------------------------------------------------------------------------


def test_a_fingerprint_changes_with_anything_that_changes_ids(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "one", CHATML)
    jinja = tmp_path / "own.jinja"
    jinja.write_text(PHI3)

    seen = [tokenizer_fingerprint(str(folder)), tokenizer_fingerprint(str(folder), str(jinja))]
    (folder / "chat_template.jinja").write_text(LLAMA3)
    seen.append(tokenizer_fingerprint(str(folder)))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "<|end|>"}))
    seen.append(tokenizer_fingerprint(str(folder)))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text(CHATML)
    seen.append(tokenizer_fingerprint(str(folder)))
    make_tokenizer(folder, CHATML, "metaspace")
    seen.append(tokenizer_fingerprint(str(folder)))
    assert len(set(seen)) == len(seen)


def test_a_fingerprint_does_not_depend_on_the_place_or_on_other_files(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "one", CHATML)
    before = tokenizer_fingerprint(str(folder))
    shutil.copytree(folder, tmp_path / "two")
    (tmp_path / "two/model.safetensors").write_bytes(b"weights")
    assert tokenizer_fingerprint(str(tmp_path / "two")) == before


def test_the_date_counts_where_the_template_writes_it_and_nowhere_else(tmp_path: Path) -> None:
    plain, dated = make_tokenizer(tmp_path / "plain", CHATML), tmp_path / "dated.jinja"
    dated.write_text("{{ strftime_now('%d') }}" + CHATML)
    assert template_date(str(plain), None, "2026-11-22") is None
    assert template_date(str(plain), str(dated), "2026-11-22") == "2026-11-22"
    assert template_date(str(plain), str(dated)) == today().isoformat()
    for name in ("tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        folder = make_tokenizer(tmp_path / name.replace("/", "-"), CHATML)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps({"chat_template": dated.read_text()}))
        assert template_date(str(folder), None, "2026-11-22") == "2026-11-22"
        assert template_date(str(folder), None, "2026-11-22") != template_date(str(folder), None, "2026-11-23")
    prints = {tokenizer_fingerprint(str(plain), str(dated), day) for day in (None, "2026-11-22", "2026-11-23")}
    assert len(prints) == 3
    texts = [load_tokenizer(str(plain), str(dated), day).template().render([]) for day in ("2026-11-22", "2026-11-23")]
    assert texts == ["22", "23"]


# -- beside another model's config -------------------------------------------------------------------------------------


def beside(folder: Path, place: Path, model_type: str) -> Path:
    """The tokenizer's files beside a model's config, as in a result."""
    shutil.copytree(folder, place)
    (place / "config.json").write_text(json.dumps({"model_type": model_type}))
    return place


@pytest.mark.slow
def test_a_result_s_tokenizer_is_read_as_the_one_trained_with(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers chooses the class by the model's type too: beside a Mistral it cannot read GPT-2's files."""
    monkeypatch.setattr(tokenizer_folder, "CONVERTED", str(tmp_path / "converted"))
    monkeypatch.setattr("danlu.data.tokenizer_export.WorkerPool", InlineWorkers)
    source = shared_data / "tokenizers/gpt2"
    trained = load_tokenizer(str(source))
    with pytest.raises(DataError, match="the tokenizer cannot be read"):
        load_tokenizer(str(beside(source, tmp_path / "before", "mistral")))
    found = exported_tokenizer(str(source), "mistral")
    assert found.faithful and found.folder != source
    theirs = pretrained(beside(found.folder, tmp_path / "after", "mistral"))
    text = "Hello  world, 1234\n<|endoftext|>é"
    assert theirs(text).input_ids == trained.encode(text) and theirs.eos_token_id == trained.eos_id
    assert exported_tokenizer(str(source), "mistral") == found, "written once"
    assert exported_tokenizer(str(source), "llama") == ExportedTokenizer(source)


def test_a_result_whose_tokenizer_would_be_read_as_another_is_known(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a Qwen2 transformers cuts text as Qwen2 does, whatever tokenizer.json says."""
    monkeypatch.setattr(tokenizer_folder, "CONVERTED", str(tmp_path / "converted"))
    monkeypatch.setattr("danlu.data.tokenizer_export.WorkerPool", InlineWorkers)
    source = shared_data / "tokenizers/minimind"
    assert exported_tokenizer(str(source), "qwen2") == ExportedTokenizer(source, faithful=False)
    own = beside(source, tmp_path / "own", "qwen2")
    assert not load_tokenizer(str(own)).is_same(load_tokenizer(str(source)))
    assert exported_tokenizer(str(own), "qwen2") == ExportedTokenizer(own), "it was trained with that one"
    assert (
        exported_tokenizer(str(source), "llama") == exported_tokenizer(str(source), None) == ExportedTokenizer(source)
    )


# -- finding and reading one -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [7, True, {"default": 7}, [{"name": "default", "template": 7}]])
def test_a_chat_template_that_is_no_text(template: Any, tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path, CHATML)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    said = (
        r"^/.*: the chat_template in tokenizer_config\.json is no text but (7|True)\. Correct it, or name a Jinja file"
    )
    with pytest.raises(DataError, match=said):
        load_tokenizer(str(folder))
    own = tmp_path / "own.jinja"
    own.write_text(CHATML)
    assert load_tokenizer(str(folder), str(own)).template().terminators == ("<|im_end|>",)


def test_a_finished_run_has_its_tokenizer_in_model(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "run/model", CHATML)
    assert resolve_tokenizer_folder(str(tmp_path / "run")) == tmp_path / "run/model"
    assert load_tokenizer(str(tmp_path / "run")).vocab_size == tokenizer_and_oracle("chatml")[0].vocab_size


def test_where_there_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        DataError, match=r"empty: no tokenizer in this folder \(one of tokenizer\.json.*model\.tokenizer"
    ):
        load_tokenizer(str(tmp_path / "empty"))
    with pytest.raises(DataError, match=r"missing: no such folder$"):
        load_tokenizer(str(tmp_path / "missing"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(
        DataError, match=r"tokenizer\.json: a tokenizer is a folder; name the folder that this file is in"
    ):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def test_a_hub_id_when_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    problem = (
        r"nobody/nothing-here: no such folder in .*, and no tokenizer from the hub either: LocalEntryNotFoundError"
    )
    with pytest.raises(DataError, match=problem):
        load_tokenizer("nobody/nothing-here")


def test_a_damaged_tokenizer(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path, CHATML)
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(
        DataError, match=rf"^{tmp_path}: the tokenizer cannot be read: tokenizer.json:1:27: broken JSON: \S"
    ):
        load_tokenizer(str(folder))


def test_a_tokenizer_with_code_of_its_own_is_not_run(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path, CHATML)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\nclass Mine: pass\n")
    with pytest.raises(DataError, match=rf"^{folder}: the tokenizer cannot be read: .*contains custom code"):
        load_tokenizer(str(folder))
    assert not (tmp_path / "was_run").exists()


def test_a_missing_template_file(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path, CHATML)
    for read in (load_tokenizer, tokenizer_fingerprint):
        with pytest.raises(DataError, match=r"^model\.chat_template: gone\.jinja cannot be read: .*No such file"):
            read(str(folder), "gone.jinja")


def test_a_broken_template_file_is_called_by_its_name(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "tokenizer", CHATML)
    (tmp_path / "own.jinja").write_text("{% if %}")
    tokenizer = load_tokenizer(str(folder), str(tmp_path / "own.jinja"))
    with pytest.raises(DataError, match=rf"^{tmp_path}/own\.jinja: the chat template does not compile: line 1"):
        tokenizer.template()
    broken = load_tokenizer(str(make_tokenizer(tmp_path / "broken", "{% if %}")))
    with pytest.raises(DataError, match=rf"^{tmp_path}/broken: the chat template does not compile"):
        broken.template()


# -- without the model's own config class ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "named", ["PreTrainedTokenizerFast", "LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer", None]
)
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "gemma2", "phi3", "unheard_of"])
@pytest.mark.parametrize("kind", ["byte", "prepend"])
def test_the_tokenizer_is_the_one_that_transformers_picks(
    tmp_path: Path, kind: Kind, model_type: str, named: str | None
) -> None:
    """Which class it takes hangs on both config files; danlu hands it the model's without its class."""
    folder = make_tokenizer(tmp_path / "words", CHATML, kind, tokenizer_class=named)
    values: dict[str, Any] = {"model_type": model_type, "hidden_size": 64}
    if model_type == "llama":  # as in Llama 3.1: only the class can read it
        rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        values["rope_scaling"] = {**rope, "original_max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    oracle, found = pretrained(folder), load_tokenizer(str(folder))._pretrained
    assert type(found) is type(oracle)
    assert found.backend_tokenizer.to_str() == oracle.backend_tokenizer.to_str()
    assert found.special_tokens_map == oracle.special_tokens_map and found.chat_template == oracle.chat_template
