"""`titanlike generate PATH --prompt …`: text from a run's checkpoint or a model in the Hub's form."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from titanlike.errors import ConfigError, TitanlikeError
from titanlike.rollout import trained
from titanlike.rollout.sampling import Sampling, generate


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="titanlike generate", description=__doc__)
    trained.add_arguments(parser)
    parser.add_argument("--prompt", action="append", help="text to continue; may be given several times")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens to add at most (default 128)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample from the likeliest tokens of this share")
    parser.add_argument("--top-k", type=int, default=0, help="sample from this many likeliest tokens; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another text (default 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object a prompt")
    arguments = parser.parse_args(argv)
    if arguments.max_new_tokens < 1 or arguments.temperature < 0 or not 0 < arguments.top_p <= 1 or arguments.top_k < 0:
        parser.error(
            "--max-new-tokens must be at least 1, --temperature at least 0, --top-p in (0, 1], --top-k at least 0"
        )
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except TitanlikeError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _run(arguments: argparse.Namespace) -> int:
    model, tokenizer, config = trained.load_model(arguments.path, arguments.seq_len, arguments.imports)
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
    for text, prompt, answer in zip(texts, prompts, answers, strict=True):
        ended = bool(stop) and answer[-1] in stop
        # Decoded by itself, an answer would lose the space that it may begin with.
        whole = tokenizer.decode([*prompt, *(answer[:-1] if ended else answer)])
        words = whole[len(tokenizer.decode(prompt)) :]
        if arguments.json:
            print(json.dumps({"prompt": text, "text": words, "tokens": answer, "ended": ended}, ensure_ascii=False))
        else:
            print(f"{text}{words}")
    return 0
