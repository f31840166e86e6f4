"""The TOMLs that come with titanlike."""

from __future__ import annotations

from pathlib import Path


def shipped_folder() -> Path:
    """train_configs: inside the package when it was installed, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "train_configs"
    return inside if inside.is_dir() else package.parent / "train_configs"


def shipped_configs() -> dict[str, Path]:
    """The shipped files by name without ending."""
    return {path.stem: path for path in sorted(shipped_folder().glob("*.toml"))}


def find_config(name: str) -> Path | None:
    """A config file by path; a bare name is also looked for in train_configs, with or without its ending."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if path.parent == Path("."):
        return shipped_configs().get(path.name.removesuffix(".toml"))
    return None


def summary(path: Path) -> str:
    """The first comment line of a file, which says what it trains."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith("#:"):
            return line.lstrip("# ").strip()
    return ""
