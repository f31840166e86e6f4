"""The loader: the same list of sequences for any ranks, workers, batch sizes and restarts."""

import json
import logging
import multiprocessing
import os
import pickle
import signal
import time

import numpy as np
import pytest
import torch

from titanlike.data.batch import IGNORE
from titanlike.data.consumed import ConsumedLog
from titanlike.data.loader import Loader, ValidationData, deal
from titanlike.data.plan import Cut, Plan, Stage, hold_out
from titanlike.data.store import write_store
from titanlike.errors import ConfigError, DataError

SEQ_LEN = 4


def workers_alive() -> list:
    """This process's children, but for the ranks that serve other tests."""
    return [child for child in multiprocessing.active_children() if child.daemon]


@pytest.fixture
def store(tmp_path):
    """64 documents of one sequence each; every token of document d is d."""
    return write_store(tmp_path / "store", [np.full(SEQ_LEN, d) for d in range(64)], vocab_size=64)


def plan_of(store, batch=2, **options):
    return Plan(store, [Stage(seq_len=SEQ_LEN, global_batch=batch)], **{"seed": 3, **options})


def loader_of(store, batch=2, rank=0, degree=1, local_batch=1, workers=0, position=0, **options):
    return Loader(
        plan_of(store, batch, **options),
        store,
        rank=rank,
        degree=degree,
        local_batch=local_batch,
        workers=workers,
        position=position,
    )


def consume(loaders, steps=None):
    """Run ranks in step; the documents of each step in the order of the list (read back from the tokens)."""
    seen = []
    while steps is None or len(seen) < steps:
        parts = [loader.next_step() for loader in loaders]
        if parts[0] is None:
            assert parts == [None] * len(parts)
            break
        assert len({(part.first, part.count, len(part.microbatches)) for part in parts}) == 1
        batches = [batch for part in parts for batch in part.microbatches]
        real = [batch.sequences >= 0 for batch in batches]
        numbers = torch.cat([batch.sequences[r] for batch, r in zip(batches, real, strict=True)])
        assert numbers.tolist() == list(range(parts[0].first, parts[0].first + parts[0].count))
        seen.append(torch.cat([batch.tokens[r, 0] for batch, r in zip(batches, real, strict=True)]).tolist())
    return seen


def flat(steps):
    return [document for step in steps for document in step]


def ranks(store, degree, **options):
    return [loader_of(store, rank=r, degree=degree, **options) for r in range(degree)]


def test_deal_is_even_and_pads_the_end():
    def dealt(first, count, degree, local_batch):
        return [deal(first, count, rank=r, degree=degree, local_batch=local_batch).tolist() for r in range(degree)]

    assert dealt(8, 8, 2, 2) == [[[8, 9], [10, 11]], [[12, 13], [14, 15]]]
    assert dealt(0, 8, 3, 2) == [[[0, 1], [-1, -1]], [[2, 3], [4, -1]], [[5, 6], [7, -1]]]
    assert dealt(0, 1, 2, 2) == [[[-1, -1]], [[0, -1]]]


@pytest.mark.parametrize(("degree", "local_batch"), [(1, 8), (1, 2), (2, 4), (4, 1), (8, 1)])
def test_ranks_and_accumulation_do_not_show(store, degree, local_batch):
    expected = consume([loader_of(store, batch=8)], steps=10)
    assert consume(ranks(store, degree, batch=8, local_batch=local_batch), steps=10) == expected


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_do_not_show(store, workers):
    """Two ranks, one epoch: each document once, in the order of a run without workers."""
    loaders = ranks(store, 2, batch=8, local_batch=2, workers=workers, epochs=1)
    seen = consume(loaders)
    assert seen == consume(ranks(store, 2, batch=8, local_batch=2, epochs=1))
    assert sorted(flat(seen)) == list(range(64))
    for loader in loaders:
        loader.close()
    assert not workers_alive()


def test_a_chain_of_resumes_equals_one_run(store):
    whole = consume([loader_of(store)], steps=14)
    seen, state = [], loader_of(store).state()
    for stop in (5, 9, 14):
        loader = loader_of(store)
        loader.load(json.loads(json.dumps(state)))
        seen += consume([loader], stop - len(seen))
        state = loader.state()
    assert seen == whole


