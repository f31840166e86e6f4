"""The pages for people, taken apart: code blocks, commands, links, names."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from titanlike.config import Config, load_config
from titanlike.config.refused import refuse_unbuilt

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")] + sorted(ROOT.glob("docs/*.md"))
BY_NAME = {page.name: page for page in PAGES}
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_VARIABLE = re.compile(r"[A-Z_]+=")


@dataclass(frozen=True)
class Command:
    """One command of a `bash` block: its words, and the variables written before it."""

    text: str
    words: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def program(self) -> str:
        return self.words[0]

    @property
    def world(self) -> int:
        """Processes of the job that it starts."""
        return int(self.variables.get("NGPU", "1")) * int(self.variables.get("NNODES", "1"))

    def training(self) -> list[str] | None:
        """The config's part of a command that trains, None for any other command."""
        file = self.variables.get("CONFIG_FILE", "debug_model.toml")
        if self.program == "./run_train.sh":
            return [file, *self.words[1:]]
        if self.words[:2] == ("titanlike", "train") and "--help" not in self.words:
            return list(self.words[2:])
        if "titanlike.train" in self.words:
            return list(self.words[self.words.index("titanlike.train") + 1 :])
        return None

    def check(self) -> Config:
        """The config that it trains, which must be right for its processes and ask for nothing that isn't built."""
        argv = self.training()
        assert argv is not None, f"{self.text}: trains nothing"
        config = load_config(argv, world=self.world)
        assert refuse_unbuilt(config) == [], self.text
        return config


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in that language."""
    return [text for kind, text in _FENCE.findall(page.read_text("utf-8")) if kind == language]


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return _FENCE.sub("", page.read_text("utf-8"))


def commands(page: Path) -> list[Command]:
    """The commands of a page's `bash` blocks, in order."""
    found = []
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words:
                end = words.index("&&") if "&&" in words else len(words)
                found.append(_command(words[:end]))
                words = words[end + 1 :]
    return found


def _command(words: list[str]) -> Command:
    count = next(n for n, word in enumerate(words) if not _VARIABLE.match(word))
    variables = dict(word.split("=", 1) for word in words[:count])
    return Command(shlex.join(words), tuple(words[count:]), variables)


def write_named_files(page: Path, folder: Path, language: str = "toml") -> list[Path]:
    """Write the blocks whose first line is `# NAME.toml` under that name."""
    written = []
    for text in blocks(page, language):
        if name := re.match(r"# (\S+\.toml)$", text.splitlines()[0]):
            written.append(folder / name.group(1))
            written[-1].write_text(text)
    return written
