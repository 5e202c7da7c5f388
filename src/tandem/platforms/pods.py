"""Name pods so that other pods can resolve them; shared by the Kubernetes platforms."""

import re


def pod_name(hostname: str, master: str) -> str:
    """Return the pod's name, with the master's domain if both belong to one set.

    Short names do not resolve there.
    """
    pod, (first, _, domain) = hostname.split(".")[0], master.partition(".")
    # Pods of one set differ only in the indices at the end of their names.
    same_set = re.sub(r"(-[0-9]+)+$", "", pod) == re.sub(r"(-[0-9]+)+$", "", first)
    return f"{pod}.{domain}" if domain and same_set else pod
