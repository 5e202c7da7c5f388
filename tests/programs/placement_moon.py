from tandem.platforms.environment import Columns, Placement, PlatformEnv

ORDER = 5
COLUMNS = Columns(("CRATERS",), ("CRATER",))


def detect(environ):
    return "CRATER" in environ


def read(facts: PlatformEnv) -> Placement:
    facts = facts.for_platform("moon", ("CRATER",), COLUMNS)
    return Placement("moon", facts.number("nodes"), facts.number("node_rank"), None, facts.host(), 1969)
