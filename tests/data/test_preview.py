"""`titanlike data preview | stats`: what is shown is what is trained on."""

import json

import pytest

from titanlike.config import load_config
from titanlike.data.build import build_data
from titanlike.data.preview import main
from titanlike.data.tokenizers import load_tokenizer
from titanlike.errors import ConfigError


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "docs.jsonl"
    texts = [f"doc-{n:03d} " + "a line\nand more " * 5 for n in range(40)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, "", "long " * 100]))
    return [
        *("--data.path", str(path), "--data.cache_folder", str(tmp_path / "cache"), "--training.seq_len", "32"),
        *("--training.local_batch_size", "4", "--data.validation_fraction", "0.1"),
    ]


def shown(capsys, *argv):
    assert main(list(argv)) == 0
    return json.loads(capsys.readouterr().out)


def test_preview_shows_what_the_loader_gives(keys, capsys):
    found = shown(capsys, "preview", *keys, "--step", "3", "--rows", "2", "--json")
    tokenizer = load_tokenizer("debug")
    loader = build_data(load_config(keys), tokenizer, rank=0, degree=1).loader
    batch = [loader.next_step() for _ in range(3)][-1].microbatches[0]
    assert (found["step"], found["global_batch"], len(found["rows"])) == (3, 4, 2)
    for n, row in enumerate(found["rows"]):
        for field in ("tokens", "labels", "positions", "documents"):
            assert row[field] == getattr(batch, field)[n].tolist()
        assert row["mask"] == [label != -100 for label in row["labels"]]
        assert row["sequence"] == batch.sequences[n]
        assert row["text"] == tokenizer.decode(row["tokens"])
        assert sum(piece["stop"] - piece["start"] for piece in row["pieces"]) == 32


def test_preview_counts_what_is_left_out(keys, capsys):
    counts = shown(capsys, "preview", *keys, "--json", "--data.long_documents", "truncate")["counts"]
    assert counts["documents"] == 41 and counts["source"]["empty"] == 1
    assert counts["held_out_documents"] >= 1 and counts["held_out_tokens"] > 0
    assert counts["truncated_documents"] > 0 and counts["truncated_tokens"] > 0
    assert 0 <= counts["dropped_tail_tokens"] < 32


def test_preview_for_people(keys, capsys):
    assert main(["preview", *keys, "--rows", "1", "--tokens", "3"]) == 0
    text = capsys.readouterr().out
    for expected in ("step 1", "sequence 0: 32 tokens", "▏document", "⏎", "held out for validation", "empty: 1"):
        assert expected in text


def test_stats(keys, capsys):
    found = shown(capsys, "stats", *keys, "--json", "--data.epochs", "2", "--training.steps", "5")
    assert sum(entry["documents"] for entry in found["document_tokens_histogram"]) == found["documents"] == 41
    assert found["steps_per_epoch"] == found["sequences_per_epoch"] / 4
    assert found["epochs_in_all_steps"] == pytest.approx(20 / found["sequences_per_epoch"])
    assert found["data_ends_after_step"] == -(-2 * found["sequences_per_epoch"] // 4)
    assert main(["stats", *keys]) == 0
    assert "sequences of 32 tokens an epoch" in capsys.readouterr().out


def test_wrong_options_are_refused(keys, capsys):
    with pytest.raises(ConfigError, match="--rows 0: must be a whole number from 1 on"):
        main(["preview", *keys, "--rows", "0"])
    with pytest.raises(ConfigError, match=r"--step 99999999999: the data ends after step \d+"):
        main(["preview", *keys, "--step", "99999999999", "--data.epochs", "1"])
    with pytest.raises(ConfigError, match=r"titanlike data show: no such command \(there are: preview, stats\)"):
        main(["show"])
    assert main([]) == 0 and "preview" in capsys.readouterr().out
