"""The TOML reader of the standard library, or its twin on Python 3.10."""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the twin is not installed where the standard library has the reader
    TOMLDecodeError = ValueError

    def loads(s: str, /) -> dict[str, Any]: ...

elif sys.version_info >= (3, 11):
    from tomllib import TOMLDecodeError, loads
else:
    from tomli import TOMLDecodeError, loads

__all__ = ["TOMLDecodeError", "loads"]
