"""Folders and repositories: what a name means, and what is said where the Hub can't be asked."""

from __future__ import annotations

import pytest
from huggingface_hub import constants

from titanlike.config import assets, load_config
from titanlike.errors import ConfigError
from titanlike.models.spec import decoder_spec
from titanlike.train import load

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = """{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
"intermediate_size": 48, "vocab_size": 97, "max_position_embeddings": 64}"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache as the Hub's client keeps it, with one repository at one commit; no network."""
    repository = tmp_path / "models--someone--tiny"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(CONFIG)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return snapshot


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_a_repository_of_the_cache(cache, revision):
    assert assets.local_folder("someone/tiny", revision) == cache


def test_a_run_may_name_one(cache):
    config = load_config(["--model.hf_assets_path=someone/tiny", "--training.seq_len=32"])
    assert (decoder_spec(config).dim, decoder_spec(config).n_layers) == (32, 2)


@pytest.mark.parametrize(("name", "revision"), [("someone/other", None), ("someone/tiny", "v2")])
def test_what_is_not_there(cache, name, revision):
    with pytest.raises(ConfigError) as refused:
        assets.local_folder(name, revision)
    (text,) = refused.value.problems
    assert text.startswith(f"model.hf_assets_path = {name!r}: ")
    assert "can't be reached" in text and "hf download" in text


def test_it_is_a_config_error_before_anything_starts(cache, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[model]\nhf_assets_path = "someone/other"\n')
    with pytest.raises(ConfigError, match=r"run\.toml:2: model\.hf_assets_path = 'someone/other'"):
        load(["--job.config_file", str(file)])


def test_a_folder_comes_before_a_repository(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone" / "tiny").mkdir(parents=True)
    assert not assets.is_hub_id("someone/tiny")
    assert assets.local_folder("someone/tiny").samefile(tmp_path / "someone" / "tiny")


@pytest.mark.parametrize("name", ["debug", "./a/b", "/a/b", "a/b/c", "../a", "-x/y", "a/", ""])
def test_what_is_no_repository(name):
    assert not assets.is_hub_id(name)