def test_resume_at_every_position_across_epoch_ends(tmp_path):
    """10 samples, batch 2: also at steps 5 and 10, where an epoch ends."""
    store = write_store(tmp_path / "ten", [np.full(SEQ_LEN, d) for d in range(10)], vocab_size=64)
    whole = consume([loader_of(store)], steps=15)
    epochs = [flat(whole[i : i + 5]) for i in (0, 5, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs) and len(set(map(tuple, epochs))) == 3
    for cut in range(16):
        first = loader_of(store)
        assert consume([first], cut) == whole[:cut]
        second = loader_of(store)
        second.load(first.state())
        assert second.state() == first.state()  # load and save without a step: nothing moves
        third = loader_of(store)
        third.load(second.state())
        assert consume([third], 15 - cut) == whole[cut:]


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_resume_with_other_ranks(store, degree):
    whole = consume(ranks(store, 4, batch=8), steps=12)
    saved = ranks(store, 4, batch=8)
    seen = consume(saved, steps=5)
    assert len({json.dumps(loader.state()) for loader in saved}) == 1  # any rank's state is the state
    resumed = ranks(store, degree, batch=8, workers=degree % 2)
    for loader in resumed:
        loader.load(saved[-1].state())
    assert seen + consume(resumed, steps=7) == whole
    for loader in resumed:
        loader.close()


def test_resume_with_a_doubled_batch(store):
    whole = flat(consume([loader_of(store, batch=4)], steps=20))
    first = loader_of(store, batch=4)
    seen = flat(consume([first], steps=6))
    second = loader_of(store, batch=8)
    second.load(first.state())
    assert seen + flat(consume([second], steps=7)) == whole


def test_a_batch_that_does_not_divide_is_refused_at_a_fresh_start_only(store):
    loaders = ranks(store, 3, batch=8)
    for loader in loaders:
        with pytest.raises(ConfigError, match=r"global_batch_size = 8: must be a multiple of .*3 × 1 = 3"):
            loader.next_step()
    moved = [loader_of(store, batch=8, rank=r, degree=3, position=8) for r in range(3)]
    parts = [loader.next_step() for loader in moved]
    assert [len(part.microbatches) for part in parts] == [3, 3, 3]
    filler = parts[0].microbatches[2]
    assert filler.sequences.tolist() == [-1] and filler.token_count() == 0 and filler.trained_count() == 0
    assert filler.tokens.shape == (1, SEQ_LEN) and (filler.labels == IGNORE).all()


def test_data_ends_with_a_smaller_step_and_stays_ended(store):
    """64 sequences, 2 epochs, 24 a step: five full steps and one of 8."""
    loaders = ranks(store, 2, batch=24, local_batch=4, epochs=2)
    seen = consume(loaders)
    assert [len(step) for step in seen] == [24, 24, 24, 24, 24, 8]
    assert sorted(flat(seen)) == sorted([*range(64), *range(64)])
    assert loaders[0].next_step() is None and loaders[0].position == 128
    after = loader_of(store, batch=24, epochs=2)
    after.load(loaders[1].state())
    assert after.next_step() is None


def test_steps_go_across_epochs(tmp_path):
    """Ten microbatches an epoch, accumulation 4, two epochs: five steps in all, no microbatch without a step."""
    store = write_store(tmp_path / "ten", [np.full(SEQ_LEN, d) for d in range(10)], vocab_size=64)
    loader = loader_of(store, batch=4, epochs=2)
    assert loader.plan.steps() == 5
    assert [len(step) for step in consume([loader])] == [4] * 5


def test_fewer_sequences_than_a_batch_go_on_in_the_next_epoch(tmp_path):
    store = write_store(tmp_path / "three", [np.full(SEQ_LEN, d) for d in range(3)], vocab_size=64)
    (step,) = consume([loader_of(store, batch=8, local_batch=8)], steps=1)
    assert [sorted(step[i : i + 3]) for i in (0, 3)] == [[0, 1, 2]] * 2


def test_another_list_of_sequences_is_refused_by_name(store, tmp_path):
    state = loader_of(store).state()
    other = write_store(tmp_path / "other", [np.full(SEQ_LEN, 1)] * 64, vocab_size=64)
    for loader, says in (
        (loader_of(store, seed=4), "data.seed was 3, is 4"),
        (loader_of(store, long_documents="truncate"), "data.long_documents was 'split', is 'truncate'"),
        (loader_of(other), f"fingerprint of the data was '{store.fingerprint}', is '{other.fingerprint}'"),
    ):
        with pytest.raises(DataError, match=says):
            loader.load(state)
    changed = loader_of(other)
    changed.load({**state, "position": 6}, allow_changed=True)
    assert changed.position == 6
    for key in state:
        with pytest.raises(DataError, match=f"lacks {key}"):
            loader_of(store).load({k: v for k, v in state.items() if k != key})


def test_preparing_batches_leaves_the_generators_alone(store):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for workers in (0, 2):
        loader = loader_of(store, workers=workers)
        loader.next_step()
        loader.close()
    assert torch.equal(torch.get_rng_state(), before)


def test_what_workers_get_can_be_sent_to_them(store):
    """Where processes are spawned, not forked."""
    rows = loader_of(store)._rows
    again = pickle.loads(pickle.dumps(rows))
    numbers = np.array([5, 99, -1])
    assert torch.equal(again[numbers].tokens, rows[numbers].tokens)


class Broken:
    """A store that can't be read, as when a disk goes away."""

    fingerprint, n_documents, n_tokens = "broken", 8, 32
    boundaries = np.arange(0, 36, 4)

    def tokens(self, start, stop):
        raise DataError("store/tokens.bin: gone")


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_a_worker_is_the_same_error(workers):
    loader = loader_of(Broken(), workers=workers)
    with pytest.raises(DataError) as raised:
        loader.next_step()
    assert str(raised.value) == "store/tokens.bin: gone"
    loader.close()


def test_workers_leave_signals_to_the_parent(store):
    loader = loader_of(store, batch=4, workers=2)
    consume([loader], steps=1)
    workers = workers_alive()
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker.pid, signal.SIGTERM)
        os.kill(worker.pid, signal.SIGINT)
    consume([loader], steps=20)
    assert all(worker.is_alive() for worker in workers)
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 5 and not workers_alive()
    assert consume([loader], steps=1) == [consume([loader_of(store, batch=4)], steps=22)[-1]]  # can be used again
    loader.close()


