"""`titanlike generate PATH --prompt …`: text from a run's checkpoint or a model in the Hub's form."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from titanlike import device as devices
from titanlike.checkpoint import folders, loading
from titanlike.config import Config, assets, load_config
from titanlike.config.imports import import_modules
from titanlike.config.layers import Layer
from titanlike.data.tokenizers import Tokenizer, load_tokenizer
from titanlike.errors import CheckpointError, ConfigError, TitanlikeError
from titanlike.models.decoder import Decoder
from titanlike.models.hub import config_json
from titanlike.models.hub.reading import hub_source
from titanlike.models.initial import materialise
from titanlike.models.spec import DecoderSpec, decoder_spec, folder_form
from titanlike.rollout.sampling import Sampling, generate

_LONGEST = 8192  # tokens; the table of rotary angles is made for so many, unless --seq-len says otherwise


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="titanlike generate", description=__doc__)
    parser.add_argument(
        "path",
        type=Path,
        help="a run's folder (its newest checkpoint), a step-N folder, a model's folder as on the Hub, or a Hub id",
    )
    parser.add_argument("--prompt", action="append", help="text to continue; may be given several times")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens to add at most (default 128)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample from the likeliest tokens of this share")
    parser.add_argument("--top-k", type=int, default=0, help="sample from this many likeliest tokens; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another text (default 0)")
    parser.add_argument("--seq-len", type=int, help="longest text in tokens (default: as trained)")
    parser.add_argument(
        "--import",
        action="append",
        default=[],
        dest="imports",
        metavar="MODULE",
        help="module that registers the run's model family; one that only the checkpoint names is not imported",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a prompt")
    arguments = parser.parse_args(argv)
    if arguments.max_new_tokens < 1 or arguments.temperature < 0 or not 0 < arguments.top_p <= 1 or arguments.top_k < 0:
        parser.error(
            "--max-new-tokens must be at least 1, --temperature at least 0, --top-p in (0, 1], --top-k at least 0"
        )
    return arguments


def _checkpoint(path: Path) -> Path:
    """The complete step-N folder that a path means. Raises CheckpointError if there is none."""
    folder, step = folders.locate(path)
    found = loading.find(folder, step, None)
    if found is None:
        raise CheckpointError(f"{path}: no complete checkpoint here; give a run's folder or a step-N folder")
    return found.path


def load_model(
    path: Path, seq_len: int | None = None, imports: Sequence[str] = ()
) -> tuple[Decoder, Tokenizer, Config]:
    """The model of a checkpoint on this machine's device, its tokenizer and the config that it was trained with.

    `imports` are the modules that may be imported first: those that the checkpoint names are a stranger's word.
    """
    if is_model_folder(path):
        return _hub_model(str(path), seq_len)
    step = _checkpoint(path)
    config = load_config(["--job.config_file", str(step / loading.CONFIG)], imports=False)
    spec = _spec(config, imports)
    tokenizer = _tokenizer(config)
    with torch.device("meta"):
        model = Decoder(spec, seq_len=seq_len or config.training.seq_len)
    materialise(model, devices.local_device(), None)
    loading.load(step, dict(model.named_parameters()), None)
    if bad := [name for name, p in model.named_parameters() if not p.isfinite().all()]:
        raise CheckpointError(
            f"{step}: {len(bad)} of the weights' tensors hold numbers that aren't finite, {bad[0]} first"
        )
    return model.eval(), tokenizer, config


def _tokenizer(config: Config) -> Tokenizer:
    model, data = config.model, config.data
    return load_tokenizer(
        model.hf_assets_path, revision=model.hf_revision, bos_token=data.bos_token, eos_token=data.eos_token
    )


def is_model_folder(path: Path) -> bool:
    """Whether a path is a model in the Hub's form: a folder with config.json, or a repository's ORG/NAME."""
    return (path / config_json.NAME).is_file() or assets.is_hub_id(str(path))


def _hub_model(place: str, seq_len: int | None) -> tuple[Decoder, Tokenizer, Config]:
    folder = assets.local_folder(place, weights=True, key="PATH")
    assets.say_what_is_never_run(folder)
    form, spec = folder_form(folder)
    config = Config.model_validate({"model": {"hf_assets_path": str(folder)}})
    tokenizer = _tokenizer(config)
    with torch.device("meta"):
        model = Decoder(spec, seq_len=seq_len or min(spec.max_seq_len, _LONGEST))
    source = hub_source(folder, form, spec, {name: p.shape for name, p in model.named_parameters()})
    materialise(model, devices.local_device(), source)
    return model.eval(), tokenizer, config


def _spec(config: Config, imports: Sequence[str]) -> DecoderSpec:
    if problems := import_modules(list(imports), Layer()):
        raise ConfigError(problems)
    try:
        return decoder_spec(config)
    except ConfigError as error:
        if left := [f"--import {name}" for name in config.job.imports if name not in imports]:
            raise ConfigError(
                [*error.problems, f"the run was trained with modules of its own: {' '.join(left)}"]
            ) from None
        raise


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except TitanlikeError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _run(arguments: argparse.Namespace) -> int:
    model, tokenizer, config = load_model(arguments.path, arguments.seq_len, arguments.imports)
    texts = arguments.prompt or [sys.stdin.read()]
    add_bos = config.data.add_bos and tokenizer.bos_id is not None
    prompts = [tokenizer.encode(text, add_bos=add_bos, add_eos=False) for text in texts]
    sampling = Sampling(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        seed=arguments.seed,
    )
    stop = frozenset() if tokenizer.eos_id is None else frozenset([tokenizer.eos_id])
    try:
        answers = generate(model, prompts, sampling, stop=stop)
    except ValueError as error:
        raise ConfigError(f"--prompt: {error}; --seq-len N lets it see more") from error
    for text, answer in zip(texts, answers, strict=True):
        ended = bool(stop) and answer[-1] in stop
        words = tokenizer.decode(answer[:-1] if ended else answer)
        if arguments.json:
            print(json.dumps({"prompt": text, "text": words, "tokens": answer, "ended": ended}, ensure_ascii=False))
        else:
            print(f"{text}{words}")
    return 0
