"""The reference backend: plain PyTorch, written to be read. It is the definition that other backends are held to.

Read it in this order: `layout.py` says which entries a stream retains and where they lie, `attention.py` over
`arithmetic.py` what a query makes of them, `manager.py` how a step goes through both.
"""

from boundedkv.reference.manager import ReferenceManager

__all__ = ["ReferenceManager"]
