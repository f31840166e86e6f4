"""From a config to the data of one rank: the token stores, the plan, the loader, the held-out sequences."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from titanlike.config import Config
from titanlike.data.build_store import open_or_build
from titanlike.data.loader import Loader, ValidationData
from titanlike.data.plan import Cut, Plan, Stage
from titanlike.data.store import TokenStore
from titanlike.data.tokenizers import Tokenizer
from titanlike.errors import ConfigError, DataError
from titanlike.models.spec import decoder_spec

logger = logging.getLogger("titanlike")


@dataclass(kw_only=True)
class TrainingData:
    """What one rank trains and validates on. `validation` is None where the config asks for none."""

    tokenizer: Tokenizer
    store: TokenStore
    plan: Plan
    loader: Loader
    validation: ValidationData | None

    def close(self) -> None:
        """End the loader's workers."""
        self.loader.close()


def build_data(
    config: Config,
    tokenizer: Tokenizer,
    *,
    rank: int,
    degree: int,
    global_batch: int | None = None,
    position: int = 0,
    check: Callable[[], None] = lambda: None,
) -> TrainingData:
    """The data of data-parallel rank `rank` of `degree`. Every rank calls it; token stores are made by one of them.

    `global_batch`: sequences a step, by default training.global_batch_size, or one microbatch a rank where that is -1.
    `check` is called now and then while a token store is being made; what it raises ends the waiting. Raises
    ConfigError (model too small for the tokenizer, keys that clash) and DataError (unreadable, too little).
    """
    tokenizer.check_rows(decoder_spec(config).vocab_size)
    _check_validation(config)
    if global_batch is None:
        written = config.training.global_batch_size
        global_batch = written if written > 0 else config.training.local_batch_size * degree
    store = open_or_build(config.data, tokenizer, check=check)
    plan = build_plan(config, store, global_batch)
    workers = config.training.dataloader
    rows = {"document_mask": config.data.document_mask, "pad_id": pad_id(tokenizer)}
    loader = Loader(
        plan,
        store,
        rank=rank,
        degree=degree,
        local_batch=config.training.local_batch_size,
        position=position,
        workers=workers.num_workers,
        prefetch=workers.prefetch_factor,
        pin_memory=workers.pin_memory,
        **rows,
    )
    validation = None
    if config.validation.enable:
        cut, held_store = _held_out(config, tokenizer, store, plan, check)
        validation = ValidationData(
            cut,
            held_store,
            rank=rank,
            degree=degree,
            local_batch=config.validation.local_batch_size,
            steps=config.validation.steps,
            **rows,
        )
    _tell(plan, validation)
    return TrainingData(tokenizer=tokenizer, store=store, plan=plan, loader=loader, validation=validation)


def build_plan(config: Config, store: TokenStore, global_batch: int) -> Plan:
    """The list of sequences that the config makes of a token store."""
    data = config.data
    return Plan(
        store,
        [Stage(seq_len=config.training.seq_len, global_batch=global_batch)],
        seed=config.debug.seed if data.seed is None else data.seed,
        shuffle=data.shuffle,
        epochs=data.epochs,
        validation_fraction=data.validation_fraction,
        long_documents=data.long_documents,
    )


def pad_id(tokenizer: Tokenizer) -> int:
    """What stands where there is no token. Any id would do: nothing attends to it and nothing is trained on it."""
    return next((id for id in (tokenizer.pad_id, tokenizer.eos_id) if id is not None), 0)


def _check_validation(config: Config) -> None:
    wanted = config.validation
    named = "validation.path" if wanted.path else "validation.dataset" if wanted.dataset else None
    fraction = config.data.validation_fraction
    if wanted.enable and named and fraction > 0:
        raise ConfigError(
            f"{named} and data.validation_fraction = {fraction} both say what to validate on; set one of them"
        )
    if wanted.enable and not named and fraction <= 0:
        raise ConfigError(
            "validation.enable = true, but there is nothing to validate on: set data.validation_fraction (to hold "
            "documents out), validation.path or validation.dataset"
        )


def _held_out(
    config: Config, tokenizer: Tokenizer, store: TokenStore, plan: Plan, check: Callable[[], None]
) -> tuple[Cut, TokenStore]:
    """The held-out rows in the store's order, and the store they come from."""
    wanted = config.validation
    options = {"long_documents": config.data.long_documents, "keep_tail": True}
    seq_len = wanted.seq_len or config.training.seq_len
    if not (wanted.path or wanted.dataset):
        if not len(plan.held_out):
            raise DataError(
                f"data.validation_fraction = {config.data.validation_fraction}: nothing can be held out of "
                f"{store.n_documents} document; give more documents, or set validation.path"
            )
        return Cut(store, seq_len, documents=plan.held_out, **options), store
    section = config.data.model_copy(update={"path": wanted.path, "dataset": wanted.dataset or config.data.dataset})
    try:
        other = open_or_build(section, tokenizer, check=check)
    except (DataError, ConfigError) as error:  # it speaks of the keys it was given
        text = str(error).replace("data.path", "validation.path").replace("data.dataset", "validation.dataset")
        raise type(error)(text) from None
    return Cut(other, seq_len, **options), other


def _tell(plan: Plan, validation: ValidationData | None) -> None:
    cut = plan.cut
    held = f"; {validation.cut.n_rows:,} sequences held out" if validation else ""
    logger.info(
        "data: %s sequences of %d tokens an epoch from %s documents%s",
        *(f"{plan.n_sequences_per_epoch:,}", plan.seq_len, f"{len(cut.documents):,}", held),
    )
    if cut.truncated_documents:
        logger.info(
            'data.long_documents = "truncate": %s documents cut, %s tokens dropped',
            *(f"{cut.truncated_documents:,}", f"{cut.truncated_tokens:,}"),
        )
    batch = plan.stages[0].global_batch
    if plan.n_sequences_per_epoch < batch:
        logger.warning(
            "data.path: %d sequences of training.seq_len = %d tokens are fewer than one step takes (%d): each step %s",
            *(plan.n_sequences_per_epoch, plan.seq_len, batch),
            "sees the data several times"
            if plan.epochs is None
            else "may see the data several times, or be a small one",
        )
