"""What the fork server imports when its ranks become new interpreters: no torch; signals as in warm.py."""

from tandem.signals import ignore_stop_signals

ignore_stop_signals()
