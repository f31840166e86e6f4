"""Sources: which files are found, how each format is read, and what each kind of bad input does."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from huggingface_hub.errors import RepositoryNotFoundError

from titanlike.config.sections.data import Data
from titanlike.data import hub, readers
from titanlike.data.registry import Files, HubFiles, Texts, datasets
from titanlike.data.sources import Document, find_files, open_source
from titanlike.errors import ConfigError, DataError

TEXTS = ["doc-000 one", "doc-001 zwei – drei", "doc-002 \u2028 separator", "doc-003 " + "long " * 200, "doc-004"]
COMPRESS = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def jsonl(texts, **dump) -> bytes:
    return b"".join(json.dumps({"text": text, "n": n}, **dump).encode() + b"\n" for n, text in enumerate(texts))


def read(path: Path | list[str], **data) -> list[Document]:
    paths = path if isinstance(path, list) else [str(path)]
    return list(open_source(Data(path=paths, **data)).documents())


def texts_of(path: Path | list[str], **data) -> list[str]:
    return [document.text for document in read(path, **data)]


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize("small_blocks", [False, True])
def test_jsonl(tmp_path, monkeypatch, ending, small_blocks):
    if small_blocks:
        monkeypatch.setattr(readers, "BLOCK_BYTES", 7)
    path = tmp_path / f"a.jsonl{ending}"
    lines = jsonl(TEXTS, ensure_ascii=False).replace(b"\n", b"\r\n", 1) + b"\n\n" + jsonl(["last"]).rstrip()
    path.write_bytes(COMPRESS[ending](b"\xef\xbb\xbf" + lines))
    found = read(path)
    assert [document.text for document in found] == [*TEXTS, "last"]
    assert [document.line for document in found] == [1, 2, 3, 4, 5, 8]
    assert {document.file for document in found} == {str(path)}


def test_compressed_in_several_frames_and_under_a_wrong_name(tmp_path):
    two = [jsonl(TEXTS[:2]), jsonl(TEXTS[2:])]
    for name, compress in ((".zst", COMPRESS[".zst"]), (".gz", COMPRESS[".gz"]), ("", COMPRESS[".xz"])):
        path = tmp_path / f"frames.jsonl{name}"
        path.write_bytes(b"".join(compress(part) for part in two))
        assert texts_of(path) == TEXTS


@pytest.mark.parametrize("ending", [".gz", ".zst", ".bz2", ".xz"])
def test_file_cut_short_is_named(tmp_path, ending):
    path = tmp_path / f"cut.jsonl{ending}"
    whole = COMPRESS[ending](jsonl([f"{n * n * n} {n}" for n in range(2000)]))
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=rf"cut\.jsonl\{ending}: can't be read as jsonl"):
        read(path, bad_lines="skip")


@pytest.mark.parametrize(
    "content",
    [
        json.dumps([{"text": text} for text in TEXTS]),
        json.dumps({"data": [{"text": text} for text in TEXTS]}),
        json.dumps({"version": 1, "data": [{"text": text} for text in TEXTS]}, indent=2),
        jsonl(TEXTS).decode(),
        jsonl(TEXTS[:1]).decode() + "\n" + jsonl(TEXTS[1:]).decode(),
    ],
)
def test_json_of_every_shape(tmp_path, monkeypatch, content):
    path = tmp_path / "a.json"
    path.write_text(content, "utf-8")
    assert texts_of(path) == TEXTS
    assert texts_of(path, format="json") == TEXTS
    monkeypatch.setattr(readers, "BLOCK_BYTES", 64)
    assert texts_of(path) == TEXTS


@pytest.mark.parametrize("content", ["{}", '{"data": 3}', "3", "[1", '{\n "a": '])
def test_json_without_records(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_text(content, "utf-8")
    with pytest.raises(DataError, match=r"a\.json"):
        read(path)


def test_one_text_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n", "utf-8")
    (tmp_path / "b.text.gz").write_bytes(gzip.compress(b"\xef\xbb\xbfthree"))
    assert texts_of(tmp_path) == ["one\ntwo\n", "three"]
    (tmp_path / "b.text.gz").write_bytes(b"latin \xe9")
    with pytest.raises(DataError, match=r"b\.text\.gz, document 1: invalid UTF-8 \(byte 0xe9 at 6\)"):
        read(tmp_path)


def write_parquet(path: Path, column: pyarrow.Array, name="text") -> Path:
    pyarrow.parquet.write_table(pyarrow.table({"n": range(len(column)), name: column}), path, row_group_size=2)
    return path


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.binary()])
def test_parquet(tmp_path, monkeypatch, kind):
    column = pyarrow.array([*TEXTS, None], pyarrow.string()).cast(kind)
    found = read(write_parquet(tmp_path / "a.parquet", column))
    assert [(document.text, document.line) for document in found] == [(text, n) for n, text in enumerate(TEXTS, 1)]
    monkeypatch.setattr(readers, "BLOCK_BYTES", 1)
    assert read(tmp_path / "a.parquet") == found
    write_parquet(tmp_path / "b.parquet", pyarrow.array(TEXTS).dictionary_encode(), "body")
    assert texts_of(tmp_path / "b.parquet", text_column="body") == TEXTS


def test_parquet_that_does_not_fit(tmp_path):
    write_parquet(tmp_path / "names.parquet", pyarrow.array(["a"]), "body")
    with pytest.raises(
        DataError, match=r"names\.parquet: no column 'text' \(data\.text_column\); the file has n, body"
    ):
        read(tmp_path / "names.parquet", bad_lines="skip")
    write_parquet(tmp_path / "types.parquet", pyarrow.array([[1], [2]]))
    with pytest.raises(DataError, match=r"types\.parquet: column 'text' .* not strings"):
        read(tmp_path / "types.parquet")
    (tmp_path / "no.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"no\.parquet: can't be read as parquet"):
        read(tmp_path / "no.parquet")
    bad = pyarrow.array([b"fine", b"bad \xff"], pyarrow.binary())
    with pytest.raises(DataError, match=r"bad\.parquet, row 2: invalid UTF-8"):
        read(write_parquet(tmp_path / "bad.parquet", bad))


BAD_LINES = {
    17: (b'{"text": "glued"}{"text": "objects"}', "more than one JSON value on the line"),
    20: (b'{"text": "cut in the mid', "no complete JSON value"),
    25: (b'{"title": "no text"}', "no field 'text'"),
    30: (b'{"text": "bad \xff byte"}', "invalid UTF-8"),
    31: (b'{"text": ["a", "list"]}', "it is a list"),
    32: (b'["no", "object"]', "should be a JSON object"),
    33: (b'{"text": "\\ud800 alone"}', "lone surrogate"),
    34: (b"[" * 100_000, "JSON that can't be read"),
}


def write_bad(path: Path, *places: int) -> None:
    lines = jsonl([f"doc-{n:03}" for n in range(1, 41)]).splitlines()
    for place in places:
        lines[place - 1] = BAD_LINES[place][0]
    path.write_bytes(b"\n".join(lines) + b"\n")


@pytest.mark.parametrize("place", BAD_LINES)
def test_bad_line_stops_with_file_and_line(tmp_path, monkeypatch, place):
    monkeypatch.setattr(readers, "BLOCK_BYTES", 100)
    (tmp_path / "shard-a.jsonl").write_bytes(jsonl(["good"]))
    write_bad(tmp_path / "shard-b.jsonl", place)
    with pytest.raises(DataError) as stopped:
        read(tmp_path)
    assert f"shard-b.jsonl, line {place}: " in str(stopped.value) and BAD_LINES[place][1] in str(stopped.value)
    assert "data.bad_lines" in str(stopped.value)


def test_bad_lines_skipped_are_counted(tmp_path):
    write_bad(tmp_path / "b.jsonl", *BAD_LINES)
    source = open_source(Data(path=[str(tmp_path)], bad_lines="skip"))
    assert [document.line for document in source.documents()] == [n for n in range(1, 41) if n not in BAD_LINES]
    assert source.counts == {"empty": 0, "null": 0, "blank": 0, "broken": 8}
    assert len(source.problems) == 5 and "line 17" in source.problems[0]


def test_surrogate_pair_in_escapes_is_a_character(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d\\ude00"}', "utf-8")
    assert texts_of(tmp_path) == ["😀"]


def test_documents_without_text_are_counted(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(["one", "", " ", None, "\n\t\u3000", "two", ""]))
    source = open_source(Data(path=[str(tmp_path)]))
    assert [document.text for document in source.documents()] == ["one", "two"]
    assert source.counts == {"empty": 2, "null": 1, "blank": 2, "broken": 0}


def test_folders_and_globs_come_in_the_order_of_names(tmp_path):
    for name in ("b/2.jsonl", "b/10.jsonl", "a.jsonl", ".hidden.jsonl", "_SUCCESS.jsonl", ".git/x.jsonl", "script.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(jsonl([name]))
    assert texts_of(tmp_path) == ["a.jsonl", "b/10.jsonl", "b/2.jsonl"]
    assert texts_of([str(tmp_path / "b" / "*.jsonl"), str(tmp_path / "a.jsonl")]) == [
        "b/10.jsonl",
        "b/2.jsonl",
        "a.jsonl",
    ]
    assert texts_of([str(tmp_path / "**" / "[ab0-9]*.jsonl")]) == ["a.jsonl", "b/10.jsonl", "b/2.jsonl"]


def test_a_file_named_twice_is_read_once(tmp_path, caplog):
    (tmp_path / "a.jsonl").write_bytes(jsonl(["x"]))
    assert texts_of([str(tmp_path), str(tmp_path / "*.jsonl")]) == ["x"]
    assert "named twice" in caplog.text


def test_paths_that_stand_for_nothing(tmp_path):
    (tmp_path / "corpus.jsonl").write_bytes(jsonl(["x"]))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "load.py").write_text("raise SystemExit('was run')")
    for path, says in (
        ("corpsu.jsonl", "no such file or folder; did you mean 'corpus.jsonl'"),
        ("none/at/all", "isn't there either"),
        ("*.parquet", "no file matches"),
        ("code", r"no file in it can be read; looked for \.jsonl.*there is load\.py"),
    ):
        with pytest.raises(DataError, match=rf"data\.path = .*{says}"):
            read(tmp_path / path)
    with pytest.raises(DataError, match=r"load\.py: its ending says no format.*data\.format"):
        read(tmp_path / "code" / "load.py")


def test_folder_of_several_formats_asks_which(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(["x"]))
    (tmp_path / "README.txt").write_text("read me")
    with pytest.raises(DataError, match=r"1 text, 1 jsonl.*data\.format"):
        read(tmp_path)
    assert texts_of(tmp_path, format="jsonl") == ["x"]


def test_key_changes_with_the_files(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(["x"]))
    keys = [open_source(Data(path=[str(path)])).key()]
    keys.append(open_source(Data(path=[str(path)], bad_lines="skip")).key())
    path.write_bytes(jsonl(["xy"]))
    keys.append(open_source(Data(path=[str(path)])).key())
    assert len({json.dumps(key) for key in keys}) == 3


def test_names_that_ship():
    assert {"debug", "c4_test", "c4", "c4_validation"} <= set(datasets.names())
    assert sum(1 for _ in open_source(Data()).documents()) == 229
    assert sum(1 for _ in open_source(Data(dataset="c4_test")).documents()) == 300
    with pytest.raises(ConfigError, match=r"data\.dataset = 'c4_tset'.*'c4_test'"):
        open_source(Data(dataset="c4_tset"))


def test_names_of_the_users(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "from a file"}')
    datasets.register("test_files")(lambda data: Files(path=(str(tmp_path),), text_column="body"))
    datasets.register("test_texts")(lambda data: Texts(read=lambda: iter(["one", None, "two"]), version="1"))
    assert [document.text for document in open_source(Data(dataset="test_files")).documents()] == ["from a file"]
    source = open_source(Data(dataset="test_texts"))
    assert [(document.text, document.line) for document in source.documents()] == [("one", 1), ("two", 3)]
    assert source.counts["null"] == 1


# The Hub, without a network.

C4_CARD = [
    {"config_name": "en", "data_files": [{"split": "train", "path": "en/c4-train.*.json.gz"}]},
    {"config_name": "de", "default": True, "data_files": [{"split": "train", "path": ["de/a-*.json.gz", "de/b/"]}]},
]
REPOSITORY = {
    "README.md": 1,
    "load.py": 1,
    "en/c4-train.00001-of-00002.json.gz": 5,
    "en/c4-train.00000-of-00002.json.gz": 5,
    "en/c4-validation.00000.json.gz": 5,
    "de/a-1.json.gz": 5,
    "de/b/x.json.gz": 5,
    "de/c.json.gz": 5,
}


def chosen(files, configs=(), wanted="auto", **where) -> list[str]:
    return [name for name, _ in hub.choose_files(files, list(configs), HubFiles(id="org/name", **where), wanted)]


def test_hub_files_by_the_card():
    assert chosen(REPOSITORY, C4_CARD, subset="en") == [
        "en/c4-train.00000-of-00002.json.gz",
        "en/c4-train.00001-of-00002.json.gz",
    ]
    assert chosen(REPOSITORY, C4_CARD) == ["de/a-1.json.gz", "de/b/x.json.gz"]
    with pytest.raises(DataError, match=r"no subset 'fr' \(data\.subset\); there are en, de"):
        chosen(REPOSITORY, C4_CARD, subset="fr")
    with pytest.raises(DataError, match=r"no split 'test' \(data\.split\); there are train"):
        chosen(REPOSITORY, C4_CARD, subset="en", split="test")


def test_hub_files_by_their_names():
    files = {"data/train-0.parquet": 1, "data/training/1.parquet": 1, "data/dev.parquet": 1, "trains.parquet": 1}
    assert chosen(files) == ["data/train-0.parquet", "data/training/1.parquet"]
    assert chosen(files, split="validation") == ["data/dev.parquet"]
    with pytest.raises(DataError, match=r"no split 'test'.*found train, validation"):
        chosen(files, split="test")
    assert chosen({"a/x.parquet": 1, "b/x.parquet": 1}, subset="b") == ["b/x.parquet"]
    with pytest.raises(DataError, match=r"no subset 'c'.*folders are a, b"):
        chosen({"a/x.parquet": 1, "b/x.parquet": 1}, subset="c")
    assert chosen({"one.jsonl": 1, "two.jsonl": 1, "notes.txt": 1}) == ["one.jsonl", "two.jsonl"]
    assert chosen({"one.jsonl": 1, "notes.txt": 1}, wanted="text") == ["notes.txt"]


def test_hub_code_is_never_run():
    with pytest.raises(DataError, match="Python files of a data set are never run"):
        chosen({"name.py": 1, "README.md": 1})


def fake_hub(monkeypatch, tmp_path, info) -> list[str]:
    """Let the client answer from here; returns the list of files that are downloaded."""
    downloaded = []

    def download(id, file, *, repo_type, revision):
        downloaded.append(file)
        path = tmp_path / file.replace("/", "-")
        path.write_bytes(jsonl([f"{id} {file} {revision}"]))
        return str(path)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, id, **options: info(id))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return downloaded


def test_hub_data_set(tmp_path, monkeypatch):
    siblings = [SimpleNamespace(rfilename=name, size=1) for name in ("train.jsonl", "test.jsonl", "load.py")]
    info = SimpleNamespace(sha="c0ffee", card_data=None, siblings=siblings)
    asked = []
    downloaded = fake_hub(monkeypatch, tmp_path, lambda id: asked.append(id) or info)
    for _ in range(2):
        source = open_source(Data(dataset="org/name"), cache_folder=tmp_path)
        assert source.key()["files"] == [["org/name/train.jsonl", "jsonl", 1, "c0ffee"]]
    assert asked == ["org/name"] and downloaded == []
    assert [document.text for document in source.documents()] == ["org/name train.jsonl c0ffee"]
    assert downloaded == ["train.jsonl"]


def test_hub_without_a_network(tmp_path, monkeypatch, caplog):
    def offline(id):
        raise OSError("[Errno -2] Name or service not known")

    fake_hub(monkeypatch, tmp_path, offline)
    with pytest.raises(DataError, match=r"data\.dataset = 'allenai/c4'.*can't be reached.*not known.*data\.path"):
        open_source(Data(dataset="c4"), cache_folder=tmp_path)
    info = SimpleNamespace(
        sha="c0ffee", card_data=None, siblings=[SimpleNamespace(rfilename="en/train.json.gz", size=1)]
    )
    fake_hub(monkeypatch, tmp_path, lambda id: info)
    known = open_source(Data(dataset="c4"), cache_folder=tmp_path).key()
    fake_hub(monkeypatch, tmp_path, offline)
    monkeypatch.setattr(hub, "_FRESH_SECONDS", 0.0)
    assert open_source(Data(dataset="c4"), cache_folder=tmp_path).key() == known
    assert "from an earlier run" in caplog.text


def test_hub_data_set_that_is_not_there(tmp_path, monkeypatch):
    def missing(id):
        raise RepositoryNotFoundError("404", response=SimpleNamespace(headers={}, request=None))

    fake_hub(monkeypatch, tmp_path, missing)
    with pytest.raises(DataError, match="the Hub has no such data set"):
        open_source(Data(dataset="org/nmae"), cache_folder=tmp_path)
    with pytest.raises(DataError, match=r"data\.split = 'train\[:1%\]'"):
        open_source(Data(dataset="org/name", split="train[:1%]"), cache_folder=tmp_path)


def test_find_files_does_not_open_them(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(b"no gzip at all")
    assert [file.format for file in find_files([str(tmp_path)])] == ["jsonl"]
