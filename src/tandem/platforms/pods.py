"""What the platforms on Kubernetes share: the names that pods resolve by."""

import re


def pod_name(hostname: str, master: str) -> str:
    """The pod's name with the master's domain, where both are pods of one set: short ones do not resolve."""
    pod, (first, _, domain) = hostname.split(".")[0], master.partition(".")
    same_set = re.sub(r"(-[0-9]+)+$", "", pod) == re.sub(r"(-[0-9]+)+$", "", first)
    return f"{pod}.{domain}" if domain and same_set else pod
