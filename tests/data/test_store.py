"""The token store: reading, building with any number of workers, and many who ask for it at once."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from titanlike.config.sections.data import Data
from titanlike.data import build_store as building
from titanlike.data import once, readers, tokenize
from titanlike.data.build_store import open_or_build
from titanlike.data.once import Claim, build_once
from titanlike.data.registry import Texts, datasets
from titanlike.data.store import MANIFEST, TOKENS, is_store, open_store, write_store
from titanlike.data.tokenizers import load_tokenizer
from titanlike.errors import ConfigError, DataError

TOKENIZER = load_tokenizer("debug")


def write_corpus(folder: Path, texts: list, name="corpus.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return path


def open_corpus(path: Path, cache: Path, **data):
    return open_or_build(Data(path=[str(path)], **data), TOKENIZER, cache_folder=cache)


# Reading.


def test_write_and_read(tmp_path):
    documents = [np.arange(5), np.array([], int), np.array([7, 65535])]
    store = write_store(tmp_path, documents)
    assert (store.n_documents, store.n_tokens, store.dtype) == (3, 7, np.dtype("<u2"))
    assert store.boundaries.dtype == np.int64 and store.boundaries.tolist() == [0, 5, 5, 7]
    assert store.tokens(3, 6).tolist() == [3, 4, 7] and store.tokens(0, 7).dtype == store.dtype
    for number, document in enumerate(documents):
        assert store.document(number).tolist() == document.tolist()
    assert store.lengths().tolist() == [5, 0, 2]
    assert store.verify() == []
    with pytest.raises(ValueError, match="read-only"):
        store.tokens(0, 1)[0] = 1


def test_ids_beyond_16_bits_come_back(tmp_path):
    ids = np.array([0, 65_535, 65_536, 70_000, 2**31])
    store = write_store(tmp_path / "wide", [ids], vocab_size=2**31 + 1)
    assert store.dtype == np.dtype("<u4") and store.document(0).tolist() == ids.tolist()
    for bad in ([65_536], [-1]):
        with pytest.raises(ValueError, match="outside a vocabulary of 65536"):
            write_store(tmp_path / "narrow", [np.array(bad)])


def test_empty_store(tmp_path):
    store = write_store(tmp_path, [])
    assert store.n_tokens == 0 and store.tokens(0, 5).tolist() == [] and store.boundaries.tolist() == [0]


def test_fingerprint_is_of_the_content(tmp_path):
    def make(name, documents):
        return write_store(tmp_path / name, map(np.array, documents)).fingerprint

    assert make("a", [[1, 2], [3]]) == make("b", [[1, 2], [3]])
    assert len({make("a", [[1, 2], [3]]), make("c", [[1], [2, 3]]), make("d", [[1, 2], [4]])}) == 3


def test_travels_without_its_content(tmp_path):
    store = write_store(tmp_path, [np.arange(10_000)])
    packed = pickle.dumps(store)
    assert len(packed) < 500 and pickle.loads(packed).document(0)[9_999] == 9_999


def test_damage_is_found(tmp_path):
    store = write_store(tmp_path, [np.arange(100)])
    content = bytearray((tmp_path / TOKENS).read_bytes())
    content[50] ^= 1
    (tmp_path / TOKENS).write_bytes(content)
    assert len(store.verify()) == 1 and TOKENS in store.verify()[0]
    (tmp_path / TOKENS).write_bytes(content[:100])
    with pytest.raises(DataError, match=rf"{TOKENS}: 100 bytes where .* says 200"):
        open_store(tmp_path)
    (tmp_path / MANIFEST).unlink()
    assert not is_store(tmp_path)
    with pytest.raises(DataError, match="not a token store"):
        open_store(tmp_path)


# Building.


def test_documents_have_bos_and_eos(tmp_path):
    path = write_corpus(tmp_path, ["one", "two <|end_of_text|> words"])
    bos, eos = [TOKENIZER.bos_id], [TOKENIZER.eos_id]
    plain = TOKENIZER.encode_batch(["one", "two <|end_of_text|> words"])
    for add_bos in (False, True):
        for add_eos in (False, True):
            store = open_corpus(path, tmp_path, add_bos=add_bos, add_eos=add_eos)
            found = [store.document(n).tolist() for n in range(store.n_documents)]
            assert found == [bos * add_bos + ids + eos * add_eos for ids in plain]


def test_the_same_bytes_for_any_number_of_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "BLOCK_BYTES", 2000)
    texts = [f"document {n} " + "words and words " * (n % 7) for n in range(300)]
    texts[50], texts[60], texts[70] = "", None, "a long one " * 3000
    path = write_corpus(tmp_path, texts)
    stores = [open_corpus(path, tmp_path / str(workers), tokenize_workers=workers) for workers in (1, 3)]
    monkeypatch.setattr(readers, "BLOCK_BYTES", 1 << 20)
    stores.append(open_corpus(path, tmp_path / "0"))
    assert len({store.fingerprint for store in stores}) == 1 and stores[0].n_documents == 298
    assert all(store.report == stores[0].report for store in stores)
    for number, text in enumerate(text for text in texts if text):
        assert stores[1].document(number).tolist() == TOKENIZER.encode(text, True, True)


@pytest.mark.parametrize("workers", [1, 2])
def test_broken_line_stops_with_file_and_line(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(readers, "BLOCK_BYTES", 200)
    path = write_corpus(tmp_path, ["words"] * 100)
    lines = path.read_bytes().splitlines()
    lines[41], lines[42] = b'{"text": "cut', b"also bad"
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(DataError, match=r"corpus\.jsonl, line 42: no complete JSON value"):
        open_corpus(path, tmp_path, tokenize_workers=workers)
    assert not list((tmp_path / "stores").glob("*.building-*")) and not list((tmp_path / "stores").glob("*.lock"))
    store = open_corpus(path, tmp_path, bad_lines="skip")
    assert store.n_documents == 98 and store.report["broken"] == 2 and "line 42" in store.report["problems"][0]
    with pytest.raises(DataError, match="line 42"):  # the store of the lenient run doesn't serve the strict one
        open_corpus(path, tmp_path)


def test_report_counts_everything(tmp_path, caplog):
    caplog.set_level("INFO", "titanlike")
    store = open_corpus(write_corpus(tmp_path, ["one", "", " ", None, "two two"]), tmp_path)
    lengths = [len(TOKENIZER.encode(text, True, True)) for text in ("one", "two two")]
    expected = {"documents": 2, "tokens": sum(lengths), "longest_document": max(lengths)}
    expected |= {"empty": 1, "blank": 1, "null": 1, "broken": 0, "unknown_tokens": 0}
    assert expected.items() <= store.report.items()
    assert "2 documents" in caplog.text and "left out: 1 empty, 1 null, 1 blank" in caplog.text


def test_corpus_without_text_is_refused(tmp_path):
    for name, texts in (("none.jsonl", []), ("blank.jsonl", ["", " ", None])):
        with pytest.raises(DataError, match=rf"{name}: not one document with text in it"):
            open_corpus(write_corpus(tmp_path, texts, name), tmp_path)
    with pytest.raises(DataError, match=r"1 broken\n.*none\.json, record 1: no field 'text'"):
        (tmp_path / "none.json").write_text('[{"title": "x"}]')
        open_corpus(tmp_path / "none.json", tmp_path, bad_lines="skip")


def test_built_once_and_again_when_something_changes(tmp_path, monkeypatch):
    builds = []
    fill = building._fill
    monkeypatch.setattr(building, "_fill", lambda *rest: builds.append(1) or fill(*rest))
    path = write_corpus(tmp_path, ["one", "two"])
    first = open_corpus(path, tmp_path)
    assert open_corpus(path, tmp_path).folder == first.folder and len(builds) == 1
    open_corpus(path, tmp_path, add_bos=False)
    assert len(builds) == 2
    other = load_tokenizer("debug", eos_token="<|pad|>")
    open_or_build(Data(path=[str(path)]), other, cache_folder=tmp_path)
    assert len(builds) == 3
    write_corpus(tmp_path, ["one", "two", "three"])
    assert open_corpus(path, tmp_path).n_documents == 3 and len(builds) == 4


def test_texts_of_the_users_code(tmp_path):
    datasets.register("store_texts")(lambda data: Texts(read=lambda: (f"text {n}" for n in range(20)), version="1"))
    store = open_or_build(Data(dataset="store_texts", tokenize_workers=2), TOKENIZER, cache_folder=tmp_path)
    assert [TOKENIZER.decode(store.document(n), skip_special=True) for n in (0, 19)] == ["text 0", "text 19"]


def test_no_eos_is_refused_before_reading(tmp_path, monkeypatch):
    monkeypatch.setattr(TOKENIZER, "eos_id", None)
    with pytest.raises(ConfigError, match=r"data\.add_eos"):
        open_corpus(write_corpus(tmp_path, ["one"]), tmp_path)


def test_cache_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    path = write_corpus(tmp_path, ["one"])
    with pytest.raises(DataError, match=r"data\.cache_folder"):
        open_corpus(path, tmp_path / "file")


def test_builders_and_readers_need_no_torch():
    code = "import sys, titanlike.data.build_store, titanlike.data.tokenize; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# Beforehand: `titanlike tokenize`.


def test_tokenize_command(tmp_path, capsys):
    path = write_corpus(tmp_path, ["one", "two"])
    out = tmp_path / "store"
    assert tokenize.main([str(path), str(out), "--tokenizer", "debug", "--workers", "1"]) == 0
    assert "2 documents" in capsys.readouterr().out
    store = open_corpus(out, tmp_path)
    assert store.folder == out and store.document(1).tolist() == TOKENIZER.encode("two", True, True)
    assert sorted(entry.name for entry in out.iterdir()) == ["boundaries.bin", "manifest.json", "tokens.bin"]
    assert tokenize.main([str(path), str(out)]) == 0 and "there already" in capsys.readouterr().out
    write_corpus(tmp_path, ["one", "two", "three"])
    assert tokenize.main([str(path), str(out)]) == 3 and "remove it" in capsys.readouterr().err
    assert tokenize.main([str(tmp_path / "missing"), str(tmp_path / "new")]) == 3
    assert tokenize.main([str(path), str(tmp_path / "new"), "--tokenizer", "/missing"]) == 2
    assert not (tmp_path / "new").exists()


def test_ready_store_must_fit_the_config(tmp_path):
    out = tmp_path / "store"
    assert tokenize.main([str(write_corpus(tmp_path, ["one"])), str(out)]) == 0
    with pytest.raises(DataError, match=r"add_bos = True, data\.add_bos is False"):
        open_corpus(out, tmp_path, add_bos=False)
    with pytest.raises(DataError, match=r"tokenized with huggingface:debug, model\.hf_assets_path is"):
        open_or_build(Data(path=[str(out)]), load_tokenizer("debug", eos_token="<|pad|>"))
    with pytest.raises(DataError, match="is a token store, which can't be read together"):
        open_or_build(Data(path=[str(tmp_path), str(out)]), TOKENIZER)


# At once: ranks, jobs, machines.


def ask_together(target: Path, build, count=4, done=None) -> list:
    """What each of `count` threads got: None, or the exception."""

    def ask(_):
        try:
            build_once(target, done or target.exists, build)
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(ask, range(count)))


def test_one_builds_and_the_others_wait(tmp_path):
    target, built = tmp_path / "thing", []

    def build(claim: Claim) -> None:
        built.append(claim.token)
        time.sleep(0.3)
        target.mkdir()

    assert ask_together(target, build) == [None] * 4
    assert len(built) == 1 and sorted(entry.name for entry in tmp_path.iterdir()) == ["thing"]


@pytest.mark.parametrize("kind", [DataError, ConfigError, ZeroDivisionError])
def test_those_who_wait_get_the_builders_error(tmp_path, kind):
    target, built, looks = tmp_path / "thing", [], Counter()
    others_wait = threading.Event()

    def done() -> bool:
        looks[threading.get_ident()] += 1
        if sum(count >= 3 for count in looks.values()) == 3:  # by then they have seen whose lock it is
            others_wait.set()
        return target.exists()

    def build(claim: Claim) -> None:
        built.append(claim)
        others_wait.wait(20)
        raise kind("file x, line 3: bad")

    errors = ask_together(target, build, done=done)
    assert len(built) == 1
    expected = {kind} if kind is not ZeroDivisionError else {ZeroDivisionError, RuntimeError}
    assert {type(error) for error in errors} == expected
    assert all("file x, line 3: bad" in str(error) for error in errors)
    assert not (tmp_path / "thing.lock").exists()


def test_an_old_failure_is_not_raised_again(tmp_path):
    target = tmp_path / "thing"
    with pytest.raises(ZeroDivisionError):
        build_once(target, target.exists, lambda claim: 1 // 0)
    build_once(target, target.exists, lambda claim: target.mkdir())
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["thing"]


def test_a_builder_told_to_stop_is_no_failure(tmp_path):
    target = tmp_path / "thing"
    waiter = threading.Thread(target=build_once, args=(target, target.exists, lambda claim: target.mkdir()))

    def stop() -> None:
        raise InterruptedError

    def build(claim: Claim) -> None:
        waiter.start()
        time.sleep(0.3)
        claim.check()

    with pytest.raises(InterruptedError):
        build_once(target, target.exists, build, check=stop)
    waiter.join()
    assert target.exists()


def test_waiting_can_be_ended(tmp_path):
    target = tmp_path / "thing"
    claim = Claim(target, lambda: None)
    assert claim.take()

    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        build_once(target, target.exists, lambda claim: None, check=stop)
    claim.release()


def leave_lock(target: Path, **facts) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    lock = {"token": "gone", "machine": once._machine(), "pid": dead.pid, "beat": 3, "progress": "half"}
    target.with_name(target.name + ".lock").write_text(json.dumps({**lock, **facts}))


def test_a_dead_builder_is_taken_over(tmp_path, monkeypatch, caplog):
    target = tmp_path / "thing"
    leave_lock(target)
    begun = time.monotonic()
    build_once(target, target.exists, lambda claim: target.mkdir())
    assert time.monotonic() - begun < 5 and "stopped without a word" in caplog.text
    target.rmdir()
    leave_lock(target, machine="elsewhere:1", pid=os.getpid())
    monkeypatch.setattr(once, "STALE_SECONDS", 0.3)  # on another machine only its standing still can tell
    assert ask_together(target, lambda claim: target.mkdir()) == [None] * 4
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["thing"]


def test_a_living_builder_is_not_taken_over(tmp_path, monkeypatch):
    monkeypatch.setattr(once, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(once, "STALE_SECONDS", 0.4)
    target, built = tmp_path / "thing", []

    def build(claim: Claim) -> None:
        built.append(claim)
        time.sleep(1.2)
        target.mkdir()

    assert ask_together(target, build) == [None] * 4 and len(built) == 1


def test_a_builder_that_was_taken_over_goes_on_with_the_others_store(tmp_path, monkeypatch):
    path = write_corpus(tmp_path, ["one", "two"])
    fill = building._fill

    def sleepy(writer, *rest):
        monkeypatch.setattr(building, "_fill", fill)
        (lock,) = (tmp_path / "stores").glob("*.lock")
        lock.unlink()  # as one does who takes this builder for dead
        open_corpus(path, tmp_path)
        return fill(writer, *rest)

    monkeypatch.setattr(building, "_fill", sleepy)
    store = open_corpus(path, tmp_path)
    assert store.verify() == [] and [entry.name for entry in (tmp_path / "stores").iterdir()] == [store.folder.name]


def test_processes_that_ask_at_once(tmp_path):
    path = write_corpus(tmp_path, ["one two three"] * 2000)
    code = (
        "import sys; from pathlib import Path\n"
        "from titanlike.config.sections.data import Data\n"
        "from titanlike.data.build_store import open_or_build\n"
        "from titanlike.data.tokenizers import load_tokenizer\n"
        "from titanlike.errors import DataError\n"
        "data = Data(path=[sys.argv[1]])\n"
        "try: print(open_or_build(data, load_tokenizer('debug'), cache_folder=Path(sys.argv[2])).fingerprint)\n"
        "except DataError as error: print(error); sys.exit(3)\n"
    )

    def ask(path):
        command = [sys.executable, "-c", code, str(path), str(tmp_path)]
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
        return [(process.communicate()[0].strip(), process.returncode) for process in processes]

    good = ask(path)
    assert len(set(good)) == 1 and good[0][1] == 0
    with path.open("a") as file:
        file.write("not JSON\n")
    bad = ask(path)
    assert {code for _, code in bad} == {3} and all("line 2001" in message for message, _ in bad)
