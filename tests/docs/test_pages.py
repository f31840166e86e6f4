"""What the pages name is there: links, files, keys, commands, lists that must be complete."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.docs.pages import BY_NAME, PAGES, ROOT, blocks, commands, prose, write_named_files
from titanlike import cli
from titanlike.config import refused
from titanlike.config.aliases import REFUSED, RENAMED
from titanlike.config.keys import all_keys, annotation_at
from titanlike.config.load import load_config
from titanlike.config.schema import Config
from titanlike.config.sections.base import fields_by_key
from titanlike.launch.faults import KINDS, PHASES
from titanlike.models.spec import families
from titanlike.observe.sinks import STEP_KEYS
from titanlike.optim.schedule import Schedule

SECTIONS = set(fields_by_key(Config))
PRIVATE = re.compile(r"issue #?\d|/tmp/|/work/|\bhelper session", re.IGNORECASE)
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def _anchors(page) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), target
        assert not anchor or anchor in _anchors(there), target


@pages
def test_files_and_modules_exist(page):
    for name in re.findall(
        r"`((?:titanlike|tests|docs|scripts|benchmarks|train_configs|\.ci)/[\w./*-]*)`", prose(page)
    ):
        assert list(ROOT.glob(name)) if "*" in name else (ROOT / name).exists(), name


@pages
def test_keys_exist(page):
    known = {*all_keys(), *RENAMED, *REFUSED}
    for key in re.findall(r"`(?:--)?([a-z_]+(?:\.[a-z0-9_]+)+)(?:[ =][^`]*)?`", prose(page)):
        is_file = key.endswith((".jsonl", ".json", ".toml", ".py", ".md", ".sh", ".bin", ".pt"))
        if key.split(".")[0] in SECTIONS and not is_file:
            assert key in known or annotation_at(tuple(key.split("."))) is not None, key
    for table in re.findall(r"`\[+([a-z_.]+)\]+`", prose(page)):
        assert annotation_at(tuple(table.split("."))) is not None or table in RENAMED, table


@pages
def test_pages_speak_of_the_project_alone(page):
    assert not PRIVATE.search(page.read_text("utf-8").replace("/tmp/killed", ""))


@pages
def test_commands_are_right(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_named_files(page, tmp_path)
    if page.name == "extending.md":
        (tmp_path / "sums.py").write_text("")  # the real one registers names for the whole process: test_extending
    for command in commands(page):
        if command.training():
            command.check()
        elif command.program == "titanlike":
            assert command.words[1] in cli.COMMANDS, command.text
        elif command.words[:2] != (".", ".venv/bin/activate"):
            assert (ROOT / command.program).exists(), command.text


@pages
def test_tomls_load(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(write_named_files(page, tmp_path)) == len(blocks(page, "toml")), "a TOML without its name on top"
    for path in sorted(tmp_path.glob("*.toml")):
        load_config([str(path)], imports=False)


def test_architecture_shows_the_tree():
    tree = blocks(BY_NAME["architecture.md"], "text")[0]
    inside = re.findall(r"^  ([\w./]+)", tree, re.MULTILINE)
    beside = re.findall(r"^([\w./]+)", tree, re.MULTILINE)[1:]
    for name in [f"titanlike/{name}" for name in inside] + beside:
        assert (ROOT / name).exists(), name
    rooms = {path.parent.name for path in (ROOT / "titanlike").glob("*/__init__.py")}
    assert rooms <= {name.rstrip("/") for name in inside}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    if tracked:
        folders = {line.split("/")[0] for line in tracked.splitlines() if "/" in line and not line.startswith(".")}
        assert folders <= {"titanlike", *(name.rstrip("/") for name in beside)}


def test_models_lists_families_and_flavors():
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", BY_NAME["models.md"].read_text("utf-8"), re.MULTILINE)
    listed = {name: re.findall(r"`([^`]+)`", flavors) for name, flavors in rows}
    assert listed == {name: list(families.get(name).flavors) for name in families.names()}


def test_changelog_lists_what_is_refused():
    """Both ways: nothing that is refused is left out, nothing that is built is called unbuilt."""
    text = BY_NAME["CHANGELOG.md"].read_text("utf-8").split("## Not yet")[1]
    named = set(re.findall(r"`(?:\[+)?([a-z_]+(?:\.[a-z0-9_]+)*)(?:\]+)?(?: = [^`]*)?`", text))
    refused_ones = {*refused.SECTIONS, *refused.BUILT, *refused.DEFAULT_ONLY}
    assert refused_ones - named == set(), "refused, and not under “Not yet”"
    keys = {name for name in named if name in SECTIONS or (name.split(".")[0] in SECTIONS and "." in name)}
    assert keys <= refused_ones, "under “Not yet”, and not refused"
    for command in cli.NOT_BUILT:
        assert f"`titanlike {command}`" in text


def test_metrics_names_every_key():
    rows = re.findall(r"^\| `(\w+)`", BY_NAME["metrics.md"].read_text("utf-8"), re.MULTILINE)
    assert set(STEP_KEYS) <= set(rows)


def test_running_names_every_fault():
    text = BY_NAME["running.md"].read_text("utf-8")
    assert all(f"`{kind}`" in text for kind in KINDS) and all(phase in text for phase in PHASES)


def test_numerics_shows_the_schedule():
    table = BY_NAME["numerics.md"].read_text("utf-8").split("<!-- schedule -->")[1].split("##")[0]
    rows = {
        name: [float(x) for x in cells.split("|")]
        for name, cells in re.findall(r"^\| (\w.*?) \| (.*) \|$", table, re.MULTILINE)
    }
    schedules = {
        "linear": Schedule(4, 6, 10, "linear", 0.0),
        "linear, ratio 0.4": Schedule(4, 4, 10, "linear", 0.0),
        "sqrt": Schedule(4, 6, 10, "sqrt", 0.0),
        "cosine, minimum 0.1": Schedule(4, 6, 10, "cosine", 0.1),
    }
    for name, schedule in schedules.items():
        assert rows[name] == pytest.approx([schedule.factor(step) for step in rows["step"]], abs=6e-4), name
