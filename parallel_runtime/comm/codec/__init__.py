"""Objects to bytes and back."""

from parallel_runtime.comm.codec.bodies import Body, Encoded, decode, decode_typed, encode, encode_typed, open_body

__all__ = ["Body", "Encoded", "decode", "decode_typed", "encode", "encode_typed", "open_body"]
