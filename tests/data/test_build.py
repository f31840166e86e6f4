"""From a config to the data of a rank."""

import json
import logging

import pytest

from titanlike.config import load_config
from titanlike.data.build import build_data
from titanlike.data.tokenizers import load_tokenizer
from titanlike.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("debug")


@pytest.fixture
def numbered(tmp_path):
    """JSONL of 64 documents that name themselves."""
    return write_jsonl(tmp_path / "numbered.jsonl", [f"doc-{n:03d} " + "word " * 20 for n in range(64)])


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def config_of(tmp_path, path, *overrides):
    keys = {
        "--data.path": str(path),
        "--data.cache_folder": str(tmp_path / "cache"),
        "--training.seq_len": "32",
        "--training.local_batch_size": "2",
    }
    return load_config([word for pair in keys.items() for word in pair] + list(overrides))


def test_the_data_of_a_rank(tmp_path, numbered, tokenizer):
    config = config_of(tmp_path, numbered, "--data.validation_fraction", "0.1", "--validation.enable")
    data = [build_data(config, tokenizer, rank=r, degree=2) for r in range(2)]
    steps = [d.loader.next_step() for d in data]
    assert steps[0].count == 4 and [len(s.microbatches) for s in steps] == [1, 1]
    assert [s.microbatches[0].sequences.tolist() for s in steps] == [[0, 1], [2, 3]]
    assert steps[0].microbatches[0].tokens.shape == (2, 32)
    held = sum(batch.token_count() for d in data for batch in d.validation)
    assert held + data[0].plan.cut.line_length == data[0].store.n_tokens
    assert len(data[0].validation) == len(data[1].validation)


def test_batch_and_seed_come_from_the_config(tmp_path, numbered, tokenizer):
    def plan(*overrides, **options):
        config = config_of(tmp_path, numbered, *overrides)
        return build_data(config, tokenizer, rank=0, degree=1, **options).plan

    assert plan("--training.global_batch_size", "6").stages[0].global_batch == 6
    assert plan().stages[0].global_batch == 2
    assert plan(global_batch=10).stages[0].global_batch == 10
    assert plan("--debug.seed", "5").fingerprint == plan("--data.seed", "5").fingerprint != plan().fingerprint
    assert plan("--data.epochs", "3").end == 3 * plan().n_sequences_per_epoch


def test_validation_on_files_of_its_own(tmp_path, numbered, tokenizer):
    other = write_jsonl(tmp_path / "other.jsonl", ["something else altogether"] * 5)
    config = config_of(
        tmp_path, numbered, "--validation.enable", "--validation.path", str(other), "--validation.seq_len", "8"
    )
    data = build_data(config, tokenizer, rank=0, degree=1)
    assert data.plan.cut.line_length == data.store.n_tokens  # nothing is held out
    batches = list(data.validation)
    assert batches[0].tokens.shape == (config.validation.local_batch_size, 8)
    text = tokenizer.encode("something else altogether", add_bos=True, add_eos=True)
    assert sum(batch.token_count() for batch in batches) == 5 * len(text)
    assert sum(batch.trained_count() for batch in batches) == 5 * (len(text) - 1)


def test_a_wrong_validation_path_is_named_by_its_key(tmp_path, numbered, tokenizer):
    config = config_of(tmp_path, numbered, "--validation.enable", "--validation.path", str(tmp_path / "gone.jsonl"))
    with pytest.raises(DataError, match=r"validation\.path"):
        build_data(config, tokenizer, rank=0, degree=1)


def test_two_answers_to_what_is_validated_on(tmp_path, numbered, tokenizer):
    both = ["--validation.enable", "--validation.path", str(numbered), "--data.validation_fraction", "0.1"]
    with pytest.raises(ConfigError, match=r"validation\.path and data\.validation_fraction = 0\.1"):
        build_data(config_of(tmp_path, numbered, *both), tokenizer, rank=0, degree=1)


def test_nothing_to_hold_out_is_refused(tmp_path, tokenizer):
    one = write_jsonl(tmp_path / "one.jsonl", ["word " * 200])
    config = config_of(tmp_path, one, "--validation.enable", "--data.validation_fraction", "0.5")
    with pytest.raises(DataError, match=r"data\.validation_fraction = 0\.5.*1 document.*validation\.path"):
        build_data(config, tokenizer, rank=0, degree=1)


def test_a_model_smaller_than_the_tokenizer_is_refused(tmp_path, numbered, tokenizer):
    rows = tokenizer.vocab_size - 1
    config = config_of(tmp_path, numbered, "--model.overrides.vocab_size", str(rows))
    with pytest.raises(ConfigError, match=rf"model\.overrides\.vocab_size = {rows}.*{tokenizer.vocab_size}"):
        build_data(config, tokenizer, rank=0, degree=1)
    build_data(
        config_of(tmp_path, numbered, "--model.overrides.vocab_size", str(rows + 100)), tokenizer, rank=0, degree=1
    )


def test_too_little_data_is_refused_and_a_little_is_warned_of(tmp_path, tokenizer, caplog):
    few = write_jsonl(tmp_path / "few.jsonl", ["one two three", "four five six"])
    with pytest.raises(DataError, match=r"data\.path: .* tokens in 2 training documents.*training\.seq_len = 32"):
        build_data(config_of(tmp_path, few), tokenizer, rank=0, degree=1)
    config = config_of(tmp_path, few, "--training.seq_len", "4", "--training.global_batch_size", "100")
    with caplog.at_level(logging.WARNING, logger="titanlike"):
        data = build_data(config, tokenizer, rank=0, degree=1)
    assert "fewer than one step takes (100)" in caplog.text
    assert data.loader.next_step().count == 100
