"""Break a kernel on purpose: the same function with one line changed."""

import inspect
import linecache
import textwrap
from collections.abc import Callable

from hopper_sim.faults import misuse


def patched(function: Callable, old: str, new: str) -> Callable:
    """`function` recompiled with `old` replaced by `new` in its source; `old` must occur exactly once.

    Verdicts quote the changed source: it is registered under the name "<function>.patched.py".
    """
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(old) != 1:
        raise misuse(f"patched({function.__name__}): {old!r} occurs {source.count(old)} times in its source, not once")
    source = source.replace(old, new)
    filename = f"{function.__name__}.patched.py"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = dict(function.__globals__)
    exec(compile(source, filename, "exec"), namespace)
    return namespace[function.__name__]
