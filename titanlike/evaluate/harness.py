"""Tasks of EleutherAI's lm-evaluation-harness, with the model in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from titanlike.data.tokenizers import Tokenizer
from titanlike.errors import ConfigError
from titanlike.evaluate.perplexity import Window
from titanlike.evaluate.scoring import Passage, score
from titanlike.models.decoder import Decoder
from titanlike.rollout.sampling import Sampling, generate

_ANSWER_TOKENS = 256  # what the harness allows an answer of a task that doesn't say

try:
    from lm_eval.api.model import TemplateLM
except ImportError as error:
    raise ConfigError(
        f"--tasks needs lm-evaluation-harness, which can't be imported ({error}): pip install 'titanlike[eval]'"
    ) from error


def run_tasks(
    model: Decoder,
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    *,
    add_bos: bool,
    batch_tokens: int,
    few_shot: int | None,
    limit: int | None,
    include: str | None,
) -> dict[str, Any]:
    """Results by task as the harness gives them. Raises ConfigError for a task that it doesn't know."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include)
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        raise ConfigError(f"--tasks: the harness knows no {', '.join(unknown)} (lm-eval ls tasks lists what it knows)")
    found = simple_evaluate(
        HarnessModel(model, tokenizer, add_bos=add_bos, batch_tokens=batch_tokens),
        tasks=manager.match_tasks(list(tasks)),
        num_fewshot=few_shot,
        limit=limit,
        task_manager=manager,
        log_samples=False,
    )
    assert found is not None  # other ranks than the first would get nothing
    return dict(found["results"])


class HarnessModel(TemplateLM):
    """A decoder behind the harness's interface."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer, *, add_bos: bool, batch_tokens: int):
        super().__init__()
        self._model, self._tokenizer = model, tokenizer
        self._add_bos, self._batch_tokens = add_bos, batch_tokens

    @property
    def eot_token_id(self) -> int:
        if self._tokenizer.eos_id is None:
            raise ConfigError("the tokenizer has no end-of-text token, which the task needs")
        return self._tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        bos = self._tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return str(self._tokenizer.origin.file)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        add_bos = self._add_bos if add_special_tokens is None else add_special_tokens
        return self._tokenizer.encode(string, add_bos=add_bos, add_eos=False)

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        passages = [self._passage(context, answer) for _, context, answer in requests]
        order = sorted(range(len(passages)), key=lambda n: -len(passages[n].tokens))  # the largest batch comes first
        scores = score(self._model, [passages[n] for n in order], batch_tokens=self._batch_tokens, greedy=True)
        found = {n: (one.logprobs.sum().item(), one.greedy) for n, one in zip(order, scores, strict=True)}
        return [found[n] for n in range(len(passages))]

    def _passage(self, context: list[int], answer: list[int]) -> Passage:
        """What is too long loses its beginning, as in the harness's own models."""
        limit = self._model.seq_len + 1  # the last token is scored and not seen
        answer = answer[-(limit - 1) :]
        context = context[-(limit - len(answer)) :]
        return Passage(tokens=[*context, *answer], known=len(context))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        length = self._model.seq_len + 1
        window = Window(length=length, stride=length - 1)
        found = []
        for request in requests:
            tokens = [self.prefix_token_id, *self.tok_encode(request.args[0], add_special_tokens=False)]
            scores = score(self._model, [*window.passages(tokens)], batch_tokens=self._batch_tokens)
            found.append(sum(one.logprobs.sum().item() for one in scores))
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return [self._answer(*request.args) for request in requests]

    def _answer(self, prompt: str, settings: dict[str, Any]) -> str:
        stops = settings.get("until") or []
        stops = [stop for stop in ([stops] if isinstance(stops, str) else stops) if stop]
        sampling = Sampling(
            max_new_tokens=settings.get("max_gen_toks", _ANSWER_TOKENS),
            temperature=settings.get("temperature", 0.0) if settings.get("do_sample") else 0.0,
            top_p=settings.get("top_p", 1.0),
        )
        room = max(1, self._model.seq_len - sampling.max_new_tokens)
        tokens = self.tok_encode(prompt)[-room:]

        def text(answer: list[int]) -> str:
            return self._tokenizer.decode(answer)

        eos = self._tokenizer.eos_id
        answer = generate(
            self._model,
            [tokens or [self.prefix_token_id]],
            sampling,
            stop=frozenset() if eos is None else frozenset([eos]),
            ended=lambda _, so_far: any(stop in text(so_far) for stop in stops),
        )[0]
        found = text(answer[:-1] if answer[-1] == eos else answer)
        for stop in stops:
            found = found.split(stop)[0]
        return found
