"""`titanlike checkpoint list | verify | export | import`."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanlike.checkpoint import folders, manifest
from titanlike.checkpoint.folders import StepFolder
from titanlike.errors import CheckpointError, ConfigError


def main(argv: Sequence[str]) -> int:
    """Run `titanlike checkpoint ARGV`; the exit code: 0, or 4 if a checkpoint that was looked at has problems."""
    arguments = _parser().parse_args(argv)
    return arguments.work(arguments)


def list_checkpoints(path: Path) -> list[StepFolder]:
    """The step folders of a run's folder or a folder of checkpoints (or the one step-N folder), the newest first."""
    folder, step = folders.locate(path)
    found = [one for one in folders.scan(folder) if step in (-1, one.step)]
    if not found:
        raise CheckpointError(f"{path}: there is no such checkpoint")
    return found


def verify(path: Path) -> list[str]:
    """Everything that is wrong with the checkpoint in `path`: names, sizes, checksums, and whether it can be opened.

    Reads every byte. Imports torch only if there is something whole to open.
    """
    return list(folders.inspect(path, checksums=True).problems) or _opening_problems(path)


def _opening_problems(path: Path) -> list[str]:
    from titanlike.checkpoint import loading, storage  # torch takes seconds to import

    problems = []
    try:
        loading.read_state(path)
        metadata = storage.read_metadata(path)
    except CheckpointError as error:
        return [str(error)]
    for name in metadata.state_dict_metadata:
        if storage.saved_shape(metadata, name) is None:
            problems.append(f"{path / storage.METADATA}: entry {name!r} is not a tensor")
        elif not storage.is_covered(metadata, name):
            problems.append(f"{path / storage.METADATA}: holds only parts of {name!r}")
    outside = {
        place.relative_path
        for place in metadata.storage_data.values()
        if not place.offset + place.length <= (path / place.relative_path).stat().st_size
    }
    return problems + [f"{path / name}: ends before the tensors that the index says are in it" for name in outside]


def _list(arguments: argparse.Namespace) -> int:
    found = list_checkpoints(arguments.path)
    if arguments.json:
        print(json.dumps([_described(one) for one in found], indent=1))
        return 0
    for one in found:
        if one.manifest is None or not one.complete:
            print(f"{one.path}  NOT COMPLETE: {'; '.join(one.problems)}")
            continue
        made = one.manifest.made
        counters = "  ".join(
            f"{key} {value:,}" for key, value in one.manifest.counters.items() if isinstance(value, int)
        )
        ranks = f"{made.get('world_size', '?')} ranks"
        print(f"{one.path}  {one.manifest.size / 2**20:,.1f} MiB  {made.get('time', '?')}  {ranks}  {counters}")
    return 0


def _described(one: StepFolder) -> dict[str, Any]:
    described: dict[str, Any] = {
        "step": one.step,
        "path": str(one.path),
        "complete": one.complete,
        "problems": list(one.problems),
    }
    if one.manifest is not None:
        described |= {
            "bytes": one.manifest.size,
            "topology": one.manifest.topology,
            "counters": one.manifest.counters,
            "made": one.manifest.made,
        }
    return described


def _verify(arguments: argparse.Namespace) -> int:
    path = arguments.path
    # A step folder may have been copied under any name.
    paths = [path] if (path / manifest.NAME).exists() else [one.path for one in list_checkpoints(path)]
    found = {str(one): verify(one) for one in paths}
    if arguments.json:
        print(json.dumps([{"path": one, "ok": not problems, "problems": problems} for one, problems in found.items()]))
    else:
        for one, problems in found.items():
            print(f"{one}: {'ok' if not problems else f'{len(problems)} problems'}")
            for problem in problems:
                print(f"  {problem}")
    return CheckpointError.exit_code if any(found.values()) else 0


def _export(arguments: argparse.Namespace) -> int:
    from titanlike.checkpoint import hub, loading

    folder, step = folders.locate(arguments.path)
    found = loading.find(folder, step, None)
    if found is None:
        raise CheckpointError(f"{arguments.path}: no complete checkpoint here; give a run's folder or a step-N folder")
    config = hub.checkpoint_config(found.path, arguments.imports)
    hub.export_checkpoint(
        found.path, arguments.out, config, dtype=_dtype(arguments.dtype), shard_bytes=arguments.max_shard_size
    )
    print(f"exported {found.path} to {arguments.out}")
    if arguments.push_to_hub:
        print(hub.push(arguments.out, arguments.push_to_hub, private=arguments.private))
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from titanlike.checkpoint import hub

    step = hub.import_model(arguments.model, arguments.out, revision=arguments.revision, dtype=_dtype(arguments.dtype))
    print(f"imported {arguments.model} to {step}; start from it with --checkpoint.initial_load_path={step}")
    return 0


def _dtype(name: str):
    import torch

    return getattr(torch, name)


def _size(text: str) -> int:
    """Bytes of "5GB", "200KB", "1GiB" or a plain number."""
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)(i?)B?", text, re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size, such as 5GB")
    return int(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " ")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigError(f"{self.prog}: {message}\n{self.format_usage().strip()}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="titanlike checkpoint", description="Look at the checkpoints of a run, or convert them.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="list | verify | export | import")
    for verb, work, text in (
        ("list", _list, "Show the checkpoints of a run, the newest first, and which are complete."),
        ("verify", _verify, "Read every byte of a checkpoint (or of all of a run) and compare with its manifest."),
    ):
        one = verbs.add_parser(verb, help=text, description=text)
        one.add_argument("path", type=Path, help="a run's folder, its folder of checkpoints, or a step-N folder")
        one.add_argument("--json", action="store_true", help="print JSON")
        one.set_defaults(work=work)
    types = {"choices": ["float32", "bfloat16", "float16"], "default": "float32"}

    text = "Write a checkpoint's model as the Hub has it: safetensors, config.json, tokenizer files."
    one = verbs.add_parser("export", help=text, description=text)
    one.add_argument("path", type=Path, help="a run's folder (its newest checkpoint), or a step-N folder")
    one.add_argument("out", type=Path, help="the new folder")
    one.add_argument("--dtype", **types, help="type of the weights (default float32)")
    one.add_argument("--max-shard-size", type=_size, default="5GB", help="largest file (default 5GB)")
    one.add_argument("--push-to-hub", metavar="ORG/NAME", help="upload the folder to this repository, too")
    one.add_argument("--private", action="store_true", help="make that repository a private one if it is new")
    one.add_argument(
        "--import", action="append", default=[], dest="imports", metavar="MODULE", help="registers the model's family"
    )
    one.set_defaults(work=_export)

    text = "Write a model in the Hub's form as a checkpoint, for checkpoint.initial_load_path."
    one = verbs.add_parser("import", help=text, description=text)
    one.add_argument("model", help="a model's folder, or its Hub id ORG/NAME")
    one.add_argument("out", type=Path, help="the folder in which step-0 is made")
    one.add_argument("--dtype", **types, help="type of the weights (default float32)")
    one.add_argument("--revision", help="branch, tag or commit of a Hub id")
    one.set_defaults(work=_import)
    return parser
