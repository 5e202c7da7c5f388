from tandem.platforms.environment import Placement, PlatformEnv, VariableNames

ORDER = 5
VARIABLE_NAMES = VariableNames(("CRATERS",), ("CRATER",))


def detect(environ):
    return "CRATER" in environ


def read(facts: PlatformEnv) -> Placement:
    facts = facts.for_platform("moon", ("CRATER",), VARIABLE_NAMES)
    return Placement("moon", facts.number("nodes"), facts.number("node_rank"), None, facts.host(), 1969)
