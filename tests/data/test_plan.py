"""The plan: every token where it belongs, every target once, one integer for a place."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlike.data.batch import IGNORE, document_offsets
from titanlike.data.plan import Cut, Plan, Stage, hold_out
from titanlike.data.rows import PADDING, fill_rows
from titanlike.errors import DataError


class FakeStore:
    """Documents of given lengths; the token at place i of the store is i, so that places can be read back."""

    fingerprint = "fake"

    def __init__(self, lengths):
        self.boundaries = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.n_documents = len(lengths)
        self.n_tokens = int(self.boundaries[-1])

    def tokens(self, start, stop):
        return np.arange(start, stop, dtype=np.uint32)


def make_plan(store, seq_len=8, batch=4, **options):
    return Plan(store, [Stage(seq_len=seq_len, global_batch=batch)], **{"seed": 1, **options})


def rows_of(cut, store, **options):
    numbers = np.arange(cut.n_rows)
    return fill_rows(store, cut.pieces(numbers), numbers, cut.seq_len, **options)


def targets_of(batch):
    return batch.labels[batch.labels != IGNORE].tolist()


lengths = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(lambda x: sum(x) > 0)


@settings(max_examples=60, deadline=None, database=None)
@given(lengths, st.integers(1, 17), st.one_of(st.none(), st.integers(0, 9)))
def test_every_token_once_and_every_target_once(lengths, seq_len, order):
    store = FakeStore(lengths)
    cut = Cut(store, seq_len, order=order, keep_tail=True)
    batch = rows_of(cut, store)
    real = batch.documents != PADDING
    assert sorted(batch.tokens[real].tolist()) == list(range(store.n_tokens))
    not_first = sorted(set(range(store.n_tokens)) - set(store.boundaries.tolist()))
    assert sorted(targets_of(batch)) == not_first
    trained = batch.labels != IGNORE
    assert torch.equal(batch.labels[trained], batch.tokens[trained] + 1)
    assert not trained[~real].any() and batch.token_count() == store.n_tokens


@settings(max_examples=60, deadline=None, database=None)
@given(lengths, st.integers(1, 17))
def test_positions_and_documents_begin_anew_with_each_document(lengths, seq_len):
    store = FakeStore(lengths)
    batch = rows_of(Cut(store, seq_len, order=3, keep_tail=True), store)
    assert batch.positions.max() < seq_len
    for tokens, positions, documents in zip(batch.tokens, batch.positions, batch.documents, strict=True):
        for number in documents.unique().tolist():
            chosen = documents == number
            if number != PADDING:
                assert positions[chosen].tolist() == list(range(int(chosen.sum())))
                belongs = np.searchsorted(store.boundaries, tokens[chosen].numpy(), side="right")
                assert len(set(belongs.tolist())) == 1
    assert (batch.documents.max(dim=1).values >= 0).all()


def test_a_row_by_hand():
    store = FakeStore([3, 1, 9])  # ids 0 1 2 | 3 | 4 … 12
    batch = rows_of(Cut(store, 6, keep_tail=True), store, pad_id=99)
    x = IGNORE
    assert batch.tokens.tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], [12, 99, 99, 99, 99, 99]]
    assert batch.labels.tolist() == [[1, 2, x, x, 5, 6], [7, 8, 9, 10, 11, 12], [x] * 6]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5], [0] * 6]
    assert batch.documents.tolist() == [[0, 0, 0, 1, 2, 2], [0] * 6, [0] + [PADDING] * 5]
    assert batch.offsets.tolist() == [0, 3, 4, 6, 12, 13, 18]
    assert (batch.tokens.dtype, batch.labels.dtype) == (torch.int64, torch.int64)
    assert (batch.positions.dtype, batch.documents.dtype, batch.offsets.dtype) == (torch.int32,) * 3


def test_without_document_mask_a_row_is_one_run_of_text():
    store = FakeStore([3, 1, 9])
    batch = rows_of(Cut(store, 6, keep_tail=True), store, document_mask=False)
    assert batch.labels.tolist()[:2] == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]]
    assert batch.positions.tolist() == [list(range(6)), list(range(6)), [0] * 6]
    assert batch.documents.tolist() == [[0] * 6, [0] * 6, [0] + [PADDING] * 5]
    permuted = Cut(store, 13, order=2)
    line = [i for d in permuted.documents for i in range(store.boundaries[d], store.boundaries[d + 1])]
    batch = rows_of(permuted, store, document_mask=False)
    assert batch.tokens[0].tolist() == line
    assert batch.labels[0].tolist() == [*line[1:], IGNORE]
    assert batch.offsets is None


def test_the_tail_is_left_out_of_training_and_counted():
    cut = Cut(FakeStore([10, 10]), 8)
    assert (cut.n_rows, cut.dropped_tail) == (2, 4)
    assert Cut(FakeStore([10, 10]), 8, keep_tail=True).dropped_tail == 0


def test_truncate_keeps_the_head_of_each_document_and_counts_the_rest():
    store = FakeStore([121, 600, 10, 50])
    cut = Cut(store, 60, long_documents="truncate", keep_tail=True)
    batch = rows_of(cut, store)
    assert batch.tokens[0].tolist() == list(range(60))
    assert batch.labels[0].tolist() == list(range(1, 61))  # one token more is still a target
    assert batch.tokens[1].tolist() == list(range(121, 181))
    assert (cut.truncated_documents, cut.truncated_tokens) == (2, 60 + 539)
    assert len(targets_of(batch)) == store.n_tokens - cut.truncated_tokens - store.n_documents


def test_filler_rows_hold_nothing():
    store = FakeStore([20])
    plan = make_plan(store, shuffle=False)
    numbers = np.array([1, -1, -1])
    batch = fill_rows(store, plan.sequences(numbers), numbers, 8, pad_id=5)
    assert batch.tokens[0].tolist() == list(range(8, 16))
    assert (batch.tokens[1:] == 5).all() and (batch.labels[1:] == IGNORE).all()
    assert (batch.documents[1:] == PADDING).all() and batch.sequences.tolist() == [1, -1, -1]
    assert (batch.token_count(), batch.trained_count()) == (8, 8)
    none = np.array([-1])
    assert fill_rows(store, plan.sequences(none), none, 8).token_count() == 0


def test_offsets_are_none_for_rows_of_one_document():
    store = FakeStore([8, 8])
    batch = rows_of(Cut(store, 8), store)
    assert batch.offsets is None and document_offsets(batch.documents) is None


def test_epochs_are_permutations_that_differ():
    plan = make_plan(FakeStore([7] * 300))
    size = plan.n_sequences_per_epoch
    epochs = [plan.rows(np.arange(e * size, (e + 1) * size)) for e in range(3)]
    for rows in epochs:
        assert np.array_equal(np.sort(rows), np.arange(size))
        assert not np.array_equal(rows, np.arange(size))
    assert len({tuple(rows) for rows in epochs}) == 3
    again = make_plan(FakeStore([7] * 300))
    assert np.array_equal(again.rows(np.arange(3 * size)), np.concatenate(epochs))
    other = make_plan(FakeStore([7] * 300), seed=2)
    assert not np.array_equal(other.rows(np.arange(size)), epochs[0])
    assert not np.array_equal(other.cut.documents, plan.cut.documents)
    assert plan.epoch(size // 2) == pytest.approx(0.5, abs=0.01)


def test_file_order_without_shuffle():
    plan = make_plan(FakeStore([8] * 5), shuffle=False)
    assert plan.rows(np.arange(12)).tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert plan.documents(3, 3) == [[3], [4], [0]]


def test_hold_out_is_by_hash_and_leaves_something_on_both_sides():
    training, held = hold_out(20_000, 0.1, seed=4)
    assert sorted([*training, *held]) == list(range(20_000))
    assert abs(len(held) - 2000) < 5 * np.sqrt(2000)
    more_training, more_held = hold_out(30_000, 0.1, seed=4)
    assert set(held) == {d for d in more_held if d < 20_000} and set(training) <= set(more_training)
    assert set(hold_out(20_000, 0.1, seed=5)[1]) != set(held)
    for fraction in (1e-12, 0.5, 1 - 1e-12):
        for seed in range(5):
            assert all(len(side) for side in hold_out(2, fraction, seed))
    assert hold_out(10, 0.0, 1)[0] is None and not len(hold_out(10, 0.0, 1)[1])
    assert hold_out(1, 0.5, 1)[0] is None


def test_held_out_documents_are_never_trained_on():
    store = FakeStore([9] * 200)
    plan = make_plan(store, validation_fraction=0.2)
    trained = {d for row in plan.documents(0, plan.n_sequences_per_epoch) for d in row}
    assert trained and len(plan.held_out) and not trained & set(plan.held_out.tolist())


def test_identity_names_what_changes_the_list_and_nothing_else():
    store = FakeStore([50, 60, 70])
    plan = make_plan(store)
    assert make_plan(store, batch=99, epochs=3).fingerprint == plan.fingerprint
    for options in ({"seed": 2}, {"seq_len": 9}, {"shuffle": False}, {"long_documents": "truncate"}):
        other = make_plan(store, **options)
        assert other.fingerprint != plan.fingerprint
        assert len(other.differences(plan.identity)) == 1 + ("shuffle" in options)
    assert make_plan(store, seq_len=9).differences(plan.identity) == ["training.seq_len was 8, is 9"]
    assert make_plan(store, shuffle=False).fingerprint == make_plan(store, shuffle=False, seed=7).fingerprint


def test_steps_take_what_is_left_at_the_end():
    plan = make_plan(FakeStore([8] * 10), batch=4, epochs=2)
    assert [plan.step_size(n) for n in (0, 16, 17, 20, 21)] == [4, 4, 3, 0, 0]
    assert (plan.steps(), plan.steps(8), plan.steps(20)) == (5, 3, 0)
    assert make_plan(FakeStore([8] * 10)).steps() is None
    assert make_plan(FakeStore([8] * 3), batch=100).step_size(5) == 100  # goes on in the next passes


def test_stages_change_the_global_batch():
    stages = [Stage(first=0, seq_len=8, global_batch=2), Stage(first=5, seq_len=8, global_batch=4)]
    plan = Plan(FakeStore([8] * 16), stages, seed=0, epochs=1)
    position, sizes = 0, []
    while size := plan.step_size(position):
        sizes.append(size)
        position += size
    assert sizes == [2, 2, 2, 4, 4, 2]
    assert plan.steps() == len(sizes)
    assert [plan.position(steps) for steps in range(6)] == [0, 2, 4, 6, 10, 14]


def test_too_little_data_is_refused_with_numbers_and_a_way_out():
    with pytest.raises(DataError, match=r"data\.path: 15 tokens in 3 .*training\.seq_len = 100 .*15 or less"):
        make_plan(FakeStore([5, 5, 5]), seq_len=100)


def test_a_million_documents_are_planned_quickly():
    store = FakeStore(np.random.default_rng(0).integers(1, 1000, 1_000_000))
    began = time.perf_counter()
    plan = make_plan(store, seq_len=2048, validation_fraction=0.01)
    first = plan.sequences(np.arange(8)).lengths.sum()
    assert first == 8 * 2048
    assert time.perf_counter() - began < 5  # 0.3 s on an idle core
    began = time.perf_counter()
    plan.sequences(np.arange(10**12, 10**12 + 8))  # far away costs no more
    assert time.perf_counter() - began < 0.5
