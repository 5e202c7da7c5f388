"""Data loading: from a global step to a batch on the device."""

from tandem.data.token_files import tokens as tokens
