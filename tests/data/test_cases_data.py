"""What users of such tools met with their data, from files of text to batches, by case number.

Documents name themselves ("doc-017"), so what was consumed, and in which order, is read back from the token ids. How
the loader deals to ranks knows no process group: a rank is two numbers, so several ranks fit in one test process.
"""

import json
import re

import pytest
import torch

from titanlike.config import load_config
from titanlike.data.batch import IGNORE
from titanlike.data.build import build_data
from titanlike.data.tokenizers import load_tokenizer
from titanlike.errors import ConfigError, DataError

SEQ_LEN = 16


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("debug")


@pytest.fixture
def corpus(tmp_path, tokenizer):
    """Makes files of documents; gives a function of (overrides, ranks, workers) that gives each rank's data."""

    def write(texts, name="docs.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return path

    def ranks(path, *overrides, degree=1, batch=2, local=1, workers=0, seq_len=SEQ_LEN, state=None):
        keys = {
            "--data.path": path,
            "--data.cache_folder": tmp_path / "cache",
            "--training.seq_len": seq_len,
            "--training.local_batch_size": local,
            "--training.global_batch_size": batch,
            "--training.dataloader.num_workers": workers,
        }
        config = load_config([str(word) for pair in keys.items() for word in pair] + list(overrides))
        found = [build_data(config, tokenizer, rank=r, degree=degree) for r in range(degree)]
        for data in found:
            if state is not None:
                data.loader.load(json.loads(json.dumps(state)))
        return found

    ranks.write = write
    return ranks


def numbered(tokenizer, count):
    """Texts that fill one sequence each, BOS and EOS included, and begin with their number."""
    texts = []
    for number in range(count):
        text = f"doc-{number:03d}"
        while len(tokenizer.encode(text + " a", True, True)) <= SEQ_LEN:
            text += " a"
        assert len(tokenizer.encode(text, True, True)) == SEQ_LEN
        texts.append(text)
    return texts


def consumed(ranks, steps=None):
    """The document numbers of each step, in the order of ranks, microbatches and rows."""
    tokenizer, seen = ranks[0].tokenizer, []
    while steps is None or len(seen) < steps:
        parts = [data.loader.next_step() for data in ranks]
        if parts[0] is None:
            break
        rows = [row for part in parts for b in part.microbatches for row in b.tokens[b.sequences >= 0]]
        seen.append([int(re.search(r"doc-(\d+)", tokenizer.decode(row.tolist())).group(1)) for row in rows])
    for data in ranks:
        data.close()
    return seen


def flat(steps):
    return [number for step in steps for number in step]


def all_batches(data):
    while (step := data.loader.next_step()) is not None:
        yield from step.microbatches


@pytest.mark.parametrize("degree", [1, 2])
def test_c035_second_resume_goes_on_too(corpus, tokenizer, degree):
    path = corpus.write(numbered(tokenizer, 64))
    whole = consumed(corpus(path, degree=degree), 14)
    seen, state = [], None
    for stop in (5, 9, 14):
        ranks = corpus(path, degree=degree, state=state)
        seen += consumed(ranks, stop - len(seen))
        state = ranks[0].loader.state()
    assert seen == whole
    assert len(set(flat(whole))) == 28


def test_c037_checkpoint_at_the_end_of_an_epoch(corpus, tokenizer):
    path = corpus.write(numbered(tokenizer, 10))
    whole = consumed(corpus(path), 15)
    assert all(sorted(flat(whole[i : i + 5])) == list(range(10)) for i in (0, 5, 10))
    for stop in (5, 10):
        ranks = corpus(path)
        consumed(ranks, stop)
        state = ranks[0].loader.state()
        resumed = corpus(path, state=state)
        assert resumed[0].loader.state() == state
        assert consumed(resumed, 15 - stop) == whole[stop:]


def test_c040_two_ranks_with_three_workers_see_each_document_once(corpus, tokenizer):
    path = corpus.write(numbered(tokenizer, 100))
    keys = {"batch": 8, "local": 2, "degree": 2}
    seen = consumed(corpus(path, "--data.epochs", "1", workers=3, **keys))
    assert sorted(flat(seen)) == list(range(100))
    assert seen == consumed(corpus(path, "--data.epochs", "1", **keys))


def test_c041_c042_resume_on_any_number_of_ranks(corpus, tokenizer):
    path = corpus.write(numbered(tokenizer, 64))
    whole = consumed(corpus(path, degree=4, batch=12), 10)
    saved = corpus(path, degree=4, batch=12)
    seen = consumed(saved, 4)
    for degree, workers in ((4, 0), (2, 1), (3, 0), (1, 0)):
        ranks = corpus(path, degree=degree, batch=12, workers=workers, state=saved[3].loader.state())
        assert seen + consumed(ranks, 6) == whole
    steps = [data.loader.next_step() for data in saved]
    rows = [tuple(b.sequences.tolist()) for step in steps for b in step.microbatches]
    assert len(set(rows)) == len(rows)  # ranks differ


def test_c044_epochs_differ_and_depend_on_the_seed_alone(corpus, tokenizer):
    path = corpus.write(numbered(tokenizer, 30))

    def order(seed, **options):
        seen = flat(consumed(corpus(path, "--data.seed", seed, batch=6, **options), 15))
        return [seen[i : i + 30] for i in (0, 30, 60)]

    epochs = order("1")
    assert all(sorted(epoch) == list(range(30)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
    assert order("1") == order("1", workers=2) == order("1", degree=2, local=3) == epochs
    assert order("2") != epochs


def test_c045_validation_has_as_many_batches_on_each_rank(corpus, tokenizer):
    path = corpus.write(numbered(tokenizer, 8))
    held = corpus.write(["a " * n for n in (3, 90, 7, 1, 40)], "held.jsonl")
    keys = ("--validation.enable", "--validation.path", str(held), "--validation.local_batch_size", "2")
    counts = {}
    for degree in (1, 2):
        batches = [list(data.validation) for data in corpus(path, *keys, degree=degree)]
        assert len({len(b) for b in batches}) == 1
        targets = [b.labels[b.labels != IGNORE].tolist() for rank in batches for b in rank]
        counts[degree] = (sorted(flat(targets)), sum(b.token_count() for rank in batches for b in rank))
    assert counts[1] == counts[2]
    assert counts[1][1] - len(counts[1][0]) == 5  # one token a document has no label, and none is there twice


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_c047_broken_lines_have_a_place_and_a_count(corpus, tokenizer, tmp_path, policy):
    lines = [json.dumps({"text": text}).encode() for text in numbered(tokenizer, 40)]
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/shard-a.jsonl").write_bytes(b"\n".join(lines))
    lines[16] = lines[16] + lines[17]
    lines[19] = lines[19][:20]
    lines[24] = b'{"body": "no text"}'
    lines[29] = b'{"text": "\xff\xfe"}'
    (tmp_path / "shards/shard-b.jsonl").write_bytes(b"\n".join(lines))
    if policy == "stop":
        for _ in range(2):  # the rank that builds and the rank that waited
            with pytest.raises(DataError, match=r"shard-b\.jsonl.*17"):
                corpus(tmp_path / "shards")
    else:
        (data,) = corpus(tmp_path / "shards", "--data.bad_lines", "skip")
        assert data.store.report["broken"] == 4
        assert data.store.n_documents == 76


def test_c048_empty_documents_are_counted_and_nothing_else_happens(corpus, tmp_path):
    path = corpus.write(["", "one two three " * 5, " ", None, "four five six " * 5])
    (data,) = corpus(path, "--data.epochs", "1")
    report = data.store.report
    assert (report["documents"], report["empty"], report["blank"], report["null"]) == (2, 1, 1, 1)
    assert all(batch.token_count() > 0 and batch.trained_count() > 0 for batch in all_batches(data))
    with pytest.raises(DataError, match="empty"):
        corpus(corpus.write(["", "", ""], "nothing.jsonl"))


def test_c049_documents_much_longer_than_a_sequence(corpus, tokenizer):
    def of_length(n):
        unit = tokenizer.encode(" a", False, False)
        assert len(unit) == 1
        text = " a" * (n - 2)
        assert len(tokenizer.encode(text, True, True)) == n
        return text

    path = corpus.write([of_length(n) for n in (121, 600, 20, 30, 29)])
    split = ("--data.no-shuffle", "--data.epochs", "1")
    (data,) = corpus(path, *split, seq_len=60)
    batches = list(all_batches(data))
    tokens = torch.cat([batch.tokens.flatten() for batch in batches])
    used = len(tokens)
    assert used + data.plan.cut.dropped_tail == 800 and data.plan.cut.dropped_tail < 60
    assert tokens.tolist() == data.store.tokens(0, used).tolist()
    assert max(int(batch.positions.max()) for batch in batches) < 60
    (data,) = corpus(path, *split, "--data.long_documents", "truncate", seq_len=60)
    batches = list(all_batches(data))
    assert batches[0].tokens[0].tolist() == data.store.document(0)[:60].tolist()
    assert batches[1].tokens[0].tolist() == data.store.document(1)[:60].tolist()
    # A chunk is the 60 tokens that are read and the one that the last of them predicts.
    assert (data.plan.cut.truncated_documents, data.plan.cut.truncated_tokens) == (2, 121 - 61 + 600 - 61)


def test_c053_no_document_predicts_the_next(corpus, tokenizer):
    texts = ["alpha beta gamma", "one two three four", "x y z w v"]
    path = corpus.write(texts)
    ids = [tokenizer.encode(text, False, False) for text in texts]
    total = sum(map(len, ids))
    keys = ("--data.no-add_bos", "--data.no-add_eos", "--data.epochs", "1", "--data.no-shuffle")
    (data,) = corpus(path, *keys, seq_len=total, batch=1)
    (batch,) = all_batches(data)
    assert batch.tokens[0].tolist() == flat(ids)
    assert batch.labels[0].tolist() == [label for d in ids for label in (*d[1:], IGNORE)]
    assert batch.trained_count() == total - 3


def test_c064_microbatches_at_the_end_of_an_epoch_belong_to_a_step(corpus, tokenizer):
    path = corpus.write(numbered(tokenizer, 10))
    ranks = corpus(path, "--data.epochs", "2", batch=4)
    assert ranks[0].plan.steps() == 5
    seen = consumed(ranks)
    assert [len(step) for step in seen] == [4] * 5
    assert sorted(flat(seen)) == sorted([*range(10), *range(10)])


def test_c156_padding_is_not_counted(corpus):
    path = corpus.write(["a " * 40])
    held = corpus.write(["a " * 20, "b"], "held.jsonl")
    (data,) = corpus(path, "--validation.enable", "--validation.path", str(held), seq_len=32)
    (batch,) = data.validation
    assert batch.tokens.numel() == 8 * 32
    assert batch.token_count() == data.validation.cut.line_length < 32
    assert batch.trained_count() == batch.token_count() - 2


def test_c034_a_model_smaller_than_its_tokenizer(corpus, tokenizer):
    path = corpus.write(numbered(tokenizer, 4))
    rows = tokenizer.vocab_size - 1
    with pytest.raises(ConfigError, match=rf"vocab_size = {rows}.* {tokenizer.vocab_size}"):
        corpus(path, "--model.overrides.vocab_size", str(rows))
    assert corpus(path, "--model.overrides.vocab_size", str(rows + 64))
