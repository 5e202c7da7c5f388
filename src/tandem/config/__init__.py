"""All settings: typed, documented, and with the source of each value (`sources`).

A component receives only its own slice of the settings (`slices.CheckpointConfig`), an attribute of
`Settings` (`settings.checkpoint`). Field names are unique over all slices
(`settings.checkpoint.checkpoint_every`). A new setting is one line in `slices`.
"""

from tandem.config.arguments import Parser, as_flags
from tandem.config.fields import BestText, Count, Natural
from tandem.config.settings import SETTINGS, SLICES, Settings, TaskJob, checked
from tandem.config.show import as_json, as_toml, explain, markdown
from tandem.config.sources import Given, resolve

__all__ = ["SETTINGS", "SLICES", "BestText", "Count", "Given", "Natural", "Parser", "Settings", "TaskJob"]
__all__ += ["as_flags", "as_json", "as_toml", "checked", "explain", "markdown", "resolve"]
