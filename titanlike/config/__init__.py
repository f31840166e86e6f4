"""What a run is: a class a section, read from TOML and the command line. Imports no torch."""

from titanlike.config.schema import Config

__all__ = ["Config"]
