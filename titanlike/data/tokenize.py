"""`titanlike tokenize IN... OUT`: make a token store beforehand, to be named in data.path."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from titanlike.data.build_store import describe, make_store, store_key
from titanlike.data.sources import Source, find_files
from titanlike.data.store import is_store, open_store
from titanlike.data.tokenizers import DEBUG, load_tokenizer
from titanlike.errors import DataError, TitanlikeError


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code; messages of the user's mistakes go to standard error."""
    options = _parser().parse_args(argv)
    try:
        print(_run(options))
    except TitanlikeError as error:
        print(f"titanlike tokenize: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="titanlike tokenize",
        description="Turn text into a token store: a folder that data.path can name, so that a run starts at once.",
    )
    add = parser.add_argument
    add("inputs", nargs="+", metavar="IN", help="files, folders or globs (.jsonl .json .txt .parquet, .gz .zst …)")
    add("output", metavar="OUT", help="folder of the store; must not exist")
    add("--tokenizer", default=DEBUG, metavar="DIR", help="as model.hf_assets_path (default: the one that ships)")
    add("--workers", type=int, default=0, metavar="N", help="processes (default: one for each core)")
    add("--format", default="auto", choices=["auto", "jsonl", "json", "text", "parquet"], help="as data.format")
    add("--text-column", default="text", metavar="NAME", help="as data.text_column")
    add("--bad-lines", default="stop", choices=["stop", "skip"], help="as data.bad_lines")
    add("--bos", default=True, action=argparse.BooleanOptionalAction, help="begin documents with BOS")
    add("--eos", default=True, action=argparse.BooleanOptionalAction, help="end documents with EOS")
    add("--bos-token", default=None, metavar="TEXT", help="as data.bos_token")
    add("--eos-token", default=None, metavar="TEXT", help="as data.eos_token")
    return parser


def _run(options: argparse.Namespace) -> str:
    tokenizer = load_tokenizer(options.tokenizer, bos_token=options.bos_token, eos_token=options.eos_token)
    source = Source(
        name=Path(options.inputs[0]).name,
        text_column=options.text_column,
        bad_lines=options.bad_lines,
        files=find_files(options.inputs, options.format),
    )
    output = Path(options.output)
    specials = {"add_bos": options.bos, "add_eos": options.eos}
    key = store_key(source, tokenizer, **specials)
    if is_store(output) and open_store(output).manifest.get("key") == key:
        return f"{output} is there already: {describe(open_store(output).report)}"
    if output.exists():
        raise DataError(f"{output}: exists, and is not the store of this text; remove it or name another folder")
    make_store(output, key, source, tokenizer, **specials, workers=max(options.workers, 0), check=lambda: None)
    return f"{output}: {describe(open_store(output).report)}"


if __name__ == "__main__":
    sys.exit(main())
