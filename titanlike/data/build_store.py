"""Building token stores: text in, ids on disk, once for each (files, options, tokenizer).

    this process                     worker processes                 this process
    files → blocks of a few MB   →   records → texts → ids        →   tokens.bin, boundaries.bin   (in block order)

Results are taken in the order of the blocks, so the store is bit-equal for any number of workers, and only a few blocks
a worker are in flight, so memory is bounded whatever the corpus. A small corpus is tokenized in this process.

The workers are spawned, not forked: the trainer has threads. They import neither torch nor the trainer, as long as the
program's main module imports those inside functions.

A store is kept under a key of everything that decides its content, made in a folder of its own and renamed when whole.
Any number of ranks, jobs and machines may ask for the same store at once (`titanlike.data.once`).
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from titanlike.data.once import Claim, beside, build_once
from titanlike.data.progress import Progress
from titanlike.data.records import COUNTED, KEPT_PROBLEMS, Block, parse
from titanlike.data.sources import Source, open_source
from titanlike.data.store import VERSION, StoreWriter, TokenStore, id_dtype, is_store, open_store
from titanlike.data.tokenizers.base import Tokenizer
from titanlike.errors import DataError

if TYPE_CHECKING:
    from titanlike.config.sections.data import Data

logger = logging.getLogger("titanlike")

_SMALL_BYTES = 8 << 20  # of stored text that one process does while others would still be starting
_IN_FLIGHT = 3  # blocks for each worker


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What a worker needs to know."""

    tokenizer: Tokenizer
    text_column: str
    bad_lines: Literal["stop", "skip"]
    add_bos: bool
    add_eos: bool


@dataclass(kw_only=True)
class _Piece:
    """A tokenized block: ids one after the other, the length of each document, and what was left out."""

    tokens: np.ndarray
    lengths: np.ndarray
    counts: dict[str, int]
    problems: list[str]


def open_or_build(
    data: Data, tokenizer: Tokenizer, *, cache_folder: Path | None = None, check: Callable[[], None] = lambda: None
) -> TokenStore:
    """The token store that the `[data]` section means: one that `data.path` names, or one made of its text.

    Every rank calls this; one builds, the others wait. `check` is called meanwhile; what it raises ends the waiting.
    Raises DataError, the same on every rank.
    """
    ready = [path for path in data.path if is_store(path)]
    if ready and len(data.path) > 1:
        raise DataError(f"data.path: {ready[0]} is a token store, which can't be read together with other paths")
    if ready:
        return _open_ready(Path(ready[0]), data, tokenizer)
    cache = cache_folder or (Path(data.cache_folder).expanduser() if data.cache_folder else default_cache())
    source = open_source(data, cache_folder=cache)
    return build_store(
        source,
        tokenizer,
        cache,
        add_bos=data.add_bos,
        add_eos=data.add_eos,
        workers=data.tokenize_workers,
        check=check,
    )


def default_cache() -> Path:
    """titanlike's folder in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "titanlike"


def build_store(
    source: Source,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    add_bos: bool = True,
    add_eos: bool = True,
    workers: int = 0,
    check: Callable[[], None] = lambda: None,
) -> TokenStore:
    """The store of a source in the cache `folder`, built if it isn't there yet. `workers` = 0: one for each core.

    Raises DataError if the text can't be read, has a broken record, or holds no document; ConfigError if EOS is asked
    for and the tokenizer has none.
    """
    key = store_key(source, tokenizer, add_bos=add_bos, add_eos=add_eos)
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", source.name).strip("-.")[:40]
    target = folder / "stores" / f"{name}-{key}"
    make_store(target, key, source, tokenizer, add_bos=add_bos, add_eos=add_eos, workers=workers, check=check)
    return open_store(target)


def store_key(source: Source, tokenizer: Tokenizer, *, add_bos: bool, add_eos: bool) -> str:
    """Names everything that decides a store's content: files, options, tokenizer."""
    parts = [VERSION, source.key(), tokenizer.fingerprint, add_bos, add_eos]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def make_store(
    target: Path,
    key: str,
    source: Source,
    tokenizer: Tokenizer,
    *,
    add_bos: bool,
    add_eos: bool,
    workers: int,
    check: Callable[[], None],
) -> None:
    """Make the folder `target` a store of the source, unless it is one."""
    if add_eos:
        tokenizer.require_eos()
    if add_bos and tokenizer.bos_id is None:
        logger.info("data.add_bos: the tokenizer at %s has no BOS; documents begin without one", tokenizer.origin.file)
    work = _Work(
        tokenizer=tokenizer,
        text_column=source.text_column,
        bad_lines=source.bad_lines,
        add_bos=add_bos,
        add_eos=add_eos,
    )

    def build(claim: Claim) -> None:
        _build(target, key, source, work, workers or _worker_count(source), claim)

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        build_once(target, lambda: is_store(target), build, check=check)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(f"{target.parent}: no space left for the token store; see data.cache_folder") from None
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
            raise DataError(f"{target.parent}: can't be written to ({error.strerror}); see data.cache_folder") from None
        raise


def describe(report: dict[str, Any]) -> str:
    """A store's counts as one line for people."""
    line = f"{report['documents']:,} documents, {report['tokens']:,} tokens"
    line += f" ({report['tokens_per_document']:,} a document, the longest {report['longest_document']:,})"
    left_out = [f"{report[what]:,} {what}" for what in COUNTED if report.get(what)]
    if left_out:
        line += f"; left out: {', '.join(left_out)}"
    if report.get("unknown_tokens"):
        line += f"; {report['unknown_tokens']:,} tokens stand for characters that the tokenizer does not know"
    return "\n  ".join([line, *report.get("problems", [])])


