"""This node's part of a run. Calling the package, `tandem.launch(function)`, runs a function as a job."""

import sys
from types import ModuleType
from typing import Any, cast


class _Callable(ModuleType):
    """`tandem.launch` is this package as soon as a module in it is imported: so the package can be called."""

    def __call__(
        self,
        function: Any,
        /,
        *arguments: Any,
        nodes: int = 2,
        nproc: int = 1,
        wait: bool = True,
        **settings: Any,
    ) -> Any:
        from tandem.launch.from_python import launch

        return cast(Any, launch)(function, *arguments, nodes=nodes, nproc=nproc, wait=wait, **settings)


sys.modules[__name__].__class__ = _Callable
