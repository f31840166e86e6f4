"""`titanlike data preview | stats`: the data exactly as training sees it, for people and (`--json`) for programs.

Both make the token store and the plan of the config and read rows through the same functions as the loader, so what is
shown is what is trained on. Neither needs the model.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from titanlike.config import Config, load_config
from titanlike.data.batch import IGNORE
from titanlike.data.build import build_plan, pad_id
from titanlike.data.build_store import open_or_build
from titanlike.data.plan import Plan
from titanlike.data.rows import fill_rows
from titanlike.data.store import TokenStore
from titanlike.data.tokenizers import Tokenizer, load_tokenizer
from titanlike.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

USAGE = """\
titanlike data: the data as training sees it

  preview [CONFIG] [--step N] [--rows N] [--tokens N] [--section.key ...]
                                    rows of a step: ids, text, labels, positions, documents (default: step 1, 4 rows)
  stats [CONFIG] [--section.key ...]
                                    documents, tokens, lengths, sequences, passes, what is left out

--json prints for programs. Without CONFIG: the data that ships."""

_HISTOGRAM = [0, 16, 64, 256, 1024, 4096, 16384, 65536]


@dataclass(kw_only=True)
class _Opened:
    config: Config
    tokenizer: Tokenizer
    store: TokenStore
    plan: Plan


def main(argv: list[str]) -> int:
    """Run `titanlike data ...`; returns the exit code. Raises ConfigError and DataError for the user's mistakes."""
    commands = {"preview": preview, "stats": stats}
    if not argv or argv[0] in ("-h", "--help") or {"-h", "--help"} & set(argv[1:]):
        print(USAGE)
        return 0
    if argv[0] not in commands:
        raise ConfigError(f"titanlike data {argv[0]}: no such command (there are: {', '.join(commands)})")
    return commands[argv[0]](argv[1:])


def preview(argv: list[str]) -> int:
    """Print rows of one step of the run that `argv` (config, overrides, --step, --rows, --tokens, --json) describes."""
    options, rest = _options(argv, step=1, rows=4, tokens=12)
    opened = _open(rest)
    plan = opened.plan
    first = plan.position(options.step - 1)
    size = plan.step_size(first)
    if not size:
        raise ConfigError(
            f"--step {options.step}: the data ends after step {plan.steps()} (data.epochs = {plan.epochs})"
        )
    numbers = np.arange(first, first + min(size, options.rows))
    found = {
        "step": options.step,
        "global_batch": size,
        "epoch": plan.epoch(first),
        "rows": _rows(opened, numbers),
        "counts": _counts(opened),
    }
    if options.json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        _show_preview(found, opened, options.tokens)
    return 0


def stats(argv: list[str]) -> int:
    """Print the counts of the data that `argv` (config, overrides, --json) describes."""
    options, rest = _options(argv)
    opened = _open(rest)
    lengths = opened.store.lengths()
    edges = np.array([*_HISTOGRAM, np.iinfo(np.int64).max])
    training = opened.config.training
    plan, batch = opened.plan, opened.plan.stages[0].global_batch
    found = {
        **_counts(opened),
        "document_tokens": {
            **{"mean": float(lengths.mean()), "least": int(lengths.min()), "most": int(lengths.max())},
            **{f"percentile_{p}": int(np.percentile(lengths, p)) for p in (10, 50, 90, 99)},
        },
        "document_tokens_histogram": [
            {"from": int(low), "below": int(high) if high < edges[-1] else None, "documents": int(count)}
            for low, high, count in zip(edges, edges[1:], np.histogram(lengths, edges)[0], strict=False)
        ],
        "seq_len": plan.seq_len,
        "global_batch": batch,
        "sequences_per_epoch": plan.n_sequences_per_epoch,
        "steps_per_epoch": plan.n_sequences_per_epoch / batch,
        "steps": training.steps,
        "epochs_in_all_steps": plan.epoch(plan.position(training.steps)),
        "data_ends_after_step": plan.steps(),
        "fingerprint": plan.fingerprint,
    }
    if options.json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        _show_stats(found)
    return 0