def _open_ready(path: Path, data: Data, tokenizer: Tokenizer) -> TokenStore:
    """A store that the user made beforehand. Raises DataError if it was made by other rules than the config's."""
    store = open_store(path)
    made = store.manifest.get("tokenizer")
    if made and made["fingerprint"] != tokenizer.fingerprint:
        raise DataError(f"{path}: tokenized with {made['name']}, model.hf_assets_path is {tokenizer.name}")
    for option, value in (store.manifest.get("options") or {}).items():
        if getattr(data, option, value) != value:
            raise DataError(f"{path}: tokenized with {option} = {value}, data.{option} is {getattr(data, option)}")
    return store


def _build(target: Path, key: str, source: Source, work: _Work, workers: int, claim: Claim) -> None:
    _clear_leftovers(target)
    folder = beside(target, f".building-{claim.token}")
    folder.mkdir(parents=True)
    writer = StoreWriter(folder, work.tokenizer.vocab_size)
    try:
        report = _fill(writer, source, work, workers, claim)
        if not writer.documents:
            raise DataError(_nothing(source, report))
        about = {
            "key": key,
            "tokenizer": {"name": work.tokenizer.name, "fingerprint": work.tokenizer.fingerprint},
            "options": {"add_bos": work.add_bos, "add_eos": work.add_eos},
            "source": {"name": source.name, **source.key()},
        }
        writer.finish(report=report, about=about)
        _put(folder, target)
    except FileNotFoundError:
        if folder.exists():
            raise
        return  # taken over while this process slept: the caller goes on waiting for the other one's store
    finally:
        writer.abandon()
        shutil.rmtree(folder, ignore_errors=True)
    logger.info("token store %s: %s", target, describe(open_store(target).report))


def _fill(writer: StoreWriter, source: Source, work: _Work, workers: int, claim: Claim) -> dict[str, Any]:
    """Tokenize every block into the writer; returns the counts."""
    report: dict[str, Any] = {**dict.fromkeys(COUNTED, 0), "unknown_tokens": 0, "problems": []}
    with (
        Progress(f"tokenizing {source.name}", source.total_bytes) as progress,
        closing(_pieces(source, work, workers)) as pieces,
    ):
        for piece, read in pieces:
            claim.check()
            writer.add(piece.tokens, piece.lengths)
            for what, count in piece.counts.items():
                report[what] += count
            if work.tokenizer.unknown_id is not None:
                report["unknown_tokens"] += int(np.count_nonzero(piece.tokens == work.tokenizer.unknown_id))
            report["problems"] = [*report["problems"], *piece.problems][:KEPT_PROBLEMS]
            claim.progress = progress.update(read, writer.tokens)
    return report


def _pieces(source: Source, work: _Work, workers: int) -> Generator[tuple[_Piece, int], None, None]:
    """The tokenized blocks in order, each with the bytes read so far."""
    if workers == 1:
        yield from ((_tokenize(block, work), read) for block, read in source.blocks())
        return
    pool = ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(work,)
    )
    waiting: deque[tuple[Future[_Piece], int]] = deque()
    try:
        for block, read in source.blocks():
            waiting.append((pool.submit(_tokenize_here, block), read))
            if len(waiting) >= workers * _IN_FLIGHT:
                future, done = waiting.popleft()
                yield future.result(), done
        while waiting:
            future, done = waiting.popleft()
            yield future.result(), done
    except BrokenProcessPool:
        raise RuntimeError(
            "a tokenizing process died (out of memory?); data.tokenize_workers sets how many run"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_work: _Work  # of a worker process


def _start_worker(work: _Work) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to us too; the builder decides
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # it was killed: nobody will read our results, or tell us to stop


def _tokenize_here(block: Block) -> _Piece:
    return _tokenize(block, _work)


def _tokenize(block: Block, work: _Work) -> _Piece:
    parsed = parse(block, work.text_column, work.bad_lines)
    tokenizer = work.tokenizer
    before = [tokenizer.bos_id] if work.add_bos and tokenizer.bos_id is not None else []
    after = [tokenizer.require_eos()] if work.add_eos else []
    dtype = id_dtype(tokenizer.vocab_size)
    documents = []
    for ids in tokenizer.encode_batch(parsed.texts):
        if ids:
            documents.append(np.asarray([*before, *ids, *after], dtype))
        else:
            parsed.counts["blank"] += 1  # a text of which the tokenizer leaves nothing
    return _Piece(
        tokens=np.concatenate(documents) if documents else np.empty(0, dtype),
        lengths=np.asarray([len(document) for document in documents], np.int64),
        counts=parsed.counts,
        problems=parsed.problems,
    )


def _worker_count(source: Source) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if source.texts else max(1, min(cores, source.total_bytes // _SMALL_BYTES))


def _put(folder: Path, target: Path) -> None:
    """Rename a whole store into place. If another builder was faster, its store is the same."""
    if target.exists() and not is_store(target):
        shutil.rmtree(target)  # what is left of a store that was partly deleted
    try:
        os.rename(folder, target)
    except OSError:
        if not is_store(target):
            raise


def _clear_leftovers(target: Path) -> None:
    """Remove what dead builders left."""
    for folder in target.parent.glob(f"{glob.escape(target.name)}.building-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _nothing(source: Source, report: dict[str, Any]) -> str:
    counted = ", ".join(f"{report[what]} {what}" for what in COUNTED if report[what])
    where = f"{len(source.files)} file{'s' * (len(source.files) != 1)}" if source.files else "no records"
    why = "\n  ".join([f"{where}: {counted or 'no records at all'}", *report["problems"]])
    return f"{source.name}: not one document with text in it ({why})"
