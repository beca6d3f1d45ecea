"""Views of memory that own nothing.

A plan remembers where a tensor lies, not the tensor: it is looked up by address, and used only for a living tensor that has
this address. So a cached view keeps nobody's memory alive and is never read while its memory may be gone.
"""

import ctypes

from torch import Tensor

__all__ = ["keep_for_ever", "view_bytes"]


def view_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a reference to it.

    Args:
        tensor: Contiguous, on CPU; may be empty.

    Returns:
        Writable bytes at ``tensor.data_ptr()``, valid as long as the tensor lives.
    """
    nbytes = tensor.nbytes
    if not nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


def keep_for_ever(tensor: Tensor) -> None:
    """Never give back the memory of a tensor that another process, stopped in the middle, will write into when it goes on.

    Args:
        tensor: Any.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(tensor))
