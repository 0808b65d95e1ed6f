"""Names for the cases of parametrized tests."""

import re


def label(value: object) -> str:
    """A value as text, without addresses: the names must be the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