def _options(argv: list[str], **numbers: int) -> tuple[argparse.Namespace, list[str]]:
    """Our own options, and the rest for the config."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--json", action="store_true")
    for name in numbers:
        parser.add_argument(f"--{name}")
    options, rest = parser.parse_known_args(argv)
    for name, default in numbers.items():
        text = getattr(options, name)
        if text is not None and not (text.isdecimal() and int(text) > 0):
            raise ConfigError(f"--{name} {text}: must be a whole number from 1 on")
        setattr(options, name, default if text is None else int(text))
    return options, rest


def _open(argv: list[str]) -> _Opened:
    config = load_config(argv)
    data = config.data
    tokenizer = load_tokenizer(
        config.model.hf_assets_path,
        revision=config.model.hf_revision,
        bos_token=data.bos_token,
        eos_token=data.eos_token,
    )
    store = open_or_build(data, tokenizer)
    written = config.training.global_batch_size
    plan = build_plan(config, store, written if written > 0 else config.training.local_batch_size)
    return _Opened(config=config, tokenizer=tokenizer, store=store, plan=plan)


def _rows(opened: _Opened, numbers: np.ndarray) -> list[dict[str, Any]]:
    """What `--json` says of each row. `text` is of all of it, `pieces` say which tokens of which document it holds."""
    plan, store, tokenizer = opened.plan, opened.store, opened.tokenizer
    pieces = plan.sequences(numbers)
    mask = opened.config.data.document_mask
    batch = fill_rows(store, pieces, numbers, plan.seq_len, document_mask=mask, pad_id=pad_id(tokenizer))
    offsets = pieces.starts - store.boundaries[pieces.documents]  # in the document
    rows = []
    for row, number in enumerate(numbers.tolist()):
        tokens, labels = batch.tokens[row].tolist(), batch.labels[row].tolist()
        mine = np.flatnonzero(pieces.rows == row)
        rows.append(
            {
                "sequence": number,
                "epoch": plan.epoch(number),
                "tokens": tokens,
                "labels": labels,
                "mask": [label != IGNORE for label in labels],
                "positions": batch.positions[row].tolist(),
                "documents": batch.documents[row].tolist(),
                "text": tokenizer.decode(tokens),
                "pieces": [
                    {
                        "document": int(pieces.documents[piece]),
                        "start": int(offsets[piece]),
                        "stop": int(offsets[piece] + pieces.lengths[piece]),
                    }
                    for piece in mine
                ],
            }
        )
    return rows


def _counts(opened: _Opened) -> dict[str, Any]:
    """How much there is, and all that is left out, with the reason."""
    plan, cut, report = opened.plan, opened.plan.cut, opened.store.report
    held_out = int(opened.store.lengths()[plan.held_out].sum())
    return {
        "documents": opened.store.n_documents,
        "tokens": opened.store.n_tokens,
        "held_out_documents": len(plan.held_out),
        "held_out_tokens": held_out,
        "truncated_documents": cut.truncated_documents,
        "truncated_tokens": cut.truncated_tokens,
        "dropped_tail_tokens": cut.dropped_tail,
        "source": report,
    }


def _show_preview(found: dict[str, Any], opened: _Opened, tokens: int) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    console.print(
        f"step {found['step']}: sequences {found['rows'][0]['sequence']} … of {found['global_batch']}, "
        f"epoch {found['epoch']:.3f}",
        style="bold",
    )
    console.print(Text("trained on", "green").append(" · not trained on", "dim").append(" · document", "bold magenta"))
    for row in found["rows"]:
        console.print()
        trained = sum(row["mask"])
        head = f"sequence {row['sequence']}: {len(row['tokens'])} tokens, {trained} of them with a label"
        console.print(head, style="bold", highlight=False)
        console.print(_coloured(row, opened.tokenizer), highlight=False)
        console.print(_table(row, opened.tokenizer, tokens))
    console.print()
    _show_counts(console, found["counts"])


def _coloured(row: dict[str, Any], tokenizer: Tokenizer):
    """The row's text: green where a token is a label, dim where it is only read; a mark where a document begins."""
    from rich.text import Text

    text, at = Text(), 0
    is_label = [False, *row["mask"][:-1]]
    for piece in row["pieces"]:
        stop = at + piece["stop"] - piece["start"]
        text.append(f"▏document {piece['document']}, tokens {piece['start']}…{piece['stop'] - 1}▕ ", "bold magenta")
        while at < stop:  # runs of tokens that are trained on, or not: a character may take several tokens
            end = next((i for i in range(at, stop) if is_label[i] != is_label[at]), stop)
            run = tokenizer.decode(row["tokens"][at:end])
            text.append(_visible(run), "green" if is_label[at] else "dim")
            at = end
        text.append("\n")
    return text


def _table(row: dict[str, Any], tokenizer: Tokenizer, count: int):
    """The first tokens of a row with all that the model is given."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title=None)
    for name in ("", "id", "text", "label", "position", "document"):
        table.add_column(name, justify="left" if name == "text" else "right", no_wrap=True)
    fields = (row["tokens"], row["labels"], row["positions"], row["documents"])
    for place, (token, label, position, document) in enumerate(zip(*fields, strict=True)):
        if place == count:
            table.add_row("…")
            break
        shown = "-" if label == IGNORE else str(label)
        table.add_row(str(place), str(token), repr(tokenizer.decode([token])), shown, str(position), str(document))
    return table


def _visible(text: str) -> str:
    return text.replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍")


def _show_stats(found: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    _show_counts(console, found)
    spread = found["document_tokens"]
    console.print("tokens a document: " + ", ".join(f"{k.replace('_', ' ')} {v:,.0f}" for k, v in spread.items()))
    most = max(entry["documents"] for entry in found["document_tokens_histogram"])
    for entry in found["document_tokens_histogram"]:
        name = f"{entry['from']:,} …" + (f" {entry['below'] - 1:,}" if entry["below"] else "")
        console.print(f"  {name:>16}  {entry['documents']:>12,}  {'█' * round(40 * entry['documents'] / most)}")
    console.print(
        f"sequences of {found['seq_len']:,} tokens an epoch: {found['sequences_per_epoch']:,} "
        f"({found['steps_per_epoch']:,.1f} steps of {found['global_batch']})"
    )
    ends = found["data_ends_after_step"]
    end = f"; the data ends after step {ends:,}" if ends is not None else ""
    console.print(f"training.steps = {found['steps']:,}: {found['epochs_in_all_steps']:.3f} epochs{end}")


def _show_counts(console: Console, counts: dict[str, Any]) -> None:
    console.print(f"{counts['documents']:,} documents, {counts['tokens']:,} tokens")
    left = {
        "held out for validation": ("held_out_documents", "held_out_tokens"),
        "cut, the rest dropped": ("truncated_documents", "truncated_tokens"),
    }
    for what, (documents, tokens) in left.items():
        if counts[documents]:
            console.print(f"  {counts[documents]:,} documents {what}: {counts[tokens]:,} tokens")
    if counts["dropped_tail_tokens"]:
        console.print(f"  {counts['dropped_tail_tokens']:,} tokens that fill no sequence, left out of each epoch")
    for what, count in counts["source"].items():
        if what not in ("documents", "tokens", "tokens_per_document", "longest_document", "problems") and count:
            console.print(f"  records left out, {what}: {count}")
    for problem in counts["source"].get("problems", []):
        console.print(f"  {problem}", highlight=False, markup=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
