"""What a run is: a class a section, read from TOML and the command line. Imports no torch."""

from titanlike.config.dump import dump_toml
from titanlike.config.load import load_config
from titanlike.config.schema import Config

__all__ = ["Config", "dump_toml", "load_config"]