def test_validation_takes_every_held_out_token_once_on_any_number_of_ranks(tmp_path):
    """Five documents of uneven length: rows of padding, equal numbers of microbatches."""
    lengths = [3, 17, 5, 1, 9]
    store = write_store(tmp_path / "uneven", np.split(np.arange(35), np.cumsum(lengths)[:-1]), vocab_size=64)
    for degree, local_batch in ((1, 1), (1, 4), (2, 2), (3, 1), (4, 8)):
        parts = [
            ValidationData(Cut(store, 4, keep_tail=True), store, rank=r, degree=degree, local_batch=local_batch)
            for r in range(degree)
        ]
        batches = [list(part) for part in parts]
        assert {len(b) for b in batches} == {len(parts[0])}
        tokens = [t for b in batches for batch in b for t in batch.tokens[batch.documents >= 0].tolist()]
        targets = [t for b in batches for batch in b for t in batch.labels[batch.labels != IGNORE].tolist()]
        assert sorted(tokens) == list(range(35)) and len(targets) == 35 - 5
        assert [b.sequences.tolist() for b in parts[0]] == [b.sequences.tolist() for b in parts[0]]  # again


def test_validation_can_be_limited(store):
    cut = Cut(store, SEQ_LEN, documents=hold_out(64, 0.5, 0)[1], keep_tail=True)
    parts = [ValidationData(cut, store, rank=r, degree=2, local_batch=3, steps=2) for r in range(2)]
    assert [len(list(part)) for part in parts] == [2, 2] == [len(part) for part in parts]
    assert sorted(n for part in parts for b in part for n in b.sequences.tolist()) == list(range(12))


def test_consumed_lines_appear_once_also_after_a_resume(store, tmp_path):
    plan = plan_of(store)
    log = ConsumedLog(tmp_path / "run", plan)
    for step in range(1, 6):
        log.write(step, 2 * (step - 1), 2)
    log.close()
    with open(log.path, "a") as file:
        file.write('{"step": 6, "seq')  # killed while writing
    log = ConsumedLog(tmp_path / "run", plan, resume_step=3)
    for step in range(4, 7):
        log.write(step, 2 * (step - 1), 2)
    log.close()
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [n for line in lines for n in line["sequences"]] == list(range(12))
    documents = [d for line in lines for sequence in line["documents"] for d in sequence]
    assert documents == flat(consume([loader_of(store)], steps=6))
    ConsumedLog(tmp_path / "run", plan).close()
    assert log.path.read_text() == ""  # a run from the start begins the file anew


def test_loading_says_nothing(store, caplog):
    with caplog.at_level(logging.DEBUG):
        consume([loader_of(store)], steps=2)
    assert not caplog.records
