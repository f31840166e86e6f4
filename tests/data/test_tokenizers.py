"""Tokenizers of every kind: what text becomes, where BOS and EOS stand, what is special, what is refused."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from titanlike.data.tokenizers import Tokenizer, load_tokenizer
from titanlike.errors import ConfigError, DataError

ASSETS = Path(__file__).parent.parent / "assets" / "tokenizers"
SHIPPED = Path(load_tokenizer("debug").origin.file).parent

UNICODE = [
    "plain words, and numbers 12345",
    " space before and after ",
    "  two\n\n\tlines \r\n",
    "nul \0 inside",
    "emoji 😀 family 👩‍👩‍👧 flag 🇧🇷",
    "日本語の文章。中文 한국어",
    "combining e\u0301 n\u0303, composed é ñ",
    "right to left: שלום مرحبا \u202eabc\u202c",
    "\ufeff\u200b\u2028\U0010fffd",
]


@pytest.fixture(scope="module")
def trained_pieces(tmp_path_factory) -> Path:
    """A sentencepiece model that loses nothing and keeps chat tokens as user-defined pieces, as Gemma's does."""
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "text.txt").write_text("say hi to the user and say hi to the assistant\n" * 50, "utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<|im_start|>", "<|im_end|>"],
        minloglevel=2,
    )
    return folder


