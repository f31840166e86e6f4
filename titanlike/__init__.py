"""titanlike: one TOML-driven launcher for the whole life of a language model."""

__version__ = "0.1.0"
