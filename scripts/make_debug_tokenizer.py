"""Makes titanlike/assets/tokenizer from titanlike/assets/books.parquet: python scripts/make_debug_tokenizer.py

A byte-level BPE of exactly 1024 ids in the layout of Llama 3's (merges first, special tokens last), small enough for a
model that a laptop trains in two minutes. The same text gives the same file.
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as parquet
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

ASSETS = Path(__file__).resolve().parent.parent / "titanlike" / "assets"
VOCAB_SIZE = 1024
SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"]
# Words with the space before them, numbers of up to three digits, punctuation, white space: Llama 3's rule.
CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def main() -> None:
    texts = parquet.read_table(ASSETS / "books.parquet", columns=["text"])["text"].to_pylist()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CUT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    assert tokenizer.get_vocab_size(with_added_tokens=True) == VOCAB_SIZE

    folder = ASSETS / "tokenizer"
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    bos, eos, pad = SPECIAL
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos, "pad_token": pad}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