@pytest.fixture(scope="module")
def rules_that_interfere(tmp_path_factory) -> Path:
    """The shipped tokenizer.json with a post-processor that adds BOS and EOS, and with truncation and padding on."""
    folder = tmp_path_factory.mktemp("rules")
    backend = Backend.from_file(str(SHIPPED / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A <|end_of_text|>",
        special_tokens=[("<|begin_of_text|>", 1021), ("<|end_of_text|>", 1022)],
    )
    backend.enable_truncation(8)
    backend.enable_padding(length=16, pad_id=1023, pad_token="<|pad|>")
    backend.save(str(folder / "tokenizer.json"))
    shutil.copy(SHIPPED / "tokenizer_config.json", folder)
    return folder


KINDS = ["shipped", "interfering", "tiny_json", "tiktoken", "tiny_pieces", "trained_pieces"]


@pytest.fixture(params=KINDS)
def tokenizer(request, trained_pieces, rules_that_interfere) -> Tokenizer:
    paths = {
        "shipped": "debug",
        "interfering": rules_that_interfere,
        "tiny_json": ASSETS / "tiny_llama",
        "tiktoken": ASSETS / "llama3_tiktoken",
        "tiny_pieces": ASSETS / "tiny_llama" / "tokenizer.model",
        "trained_pieces": trained_pieces,
    }
    return load_tokenizer(str(paths[request.param]))


def test_any_text_comes_back(tokenizer):
    for text in UNICODE:
        ids = tokenizer.encode(text, False, False)
        assert tokenizer.decode(ids) == text
        assert all(0 <= id < tokenizer.vocab_size for id in ids)
        after = tokenizer.encode(text, False, False, continues=True)
        assert tokenizer.decode([*ids, tokenizer.eos_id, *after], skip_special=True) == text + text
    assert tokenizer.encode("", False, False) == []


def test_a_cut_character_does_not_raise(tokenizer):
    ids = tokenizer.encode("ab 😀 é 日本", False, False)
    for cut in range(len(ids)):
        assert isinstance(tokenizer.decode(ids[:cut]), str)
        assert isinstance(tokenizer.decode(ids[cut:]), str)


def test_ids_without_meaning_decode_to_the_replacement_character(tokenizer):
    ids = tokenizer.encode("ab", False, False)
    assert tokenizer.decode([*ids, tokenizer.vocab_size, -1, 10**9]) == "ab\ufffd\ufffd\ufffd"
    tokenizer.decode(list(range(tokenizer.vocab_size)))


def test_lone_surrogate_is_named(tokenizer):
    with pytest.raises(DataError, match=r"lone surrogate \(U\+D800 at character 3\)"):
        tokenizer.encode("ab \ud800", False, False)


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("add_eos", [False, True])
def test_bos_and_eos_once_where_asked(tokenizer, add_bos, add_eos):
    text = "say hi to the user, twelve words or more so that truncation would show"
    plain = tokenizer.encode_batch([text])[0]
    assert not tokenizer.special_ids & set(plain) and tokenizer.decode(plain) == text
    expected = [tokenizer.bos_id] * add_bos + plain + [tokenizer.eos_id] * add_eos
    assert tokenizer.encode(text, add_bos, add_eos) == expected


def test_spelling_of_a_special_token_stays_text(tokenizer):
    for special in tokenizer.special_tokens:
        for text in (f"a {special} b", special, f"{special}{special}x", f"é{special}\n"):
            ids = tokenizer.encode(text, False, False)
            assert ids and not tokenizer.special_ids & set(ids)
            assert tokenizer.decode(ids) == text
            assert tokenizer.decode([tokenizer.eos_id, *ids], skip_special=True) == text


def test_special_tokens_come_out_as_their_spelling(tokenizer):
    ids = tokenizer.encode("hi", True, True)
    spelling = {id: text for text, id in tokenizer.special_tokens.items()}
    assert tokenizer.decode(ids) == f"{spelling[tokenizer.bos_id]}hi{spelling[tokenizer.eos_id]}"
    assert tokenizer.decode(ids, skip_special=True) == "hi"


def test_travels_to_another_process_by_name(tokenizer):
    packed = pickle.dumps(tokenizer)
    again = pickle.loads(packed)
    assert len(packed) < 2000
    assert again.fingerprint == tokenizer.fingerprint and again.encode("hi", True, True) == tokenizer.encode(
        "hi", True, True
    )


def test_no_space_after_a_special_token(trained_pieces):
    tokenizer = load_tokenizer(str(trained_pieces))
    start, end = (tokenizer.special_tokens[text] for text in ("<|im_start|>", "<|im_end|>"))
    said = tokenizer.encode("user\nhi", False, False, continues=True)
    assert tokenizer.decode([start, *said, end]) == "<|im_start|>user\nhi<|im_end|>"
    model = sentencepiece.SentencePieceProcessor(model_file=str(trained_pieces / "tokenizer.model"))
    # The model matches its user-defined pieces in text and puts no space after them: that is how it was trained.
    assert said == model.encode("<|im_start|>user\nhi")[2:]
    assert model.id_to_piece(model.encode("<|im_start|>")) == ["▁", "<|im_start|>"]
    assert (
        tokenizer.encode("hi", False, False)
        == model.encode("hi")
        != tokenizer.encode("hi", False, False, continues=True)
    )


def test_tiny_llama_is_the_same_from_either_file():
    folder = ASSETS / "tiny_llama"
    json_form, model_form = load_tokenizer(str(folder)), load_tokenizer(str(folder / "tokenizer.model"))
    assert json_form.kind == "huggingface" and model_form.kind == "sentencepiece"
    for text in UNICODE:
        for continues in (False, True):
            ids = json_form.encode(text, True, True, continues=continues)
            assert ids == model_form.encode(text, True, True, continues=continues)


def test_llama3_special_tokens():
    tokenizer = load_tokenizer(str(ASSETS / "llama3_tiktoken"))
    names = ["begin_of_text", "end_of_text", "reserved_special_token_0", "reserved_special_token_1"]
    names += [
        "finetune_right_pad_id",
        "reserved_special_token_2",
        "start_header_id",
        "end_header_id",
        "eom_id",
        "eot_id",
    ]
    names += ["python_tag", "reserved_special_token_3"]
    assert [tokenizer.special_tokens[f"<|{name}|>"] for name in names] == list(range(2000, 2012))
    assert tokenizer.special_tokens["<|reserved_special_token_247|>"] == 2255
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (2256, 2000, 2001, 2004)


def test_endless_blanks_do_not_break_tiktoken():
    tokenizer = load_tokenizer(str(ASSETS / "llama3_tiktoken"))
    text = "a" + " " * 1_000_000 + "b" + "\n" * 100_000 + "c"
    assert tokenizer.decode(tokenizer.encode(text, False, False)) == text


def test_unknown_characters_are_not_special():
    tokenizer = load_tokenizer(str(ASSETS / "unigram_sentencepiece"))
    assert tokenizer.unknown_id == 0 and 0 not in tokenizer.special_ids
    assert 0 in tokenizer.encode("日本", False, False)


def save_words(folder: Path, words: list[str], special: list[str], **config) -> Path:
    backend = Backend(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token=words[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(special)
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return folder


def test_unknown_token_of_a_tokenizer_json(tmp_path):
    tokenizer = load_tokenizer(str(save_words(tmp_path, ["<unk>", "a"], ["<unk>", "</s>"])))
    assert tokenizer.unknown_id == 0 and tokenizer.special_ids == {2}
    assert tokenizer.encode("a b </s>", False, True) == [1, 0, 0, 2]


def test_control_token_inside_the_model_vocabulary_is_not_made_of_text(tmp_path):
    # A unigram or word model would take its own "</s>" out of any text.
    folder = save_words(tmp_path, ["<unk>", "<s>", "</s>", "a"], [], bos_token="<s>", eos_token="</s>")
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.encode("a </s> a", True, True) == [1, 3, 0, 0, 3, 2]


def test_equal_bos_and_eos(tmp_path):
    folder = save_words(tmp_path, ["<unk>", "a"], ["<x>"], bos_token="<x>", eos_token={"content": "<x>"})
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.encode("a", True, True) == [2, 1, 2]
    assert tokenizer.encode("a", True, False) == [2, 1] and tokenizer.encode("a", False, True) == [1, 2]


def test_null_means_no_bos_and_other_files_are_asked_in_turn(tmp_path):
    folder = save_words(tmp_path, ["<unk>", "a"], ["<s>", "</s>", "<pad>"], bos_token=None)
    (folder / "generation_config.json").write_text('{"bos_token_id": 2, "eos_token_id": [3, 2]}', "utf-8")
    tokenizer = load_tokenizer(str(folder))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (None, 3, 4)
    assert tokenizer.encode("a", True, True) == [1, 3]


def test_override_by_text(tmp_path):
    tokenizer = load_tokenizer("debug", bos_token="<|pad|>", eos_token="\n")
    assert tokenizer.bos_id == 1023 and tokenizer.decode([tokenizer.eos_id]) == "\n"
    assert tokenizer.decode(tokenizer.encode("a\nb", False, False)) == "a\nb"
    assert tokenizer.fingerprint != load_tokenizer("debug").fingerprint
    for path in ("debug", str(ASSETS / "llama3_tiktoken"), str(ASSETS / "unigram_sentencepiece")):
        with pytest.raises(ConfigError) as refused:
            load_tokenizer(path, eos_token="NOT_IN_VOCAB")
        file = load_tokenizer(path).origin.file
        assert "data.eos_token" in str(refused.value) and "'NOT_IN_VOCAB'" in str(refused.value)
        assert str(file) in str(refused.value)


def test_no_eos_is_refused_when_it_is_needed(tmp_path):
    tokenizer = load_tokenizer(str(save_words(tmp_path, ["<unk>", "a"], [])))
    assert tokenizer.encode("a", True, False) == [1]
    with pytest.raises(ConfigError, match=r"data\.add_eos.*data\.eos_token"):
        tokenizer.encode("a", False, True)


def test_vocabulary_counts_added_tokens_and_gaps(tmp_path):
    words = ["<unk>", *(f"w{n}" for n in range(319))]
    folder = save_words(tmp_path, words, ["<s>"])
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.vocab_size == 321
    tokenizer.check_rows(321)
    tokenizer.check_rows(512)  # padding
    with pytest.raises(ConfigError, match=r"vocab_size = 320.*at least 321"):
        tokenizer.check_rows(320)
    rules = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    rules["model"]["vocab"]["far"] = 70_000
    (folder / "tokenizer.json").write_text(json.dumps(rules), "utf-8")
    assert load_tokenizer(str(folder)).encode("w1 far", False, False) == [2, 70_000]
    assert load_tokenizer(str(folder)).vocab_size == 70_001


def test_kind_is_found_by_content(tmp_path):
    tiktoken_file = ASSETS / "llama3_tiktoken" / "tokenizer.model"
    pieces_file = ASSETS / "unigram_sentencepiece" / "tokenizer.model"
    (tmp_path / "original").mkdir()
    shutil.copy(tiktoken_file, tmp_path / "original" / "tokenizer.model")
    assert load_tokenizer(str(tmp_path)).kind == "tiktoken"
    shutil.copy(pieces_file, tmp_path / "tokenizer.model")  # the folder's own comes first
    assert load_tokenizer(str(tmp_path)).kind == "sentencepiece"
    assert load_tokenizer(str(tiktoken_file)).kind == "tiktoken"
    (tmp_path / "odd").mkdir()
    shutil.copy(pieces_file, tmp_path / "odd" / "any.model")
    assert load_tokenizer(str(tmp_path / "odd")).kind == "sentencepiece"
    shutil.copy(tiktoken_file, tmp_path / "odd" / "other.tiktoken")
    with pytest.raises(ConfigError, match=r"model\.hf_assets_path.*several.*any\.model, other\.tiktoken"):
        load_tokenizer(str(tmp_path / "odd"))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (None, b"", "looked for tokenizer.json"),
        ("tokenizer.model", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        ("tokenizer.model", b"\0\1\2 nonsense", "no tokenizer that is known"),
        ("tokenizer.model", b"\nnonsense", "no sentencepiece model"),
        ("tokenizer.model", b"AA== 0\nAQ== 1\n", "254 of the 256 single bytes"),
        ("tokenizer.model", b"AA== 0\nAQ== one\n", "broken tiktoken file"),
        ("tokenizer.json", b'{"model": ', "no tokenizer.json"),
        ("tokenizer.json", b'{"model": {"type": "NEW"}}', "can't be loaded"),
        ("vocab.json", b"{}", "merges.txt alone is not read"),
    ],
)
def test_unusable_folder_is_named(tmp_path, name, content, says):
    if name:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        load_tokenizer(str(tmp_path))
    assert "model.hf_assets_path" in str(refused.value) and str(tmp_path) in str(refused.value)
    assert says in str(refused.value)


def test_missing_folder_is_named():
    with pytest.raises(
        ConfigError, match=r"model\.hf_assets_path = '/no/such/folder'.*no such folder.*tokenizer\.json"
    ):
        load_tokenizer("/no/such/folder")


def test_shipped_tokenizer():
    tokenizer = load_tokenizer("debug")
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1024, 1021, 1022, 1023)
