"""The fast backend: a whole batch laid out at once, attended by Triton kernels. Written to be served.

Read it in this order: `planner.py` (the table), `kernels.py` over `tiles.py` and `arithmetic.py` (what a program does
with a line of it), `launch.py` (how many programs), `manager.py` (a step).

Without a GPU the kernels run in Triton's interpreter: the same bits, slowly.
"""

from boundedkv.fast.runtime import require_triton

require_triton()

from boundedkv.fast.manager import FastManager  # noqa: E402

__all__ = ["FastManager"]
