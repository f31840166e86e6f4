"""`titanlike evaluate PATH --file FILE | --dataset NAME | --tasks NAMES`: how good a model is.

Perplexity on the documents of files, and tasks of lm-evaluation-harness (an extra: pip install 'titanlike[eval]').
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from titanlike.config.sections.data import Data
from titanlike.data.sources import open_source
from titanlike.errors import ConfigError, DataError
from titanlike.evaluate.perplexity import Perplexity, Window, perplexity
from titanlike.rollout import trained

_LONGEST = 2048  # tokens seen at once unless --seq-len says otherwise; more costs memory and helps little


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="titanlike evaluate", description=__doc__)
    trained.add_arguments(parser)
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens computed at once (default 8192)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    texts = parser.add_argument_group("perplexity")
    texts.add_argument("--file", action="append", help="JSONL, JSON, text or parquet, compressed or not, or a folder")
    texts.add_argument("--dataset", action="append", help="a data set by name, as data.dataset")
    texts.add_argument("--text-column", default="text", help="the records' field that holds the text (default text)")
    texts.add_argument("--documents", type=int, help="only so many documents")
    texts.add_argument("--stride", type=int, help="tokens that each further window of a document scores")
    texts.add_argument("--truncate", action="store_true", help="only the first --seq-len tokens of each document")
    tasks = parser.add_argument_group("lm-evaluation-harness")
    tasks.add_argument("--tasks", help="names of tasks, with commas between them")
    tasks.add_argument("--num-fewshot", type=int, help="examples shown first (default: the task's own)")
    tasks.add_argument("--limit", type=int, help="only so many questions a task")
    tasks.add_argument("--include-path", help="folder with task files of your own")
    arguments = parser.parse_args(argv)
    if not (arguments.file or arguments.dataset or arguments.tasks):
        parser.error("nothing to evaluate on: name texts by --file or --dataset, or tasks by --tasks")
    for name in ("seq_len", "batch_tokens", "documents", "stride", "limit"):
        value = getattr(arguments, name)
        if value is not None and value < (2 if name == "seq_len" else 1):
            parser.error(f"--{name.replace('_', '-')} must be at least {2 if name == 'seq_len' else 1}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(sys.argv[1:] if argv is None else argv)
    if arguments.tasks:
        from titanlike.evaluate import harness  # before the model is read: says if it isn't installed
    model, tokenizer, config = trained.load_model(arguments.path, arguments.seq_len, arguments.imports)
    add_bos = config.data.add_bos and tokenizer.bos_id is not None
    found: dict[str, Any] = {"path": str(arguments.path)}
    if arguments.file or arguments.dataset:
        window = _window(arguments, model.seq_len)
        result = perplexity(
            model,
            tokenizer,
            itertools.islice(_texts(arguments), arguments.documents),
            window,
            add_bos=add_bos,
            batch_tokens=arguments.batch_tokens,
        )
        found |= _as_json(result, window)
    if arguments.tasks:
        found["tasks"] = harness.run_tasks(
            model,
            tokenizer,
            arguments.tasks.split(","),
            add_bos=add_bos,
            batch_tokens=arguments.batch_tokens,
            few_shot=arguments.num_fewshot,
            limit=arguments.limit,
            include=arguments.include_path,
        )
    print(json.dumps(found, default=str) if arguments.json else "\n".join(_lines(found)))
    return 0


def _window(arguments: argparse.Namespace, seq_len: int) -> Window:
    length = arguments.seq_len or min(seq_len, _LONGEST)
    stride = arguments.stride or length - 1
    if stride >= length:
        raise ConfigError(f"--stride {stride}: must be less than the {length} tokens that are seen at once (--seq-len)")
    return Window(length=length, stride=stride, first_only=arguments.truncate)


def _texts(arguments: argparse.Namespace) -> Iterator[str]:
    column = arguments.text_column
    places = [Data(path=[place], text_column=column) for place in arguments.file or ()]
    places += [Data(dataset=name, text_column=column) for name in arguments.dataset or ()]
    try:
        for place in places:
            yield from (document.text for document in open_source(place).documents())
    except DataError as error:
        text = str(error).replace("data.path", "--file").replace("data.text_column", "--text-column")
        raise DataError(text) from None


def _as_json(result: Perplexity, window: Window) -> dict[str, Any]:
    return {
        "documents": result.documents,
        "tokens": result.tokens,
        "loss": result.loss,
        "perplexity": result.perplexity,
        "bits_per_byte": result.bits_per_byte,
        "seq_len": window.length,
        "stride": window.stride,
    }


def _lines(found: dict[str, Any]) -> Iterator[str]:
    if "loss" in found:
        counts = f"{found['documents']} documents, {found['tokens']:,} tokens scored"
        yield f"{counts}, at most {found['seq_len']} seen at once"
        yield (
            f"perplexity {found['perplexity']:.4f}  loss {found['loss']:.4f} nats a token  "
            f"{found['bits_per_byte']:.4f} bits a byte"
        )
    for task, metrics in found.get("tasks", {}).items():
        numbers = {name: value for name, value in metrics.items() if isinstance(value, float)}
        yield f"{task}: " + "  ".join(f"{name.split(',')[0]} {value:.4f}" for name, value in numbers.items())
